"""Opaque code with a declared rule: a kernel or an FFI call that nothing but its author knows how to shard.

`@operator` makes a function a JAX primitive of its own, so that it stands in a jaxpr as one equation with one rule. It
is compiled as the function itself; where a plan cuts it, `run_sharded` runs the function on shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from autoshard import _compat
from autoshard.spmdrules.core.conflict_resolution import Operand, resolve
from autoshard.spmdrules.core.factor_projection import project
from autoshard.spmdrules.core.placement import Placement, axes_of, bytes_of, from_partition_spec, to_partition_spec
from autoshard.spmdrules.core.registry import rule as register
from autoshard.spmdrules.core.rule import POSITIONS, Rule, RuleError, Shard
from autoshard.spmdrules.custom_ops.opaque_primitive import Vjp, apply, flat, make_primitive, result_types
from autoshard.spmdrules.custom_ops.sharded_execution import run_on_shards

_compat.not_users_lines(__file__)


def operator(text: str, *, vjp: Vjp | None = None, name: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function an operator with a declared rule: plannable, and run on shards of its operands.

    The function takes arrays by position (and hashable options by keyword) and returns an array or a flat tuple of
    arrays. Run on shards as the rule cuts them it must give the shards of the whole result; where a `reduce` factor is
    cut, a term of it. `check_rule` finds out whether that is so.

        @autoshard.operator("b s d, d -> b s d; whole d")
        def rms_norm(x, scale):
            return pallas_rms_norm(x, scale)

    Args:
        text: the rule, for operands and results in order: see `Rule`.
        vjp: `(fwd, bwd)` as for `jax.custom_vjp`: `fwd(*args) -> (result, residuals)`,
            `bwd(residuals, cotangent) -> cotangents`, options by keyword. `fwd` None keeps the operands as residuals.
            Both are planned by what they are made of, so that opaque code in them should be an operator too. Without
            `vjp` the function is differentiated as JAX differentiates it, which opaque code may not allow.
        name: its name in jaxprs, plans and messages; the function's by default.

    Returns:
        The decorator. What it returns is called like the function and keeps it as `__wrapped__`.

    Raises:
        RuleError: the text does not parse, or has a factor that a shard can only do right if it knows where it is;
            when it is called: the rule does not fit the operands or the results.
    """
    if not isinstance(text, str):
        raise TypeError(f"@operator takes the rule as text, @operator('b d, d -> b d; whole d'); got {text!r}")
    parsed = Rule.parse(text)
    _reject_positional_factors(parsed)
    if vjp is not None and not (isinstance(vjp, (tuple, list)) and len(vjp) == 2 and callable(vjp[1])):
        raise TypeError(f"@operator('{text}'): vjp is a pair (fwd, bwd), fwd None or a function; got {vjp!r:.80}")

    def decorate(fn: Callable[..., Any]) -> Any:
        primitive = make_primitive(name or _name_of(fn))
        register(primitive)(_rule_function(primitive.name, parsed.text, fn.__module__))

        @functools.wraps(fn)
        def call(*args: Any, **options: Any) -> Any:
            arrays = [_as_array(primitive.name, i, x) for i, x in enumerate(args)]
            for key, value in options.items():
                _check_option(primitive.name, key, value)
            bound = _with_options(fn, tuple(sorted(options.items()))) if options else fn
            out = apply(primitive, arrays, fn=bound, text=text, vjp=_vjp_with_options(vjp, options))
            return out if len(parsed.results) > 1 else out[0]

        return call

    return decorate


def _name_of(fn: Any) -> str:
    """What a function is called; of a `functools.partial` the function inside."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _as_array(name: str, i: int, x: Any) -> Any:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(
            f"operator '{name}': operand {i} is of type {type(x).__name__}, no array. Its rule names arrays one by "
            "one: give the leaves of a tree each by position, and what is no array by keyword."
        ) from None


def _check_option(name: str, key: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"operator '{name}': option '{key}' is of type {type(value).__name__}, which cannot be hashed. Options are "
            "settings that are compiled in; give arrays by position, with dimensions in the rule, and lists as tuples."
        ) from None


def _reject_positional_factors(rule: Rule) -> None:
    """Refuses factors for which a shard would have to know where it is: the function is run as it stands."""
    for f in rule.factors:
        if f.kind in ("index", "offset") or f.op in POSITIONS:
            raise RuleError(
                f"@operator('{rule.text}'): factor '{f.name}' is {f.op or f.kind}, but the function is run on a shard "
                f"as it stands and cannot know where that starts. Say 'whole {f.name}'; a primitive of your own with "
                "a body (@rule) can have it cut"
            )


@functools.lru_cache(maxsize=1024)
def _with_options(fn: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """A function with options; the same object for the same ones, so that nothing is traced twice."""
    return functools.partial(fn, **dict(options))


def _vjp_with_options(vjp: Vjp | None, options: dict[str, Any]) -> Vjp | None:
    if vjp is None or not options:
        return vjp
    fwd, bwd = vjp
    items = tuple(sorted(options.items()))
    return fwd and _with_options(fwd, items), _with_options(bwd, items)


def _rule_function(name: str, text: str, module: str) -> Callable[..., Rule]:
    """The function that the registry keeps for an operator, whose equations fit their text: binding checks that."""

    def declared(*avals: Any, fn: Any, text: str, **_: Any) -> Rule:
        return Rule.parse(text, *avals, body=lambda shard, *shards: flat(fn)(*shards))

    declared.__doc__ = f"``{text}``: what its author declares of `{name}`."
    declared.__module__ = module
    return declared


_ON_SHARDS = make_primitive("operator_on_shards")  # what a shard runs; no planner meets it


def run_sharded(
    params: Mapping[str, Any],
    mesh: Any,
    operand_specs: Sequence[Any],
    result_specs: Sequence[Any],
    *args: Any,
) -> list[Any]:
    """Runs an operator on shards, as its rule allows; equal to the operator in value and gradient.

    Operands are cut as their specs say (specs that disagree are settled by the bytes that move), the function runs on
    the shards under `shard_map` with `check_vma=True`, and what is partial is reduced: straight to shards where a
    result is wanted so.

    Args:
        params: the parameters of the operator's equation, `fn`, `text` and `vjp`.
        mesh: a `Mesh` or `AbstractMesh`.
        operand_specs: for each operand a `PartitionSpec`, or a tuple with the mesh axes of each dimension.
        result_specs: for each result the same, or None where it may stay as the rule leaves it.
        *args: the operands.

    Returns:
        The whole results.

    Raises:
        RuleError: a spec cuts a dimension that the operator needs whole, or unevenly.
    """
    fn, text, vjp = params["fn"], params["text"], params.get("vjp")
    sizes = dict(mesh.shape)
    rule = Rule.parse(text, *args)
    specs = [from_partition_spec(spec, x.ndim) for spec, x in zip(operand_specs, args, strict=True)]
    for i, (dims, spec) in enumerate(zip(rule.operands, specs, strict=True)):
        if lost := [a for a in axes_of(spec) if a not in project(rule, dims, spec, sizes)]:
            raise RuleError(
                f"'{text}': operand {i} (shape {args[i].shape}) cannot be cut over '{lost[0]}' as "
                f"{to_partition_spec(spec)}: the dimension is needed whole, or does not divide. Gather it first."
            )
    operands = [Operand(Placement(s), bytes_of(x), False, i) for i, (s, x) in enumerate(zip(specs, args, strict=True))]
    outs = result_types(fn, args)
    settled = resolve(rule, operands, [bytes_of(x) for x in outs], [None] * len(outs), sizes)
    cut: dict[str, str] = {}
    for dims, place in zip((*rule.operands, *rule.results), (*settled.operands, *settled.results), strict=True):
        factors = project(rule, dims, place.spec, sizes)
        cut |= {axis: factors[axis] for axis in axes_of(place.spec) if axis not in cut}

    def body(shard: Shard, *shards: Any) -> tuple[Any, ...]:
        local = rule.where(factors=tuple(replace(f, size=shard.size(f.name)) for f in rule.factors))
        return apply(_ON_SHARDS, shards, fn=fn, text=local.text, vjp=vjp)

    return run_on_shards(rule, body, outs, mesh, cut, result_specs, *args)
