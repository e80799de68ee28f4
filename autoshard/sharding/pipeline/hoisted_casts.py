"""Casts the weights of all layers once, before the pipeline, where each layer would cast its own in every microbatch.

The loop over the ticks then takes weights in the narrower type only. So it holds, gathers and exchanges half of the
bytes. XLA:TPU moves such casts out of loops by itself, but not across the exchange of layers between stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard.sharding.rewrite.evaluation import bind_checkpoint, bind_scan

CAST = lax.convert_element_type_p
Narrow = Mapping[Any, Mapping[Any, Any]]
"""Variable -> dtype -> the variable's value in this dtype."""


def hoist_casts(jaxpr: Any, whole: int) -> tuple[Any, list[Any]]:
    """Return a program whose scans over stacks of weights take the stacks in the types that their bodies cast them to.

    Args:
        jaxpr: the program of one microbatch, as an open jaxpr without constants, with calls inlined.
        whole: the number of its first inputs that all microbatches share. Only casts of these move.

    Returns:
        The program, with constants as its first inputs, and the values of these constants.
    """
    shared = {*jaxpr.invars[:whole]}
    if not any(_casts_of_slices(eqn, shared) for eqn in jaxpr.eqns):
        return jaxpr, []

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.invars, args, strict=True))
        known: dict[Any, dict[Any, Any]] = {}  # stack -> dtype -> the stack in this type
        for eqn in jaxpr.eqns:
            operands = [_read(env, a) for a in eqn.invars]
            with _compat.source_of(eqn):
                for var, dtypes in _casts_of_slices(eqn, shared).items():
                    of_var = known.setdefault(var, {})
                    of_var |= {dtype: env[var].astype(dtype) for dtype in dtypes if dtype not in of_var}
                results = _scan(eqn, operands, known) if eqn.primitive.name == "scan" else _bound(eqn, operands)
            env |= zip(eqn.outvars, results, strict=True)
        return [_read(env, a) for a in jaxpr.outvars]

    closed = _compat.dce(jax.make_jaxpr(run)(*map(_compat.shape_dtype_of, jaxpr.invars)))
    return _compat.split_constants(closed)


def _casts_of_slices(eqn: Any, shared: set[Any]) -> dict[Any, set[Any]]:
    """The stacks of which a scan casts each slice, and to which types."""
    if eqn.primitive.name != "scan":
        return {}
    first, body = sum(_compat.scan_arity(eqn.params)), _compat.open_jaxpr(eqn.params["jaxpr"])
    pairs = zip(eqn.invars[first:], body.invars[first:], strict=True)
    found = {outer: _casts(body, inner) for outer, inner in pairs if outer in shared}
    return {var: dtypes for var, dtypes in found.items() if dtypes}


def _casts(jaxpr: Any, var: Any) -> set[Any]:
    """The narrower floats that a body and the checkpoints in it cast a variable to."""
    found = {eqn.params["new_dtype"] for eqn in jaxpr.eqns if _is_cast(eqn) and eqn.invars[0] is var}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "remat2":
            inner = _compat.open_jaxpr(eqn.params["jaxpr"])
            for a, b in zip(eqn.invars, inner.invars, strict=True):
                found |= _casts(inner, b) if a is var else set()
    return found


def _is_cast(eqn: Any) -> bool:
    if eqn.primitive.name != CAST.name:
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating) and new.itemsize < old.itemsize


def _scan(eqn: Any, operands: list[Any], known: Narrow) -> list[Any]:
    """Run a scan that also takes the stacks in the types that its body casts their slices to."""
    first, body = sum(_compat.scan_arity(eqn.params)), _compat.open_jaxpr(eqn.params["jaxpr"])
    stacks = zip(eqn.invars[first:], body.invars[first:], strict=True)
    extra = [(inner, dtype, known[outer][dtype]) for outer, inner in stacks if outer in known
             for dtype in _casts(body, inner) if dtype in known[outer]]  # fmt: skip

    def run(*args: Any) -> list[Any]:
        own, slices = args[: len(body.invars)], args[len(body.invars) :]
        return _evaluate(eqn.params["jaxpr"], own, _narrow(extra, slices))

    return bind_scan(eqn, run, [*operands, *(stack for _, _, stack in extra)])


def _narrow(which: Iterable[tuple[Any, Any, Any]], values: Sequence[Any]) -> Narrow:
    found: dict[Any, dict[Any, Any]] = {}
    for (var, dtype, _), x in zip(which, values, strict=True):
        found.setdefault(var, {})[dtype] = x
    return found


def _evaluate(closed: Any, args: Sequence[Any], narrow: Narrow) -> list[Any]:
    """Evaluate a body, with known values in place of its casts."""
    jaxpr = _compat.open_jaxpr(closed)
    env = dict(zip(jaxpr.constvars, _compat.constants(closed), strict=True))
    env |= zip(jaxpr.invars, args, strict=True)
    for eqn in jaxpr.eqns:
        operands = [_read(env, a) for a in eqn.invars]
        taken = {a: narrow[a] for a in eqn.invars if not isinstance(a, _compat.Literal) and a in narrow}
        with _compat.source_of(eqn):
            if taken and _is_cast(eqn) and (made := narrow[eqn.invars[0]].get(eqn.params["new_dtype"])) is not None:
                results = [made]
            elif taken and eqn.primitive.name == "remat2":
                results = _checkpoint(eqn, operands, taken)
            else:
                results = _bound(eqn, operands)
        env |= zip(eqn.outvars, results, strict=True)
    return [_read(env, a) for a in jaxpr.outvars]


def _checkpoint(eqn: Any, operands: list[Any], narrow: Narrow) -> list[Any]:
    inner = _compat.open_jaxpr(eqn.params["jaxpr"])
    pairs = zip(eqn.invars, inner.invars, strict=True)
    extra = [(b, dtype, x) for a, b in pairs if a in narrow for dtype, x in narrow[a].items()]

    def run(*args: Any) -> list[Any]:
        own, casts = args[: len(inner.invars)], args[len(inner.invars) :]
        return _evaluate(eqn.params["jaxpr"], own, _narrow(extra, casts))

    return bind_checkpoint(eqn, run, [*operands, *(x for _, _, x in extra)])


def _bound(eqn: Any, operands: list[Any]) -> list[Any]:
    return _compat.bind(eqn, eqn.params, *operands)


def _read(env: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, _compat.Literal) else env[atom]
