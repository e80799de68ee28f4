"""Evaluates a jaxpr again, with calls inlined and with edits. Under `jax.make_jaxpr` that writes the changed program.

An edit computes variables of a frame in another way: it reads variables of the frame and writes others, before the
equation at its position, and the equations that it replaces are skipped. A key stands for a value that has no variable
in the original program. A frame returns the keys that it exports, and takes the keys that it imports. If the body of a
forward scan exports a key, the scan stacks it; the body of the backward scan imports it slice by slice. An edit also
reads variables and keys of the frames around its own; in a loop, these are the same in all iterations.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.offload.edits import call_of


@shown
@dataclass(eq=False)
class Edit:
    """One change of one frame.

    Attributes:
        reads: the variables and keys that it takes, of its frame or of those around it.
        writes: the variables and keys that it makes.
        compute: the function from the one to the other.
        eqn: the equation whose source line and names it gets.
    """

    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    compute: Callable[..., Sequence[Any]]
    eqn: Any


@shown
@dataclass(eq=False)
class FrameEdits:
    """The changes of one frame.

    Attributes:
        before: position of an equation -> the edits that come before it.
        skipped: positions of equations that are not evaluated.
        operands: position of an equation, number of an operand -> the key that the equation takes instead.
        exports: keys that the frame returns besides its results.
        imports: keys that the frame takes besides its inputs.
        children: position of an equation -> the changes of the frame within it.
    """

    before: dict[int, list[Edit]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    operands: dict[tuple[int, int], Hashable] = field(default_factory=dict)
    exports: list[Hashable] = field(default_factory=list)
    imports: list[Hashable] = field(default_factory=list)
    children: dict[int, FrameEdits] = field(default_factory=dict)

    def at(self, path: Sequence[int]) -> FrameEdits:
        """Return the changes of the frame at a path below this one; create them if there are none."""
        found = self
        for position in path:
            found = found.children.setdefault(position, FrameEdits())
        return found


_NO_EDITS = FrameEdits()


def evaluated(closed: Any, edits: FrameEdits = _NO_EDITS) -> Callable[..., list[Any]]:
    """Return a closed jaxpr with edits as a function from its flat inputs to its flat results."""
    return lambda *args: _evaluate(closed, edits, args, {})


def rewritten(closed: Any, edits: FrameEdits = _NO_EDITS) -> Any:
    """Return a closed jaxpr with edits, without dead code. Without edits, calls are inlined, in bodies too."""
    shapes = map(_compat.shape_dtype_of, _compat.open_jaxpr(closed).invars)
    return _compat.dce(jax.make_jaxpr(evaluated(closed, edits))(*shapes))


def _evaluate(closed: Any, edits: FrameEdits, args: Sequence[Any], around: Mapping[Any, Any]) -> list[Any]:
    """Evaluate one frame. The imported keys follow its inputs, and the exported ones its results."""
    jaxpr = _compat.open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, _compat.constants(closed), strict=True))
    env |= zip((*jaxpr.invars, *edits.imports), args, strict=True)
    scope = ChainMap(env, cast("dict[Any, Any]", around))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    def compute(edits: Sequence[Edit]) -> None:
        for edit in edits:
            with _compat.source_of(edit.eqn):
                env.update(zip(edit.writes, edit.compute(*map(scope.__getitem__, edit.reads)), strict=True))

    for position, eqn in enumerate(jaxpr.eqns):
        compute(edits.before.get(position, ()))
        if position in edits.skipped:
            continue
        with _compat.source_of(eqn):
            inner = edits.children.get(position, _NO_EDITS)
            operands = [
                env[edits.operands[position, n]] if (position, n) in edits.operands else read(atom)
                for n, atom in enumerate(eqn.invars)
            ] + [env[key] for key in inner.imports]
            results = _equation(eqn, inner, operands, scope)
        env.update(zip((*eqn.outvars, *inner.exports), results, strict=True))
    compute(edits.before.get(len(jaxpr.eqns), ()))
    return [read(atom) for atom in jaxpr.outvars] + [env[key] for key in edits.exports]


def _equation(eqn: Any, edits: FrameEdits, operands: list[Any], around: Mapping[Any, Any]) -> list[Any]:
    if (called := call_of(eqn)) is not None:
        return _evaluate(called, edits, operands, around)
    if eqn.primitive.name == "scan":
        return bind_scan(eqn, lambda *args: _evaluate(eqn.params["jaxpr"], edits, args, around), operands)
    if eqn.primitive.name == "remat2":
        return bind_checkpoint(eqn, lambda *args: _evaluate(eqn.params["jaxpr"], edits, args, around), operands)
    return _compat.bind(eqn, eqn.params, *operands)


def bind_scan(
    eqn: Any, body: Callable[..., list[Any]], operands: Sequence[Any], *, unrolls_one: bool = False
) -> list[Any]:
    """Run the scan of an equation with another body and other operands; return its results.

    Args:
        eqn: the scan.
        body: a function from constants, carry and slices to the carry and what is stacked.
        operands: constants, initial carry and stacks.
        unrolls_one: whether a scan with one iteration becomes no loop (`scan_layers`).
    """
    params = eqn.params
    n_consts, n_carry = _compat.scan_arity(params)
    first = n_consts + n_carry

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*operands[:n_consts], *carry, *slices)
        return results[:n_carry], results[n_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    run = scan_layers if unrolls_one else lax.scan
    carry, made = run(step, [*operands[n_consts:first]], [*operands[first:]], **options)
    return [*carry, *made]


def scan_layers(
    step: Callable[[Any, list[Any]], tuple[Any, list[Any]]], carry: Any, slices: list[Any], length: int, **options: Any
) -> tuple[Any, list[Any]]:
    """Run `jax.lax.scan`; without a loop if it has one iteration. XLA compiles no loop then, so estimates see none."""
    if length != 1:
        return lax.scan(step, carry, slices, length=length, **options)
    carry, made = step(carry, [lax.squeeze(x, (0,)) for x in slices])
    return carry, [lax.expand_dims(jnp.asarray(y), (0,)) for y in made]


def bind_checkpoint(eqn: Any, body: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
    """Run the `remat2` of an equation with another body and other operands; return its results."""
    traced = jax.make_jaxpr(body)(*map(jax.typeof, operands))
    changed, consts = _compat.split_constants(traced)
    return _compat.bind(eqn, {**eqn.params, "jaxpr": changed}, *consts, *operands)
