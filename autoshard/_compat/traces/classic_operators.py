"""The operators of JAX's upgrade flags, written as the operators that JAX traces without these flags.

`jax_remat3`, `jax_custom_jvp3`, `jax_custom_vjp3` and `jax_scan3` make JAX trace HiJAX operators:

    flag             operator                                 written as
    jax_remat3       `RematTraced`                            `remat2`
                     barrier and recomputation, in gradients  one `remat2` that also returns the saved values
                     `CheckpointName`, `CheckpointNameFwd`    `name`
                     `PrimalLeftTangentRight`                 its first operand
    jax_custom_jvp3  `CustomJVPTraced`                        `custom_jvp_call`
    jax_custom_vjp3  `CustomVJPTraced`                        unchanged: it is a call with its own derivative
    jax_scan3        `Scan3`                                  not traced: `classic_scans` switches the flag off

The rewritten program computes the same values, recomputes the same operators, and keeps the source lines. In JAX 0.12,
`Scan3` has no reverse-mode derivative, and it ignores `reverse=True`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint, config, core, hijax
from jax._src.lax import lax as lax_internal

from autoshard._compat.jaxprs import constants, is_jaxpr, is_recomputed, open_jaxpr, source_of, with_equations

# The flags that change a trace. `jax_scan3` is not one of them, because `classic_scans` switches it off.
UPGRADE_FLAGS = tuple(
    name
    for name in ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3", "jax_remat_barrier_no_cotangents")
    if name in jax.config.values
)
_NAMES = ("CheckpointName", "CheckpointNameFwd")


def upgrade_flags() -> tuple[bool, ...]:
    """Returns the values of the flags in `UPGRADE_FLAGS`."""
    return tuple(bool(getattr(jax.config, name)) for name in UPGRADE_FLAGS)


@contextlib.contextmanager
def classic_scans() -> Iterator[None]:
    """Makes `jax.lax.scan` trace the `scan` operator in this context, whatever `jax_scan3` is."""
    with config.scan3(False):
        yield


def classic(closed: Any) -> Any:
    """Replaces the operators of the upgrade flags by classic ones, in a closed jaxpr and its nested jaxprs.

    Args:
        closed: the result of `jax.make_jaxpr`. It is returned unchanged if it contains no such operator.
    """
    return _Rewriting().jaxpr(closed)


def hijax_operator(eqn: Any) -> str:
    """Returns the name of the class of a HiJAX operator, such as `Scan3`; empty for other equations."""
    return type(eqn.params["_prim"]).__name__ if eqn.primitive is hijax.call_hi_primitive_p else ""


class _Rewriting:
    """Rewrites jaxprs. Each one is rewritten at most twice: as recomputed code, and as other code."""

    def __init__(self) -> None:
        # (id of a jaxpr, whether it is recomputed) -> the jaxpr, which keeps the id, and the new one
        self.done: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def jaxpr(self, closed: Any, recomputed: bool = False) -> Any:
        key = id(closed), recomputed
        if key not in self.done:
            self.done[key] = closed, self._rewritten(closed, recomputed)
        return self.done[key][1]

    def _rewritten(self, closed: Any, recomputed: bool) -> Any:
        jaxpr = open_jaxpr(closed)
        same: dict[Any, Any] = {}  # a result that equals an operand -> the operand
        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            if any(atom in same for atom in eqn.invars if not isinstance(atom, core.Literal)):
                eqn = eqn.replace(invars=[_read(same, atom) for atom in eqn.invars])
            eqns += self._equation(eqn, same, recomputed)
        if not recomputed:
            eqns = _as_checkpoints(eqns, jaxpr.debug_info.with_unknown_names())
        if len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
            return closed
        return with_equations(closed, eqns, outvars=[_read(same, atom) for atom in jaxpr.outvars])

    def _equation(self, eqn: Any, same: dict[Any, Any], recomputed: bool) -> list[Any]:
        operator = hijax_operator(eqn)
        recomputed = recomputed or is_recomputed(eqn) or eqn.primitive is ad_checkpoint.remat_p
        if operator == "PrimalLeftTangentRight":
            same[eqn.outvars[0]] = eqn.invars[0]
            return []
        if operator in _NAMES:
            return [eqn.replace(primitive=ad_checkpoint.name_p, params={"name": eqn.params["_prim"].name})]
        if operator == "RematTraced":
            return self._checkpoint(eqn, recomputed)
        if operator == "CustomJVPTraced":
            return [self._custom_jvp(eqn, recomputed)]
        params = {name: self._parameter(value, recomputed) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return [eqn.replace(params=params) if changed else eqn]

    def _parameter(self, value: Any, recomputed: bool) -> Any:
        if is_jaxpr(value):
            return self.jaxpr(value, recomputed)
        if isinstance(value, (tuple, list)) and any(is_jaxpr(x) for x in value):
            found = [self._parameter(x, recomputed) for x in value]
            return value if all(a is b for a, b in zip(found, value, strict=True)) else type(value)(found)
        return value

    def _checkpoint(self, eqn: Any, recomputed: bool) -> list[Any]:
        """The equations of a `RematTraced`: one `remat2`; in a recomputation, those of its body."""
        operator = eqn.params["_prim"]
        assert not constants(operator.jaxpr)  # `jax.checkpoint` makes them operands
        inner = open_jaxpr(self.jaxpr(operator.jaxpr, recomputed=True))
        if recomputed:
            return _inlined(inner, eqn)
        pinned = getattr(operator, "prevent_cse", True)  # older versions always prevent it
        params = {"jaxpr": inner, "prevent_cse": pinned, "differentiated": False, "policy": operator.policy}
        return [eqn.replace(primitive=ad_checkpoint.remat_p, params=params)]

    def _custom_jvp(self, eqn: Any, recomputed: bool) -> Any:
        """A `custom_jvp_call` for a `CustomJVPTraced`."""
        operator = eqn.params["_prim"]
        bind, expand = hijax.call_hi_primitive_p.bind, hijax.call_hi_primitive_p.to_lojax

        def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            return jax.jvp(lambda *args: bind(*args, _prim=operator), primals, tangents)

        function = jax.custom_jvp(lambda *args: list(expand(*args, _prim=operator)))
        function.defjvp(derivative)
        classic = getattr(config, "custom_jvp3")(False)  # noqa: B009 - older versions have neither operator nor flag
        with classic, source_of(eqn):
            traced = jax.make_jaxpr(function)(*(atom.aval for atom in eqn.invars))
        (call,) = open_jaxpr(traced).eqns
        params = {name: self._parameter(value, recomputed) for name, value in call.params.items()}
        return eqn.replace(primitive=call.primitive, params=params)


def _read(same: Mapping[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, core.Literal) else same.get(atom, atom)


def _inlined(inner: Any, call: Any) -> list[Any]:
    """The equations of a called jaxpr, with the operands and results of the call, in its name scope."""
    names: dict[Any, Any] = dict(zip(inner.invars, call.invars, strict=True))
    made = {v for eqn in inner.eqns for v in eqn.outvars}
    copies = []
    for var, atom in zip(call.outvars, inner.outvars, strict=True):
        if not isinstance(atom, core.Literal) and atom in made and atom not in names:
            names[atom] = var
        else:  # an input, a literal, or a result that is returned twice
            copies.append((var, atom))
    stack, eqns = call.source_info.name_stack, []
    for eqn in inner.eqns:
        source = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
        eqns.append(_renamed(eqn, names).replace(source_info=source))
    for var, atom in copies:
        operand = _read(names, atom)
        eqns.append(
            call.replace(primitive=lax_internal.copy_p, params={}, invars=[operand], outvars=[var], effects=set())
        )
    return eqns


def _renamed(eqn: Any, names: dict[Any, Any]) -> Any:
    """An equation with other variables; results without a new name get one."""
    invars = [_read(names, atom) for atom in eqn.invars]
    for var in eqn.outvars:
        if var not in names:
            names[var] = type(var)(var.aval)
    return eqn.replace(invars=invars, outvars=[names[var] for var in eqn.outvars])


def _as_checkpoints(eqns: Sequence[Any], debug_info: Any) -> list[Any]:
    """Writes each run of recomputed equations as one `remat2`, with the barrier before it, if there is one.

    The operands of the barrier are the saved values and, in most versions of JAX, the cotangents. The `remat2` adds a
    barrier to its operands and returns them. So a parameter stays one value of the program, and autoshard recognizes
    its gathers, casts and slices.
    """
    written: list[Any] = []
    runs = itertools.groupby(eqns, key=is_recomputed)
    for recomputed, run in runs:
        if not recomputed:
            written += run
            continue
        has_barrier = bool(written) and written[-1].primitive is lax_internal.optimization_barrier_p
        written.append(_as_checkpoint(written.pop() if has_barrier else None, [*run], debug_info))
    return written


def _as_checkpoint(barrier: Any | None, recomputed: Sequence[Any], debug_info: Any) -> Any:
    """Returns one `remat2` in place of a barrier, if there is one, and of the equations that recompute values."""
    operands, passed = (barrier.invars, barrier.outvars) if barrier is not None else ([], [])
    names = {var: type(var)(var.aval) for var in passed}
    inputs = [names[var] for var in passed]
    made = {var for eqn in recomputed for var in eqn.outvars}
    atoms = (atom for eqn in recomputed for atom in eqn.invars if not isinstance(atom, core.Literal))
    others = dict.fromkeys(atom for atom in atoms if atom not in names and atom not in made)
    names |= {var: core.gensym()(var.aval) for var in others}
    eqns = [_renamed(eqn, names) for eqn in recomputed]
    results = [*passed, *(v for eqn in recomputed for v in eqn.outvars if not isinstance(v, core.DropVar))]
    body = core.Jaxpr(
        (), [*inputs, *(names[v] for v in others)], [names[v] for v in results], eqns,
        effects=core.join_effects(*(eqn.effects for eqn in eqns)), debug_info=debug_info,
    )  # fmt: skip
    pinned = (*[True] * len(inputs), *[False] * len(others)) if barrier is not None and others else barrier is not None
    params = {"jaxpr": body, "prevent_cse": pinned, "differentiated": True, "policy": None}
    place = recomputed[0] if barrier is None else barrier
    return place.replace(
        primitive=ad_checkpoint.remat_p, invars=[*operands, *others], outvars=results, params=params,
        effects=body.effects,
    )  # fmt: skip
