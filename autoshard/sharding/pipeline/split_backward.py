"""Splits the gradients of the layers in two: those of a layer's input, and those of its weights.

The next stage waits only for the gradient of the input. So the gradients of the weights can wait until a stage would
be idle. They are computed from the same residuals, and from values of the first part, which wait in slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.microbatches.flow import HEAVY
from autoshard.sharding.offload.edits import call_of
from autoshard.sharding.pipeline.stage_cut import Stack, StageCut
from autoshard.sharding.program.array_sizes import nbytes

Body = Callable[..., list[Any]]


@shown
@dataclass(eq=False)
class Halves:
    """The two parts of a backward scan's body. Both take constants, carry and slices, as the body does.

    Attributes:
        inputs: computes the new carry, and the values that wait.
        weights: computes what the scan stacks, from constants, slices and the values that waited.
        waiting: the values that wait, of one layer.
    """

    inputs: Body
    weights: Body
    waiting: list[Any]


def split_backward(cut: StageCut) -> Halves:
    """Split the backward scan of a program."""
    stack: Stack = cut.backward
    jaxpr, held = _compat.split_constants(_without_remat(stack.eqn.params["jaxpr"]))
    given = jaxpr.invars[len(held) :]
    n_consts, n_carry = len(stack.consts), len(stack.carry)
    consts, carry, slices = given[:n_consts], given[n_consts : n_consts + n_carry], given[n_consts + n_carry :]
    carried, stacked = jaxpr.outvars[:n_carry], jaxpr.outvars[n_carry:]
    varying = {v for v, atom in zip(consts, stack.consts, strict=True) if atom in cut.own}
    first, late, waiting = _split(jaxpr, carried, stacked, {*carry, *varying})
    constants = dict(zip(jaxpr.invars[: len(held)], held, strict=True))

    def inputs(*args: Any) -> list[Any]:
        env = _run(first, {**constants, **dict(zip(given, args, strict=True))})
        return [_read(env, a) for a in (*carried, *waiting)]

    def weights(*args: Any) -> list[Any]:
        known = dict(zip((*consts, *slices, *waiting), args, strict=True))
        return [_read(_run(late, {**constants, **known}), a) for a in stacked]

    return Halves(inputs, weights, waiting)


def _split(
    jaxpr: Any, carried: Sequence[Any], stacked: Sequence[Any], moving: set[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """The equations of the two parts, and the values that wait in between.

    The first part also computes cheap values that only the second part takes, if fewer bytes then wait: such as the
    product of two activations in place of both.

    Args:
        jaxpr: the body.
        carried: what the first part computes.
        stacked: what the second part computes.
        moving: inputs that only the first part has.
    """
    wanted = _needed(jaxpr, stacked)

    def parts(early: set[int]) -> tuple[list[Any], list[Any], list[Any]]:
        first = [eqn for eqn in jaxpr.eqns if id(eqn) in early]
        late = [eqn for eqn in wanted if id(eqn) not in early]
        made = {var for eqn in first for var in eqn.outvars} | moving
        taken = [a for eqn in late for a in eqn.invars] + [*stacked]
        return first, late, [*dict.fromkeys(a for a in taken if not isinstance(a, _compat.Literal) and a in made)]

    def waiting_bytes(early: set[int]) -> int:
        return sum(nbytes(var.aval) for var in parts(early)[2])

    early = {id(eqn) for eqn in _needed(jaxpr, carried)}
    for eqn in [eqn for eqn in wanted if eqn.primitive.name in (*HEAVY, "reduce_sum")]:
        for atom in eqn.invars:
            makers = _needed(jaxpr, [atom])
            more = early | {id(maker) for maker in makers}
            cheap = all(id(maker) in early or maker.primitive.name not in HEAVY for maker in makers)
            if more > early and cheap and waiting_bytes(more) < waiting_bytes(early):
                early = more
    return parts(early)


def _needed(jaxpr: Any, wanted: Sequence[Any]) -> list[Any]:
    """The equations that compute some variables, in order."""
    needed, found = {a for a in wanted if not isinstance(a, _compat.Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            found.append(eqn)
            needed |= {a for a in eqn.invars if not isinstance(a, _compat.Literal)}
    return found[::-1]


def _run(eqns: Sequence[Any], env: dict[Any, Any]) -> dict[Any, Any]:
    for eqn in eqns:
        with _compat.source_of(eqn):
            results = _compat.bind(eqn, eqn.params, *(_read(env, a) for a in eqn.invars))
        env |= zip(eqn.outvars, results, strict=True)
    return env


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, _compat.Literal) else env[atom]


def _without_remat(closed: Any) -> Any:
    """Inline checkpoints and calls.

    A checkpoint keeps XLA from merging recomputed operators with those of the forward pass. This body has no forward
    pass, so it needs none.
    """

    def evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
        jaxpr = _compat.open_jaxpr(closed)
        env = dict(zip(jaxpr.constvars, _compat.constants(closed), strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxpr.eqns:
            inner = eqn.params["jaxpr"] if eqn.primitive.name == "remat2" else call_of(eqn)
            operands = [_read(env, a) for a in eqn.invars]
            with _compat.source_of(eqn):
                results = evaluate(inner, operands) if inner is not None else _compat.bind(eqn, eqn.params, *operands)
            env |= zip(eqn.outvars, results, strict=True)
        return [_read(env, a) for a in jaxpr.outvars]

    shapes = map(_compat.shape_dtype_of, _compat.open_jaxpr(closed).invars)
    return jax.make_jaxpr(lambda *args: evaluate(closed, args))(*shapes)
