"""Declares a rule for opaque code: a kernel or FFI call for which no rule can be derived.

`@operator` turns a function into its own JAX primitive, so that a jaxpr holds it as one equation with one rule. It is
lowered as the function itself; where a plan shards it, `run_sharded` runs the function on shards.
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
from autoshard.spmdrules.custom_ops.kernel_cost import Cost
from autoshard.spmdrules.custom_ops.opaque_primitive import Vjp, apply, make_primitive, result_types, returning_list
from autoshard.spmdrules.custom_ops.sharded_execution import run_on_shards

_compat.exclude_from_user_code(__file__)


def operator(
    text: str, *, vjp: Vjp | None = None, name: str | None = None, cost: Cost | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Turns a function into an operator with a declared rule, which can be planned and runs on shards of its operands.

    The function takes arrays by position (and hashable options by keyword) and returns an array or a flat tuple of
    arrays. On shards of its operands it must return the same shards of its results; if a `reduce` factor is sharded, it
    must return one term of the reduction. `check_rule` tests whether it does.

        @autoshard.operator("b s d, d -> b s d; whole d")
        def rms_norm(x, scale):
            return pallas_rms_norm(x, scale)

    Args:
        text: the rule, with operands and results in order: see `Rule`.
        vjp: `(fwd, bwd)` as for `jax.custom_vjp`: `fwd(*args) -> (result, residuals)`,
            `bwd(residuals, cotangent) -> cotangents`; both get the options by keyword. If `fwd` is None, the operands
            are the residuals. Both functions are planned operator by operator, so opaque code in them should be an
            operator too. Without `vjp`, JAX differentiates the function, which opaque code may not support.
        name: its name in jaxprs, plans and messages; by default the function's name.
        cost: what the operator costs, for the estimate of a plan: `cost(*operands)` returns a `KernelCost`, or a tuple
            of those of several kernels, for operands of some shapes and dtypes, those of one shard. It gets the options
            by keyword. Without `cost`, the operators inside the function are counted, which finds nothing inside a
            Pallas kernel or an FFI call.

    Returns:
        A decorator. The operator that it returns is called like the function and keeps it as `__wrapped__`.

    Raises:
        RuleError: the text does not parse, or has a factor for which a shard must know its position. When the operator
            is called: the rule does not fit the operands or the results.
        TypeError: `text` or `vjp` has the wrong type.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"@operator takes the rule as text, as in @operator('b d, d -> b d; whole d'), but got {text!r}"
        )
    parsed = Rule.parse(text)
    _reject_positional_factors(parsed)
    if vjp is not None and not (isinstance(vjp, (tuple, list)) and len(vjp) == 2 and callable(vjp[1])):
        raise TypeError(
            f"@operator('{text}'): vjp must be a pair (fwd, bwd) of functions, where fwd may be None, "
            f"but got {vjp!r:.80}"
        )
    if cost is not None and not callable(cost):
        raise TypeError(f"@operator('{text}'): cost must be a function that returns a KernelCost, but got {cost!r:.80}")

    def decorate(fn: Callable[..., Any]) -> Any:
        primitive = make_primitive(name or _name_of(fn))
        register(primitive)(_rule_function(primitive.name, parsed.text, fn.__module__))

        @functools.wraps(fn)
        def call(*args: Any, **options: Any) -> Any:
            arrays = [_as_array(primitive.name, i, x) for i, x in enumerate(args)]
            for key, value in options.items():
                _check_option(primitive.name, key, value)
            bound = _with_options(fn, tuple(sorted(options.items()))) if options else fn
            bound_cost = _with_options(cost, tuple(sorted(options.items()))) if cost and options else cost
            out = apply(primitive, arrays, fn=bound, text=text, vjp=_vjp_with_options(vjp, options), cost=bound_cost)
            return out if len(parsed.results) > 1 else out[0]

        return call

    return decorate


def _name_of(fn: Any) -> str:
    """Returns the name of a function; for a `functools.partial`, of the function inside."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _as_array(name: str, i: int, x: Any) -> Any:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(
            f"operator '{name}': operand {i} is of type {type(x).__name__}, not an array. Pass each leaf of a tree as "
            "its own positional argument, and anything that is not an array by keyword."
        ) from None


def _check_option(name: str, key: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"operator '{name}': option '{key}' is of type {type(value).__name__}, which is not hashable. Options are "
            "compiled in. Pass arrays by position, with dimensions in the rule, and lists as tuples."
        ) from None


def _reject_positional_factors(rule: Rule) -> None:
    """Rejects factors for which a shard must know its position: the function does not receive it."""
    for f in rule.factors:
        if f.kind in ("index", "offset") or f.op in POSITIONS:
            raise RuleError(
                f"@operator('{rule.text}'): factor '{f.name}' is {f.op or f.kind}, but the function runs on a shard "
                f"unchanged and does not know where the shard starts. Declare 'whole {f.name}', or register a "
                "primitive with @rule and a body."
            )


@functools.lru_cache(maxsize=1024)
def _with_options(fn: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Binds options to a function; returns the same object for the same options, so that nothing is traced twice."""
    return functools.partial(fn, **dict(options))


def _vjp_with_options(vjp: Vjp | None, options: dict[str, Any]) -> Vjp | None:
    if vjp is None or not options:
        return vjp
    fwd, bwd = vjp
    items = tuple(sorted(options.items()))
    return fwd and _with_options(fwd, items), _with_options(bwd, items)


def _rule_function(name: str, text: str, module: str) -> Callable[..., Rule]:
    """Returns the rule function of an operator. Each equation has its own text, which was checked when it was bound."""

    def declared(*avals: Any, fn: Any, text: str, **_: Any) -> Rule:
        return Rule.parse(text, *avals, body=lambda shard, *shards: returning_list(fn)(*shards))

    declared.__doc__ = f"``{text}``: the declared rule of `{name}`."
    declared.__module__ = module
    return declared


_ON_SHARDS = make_primitive("operator_on_shards")  # what each shard runs; it occurs in no planned program


def run_sharded(
    params: Mapping[str, Any],
    mesh: Any,
    operand_specs: Sequence[Any],
    result_specs: Sequence[Any],
    *args: Any,
) -> list[Any]:
    """Runs an operator on shards by its rule. Values and gradients equal those of the operator.

    Operands are sharded by their specs; where specs conflict, the choice that moves the fewest bytes is taken. The
    function runs on the shards under `shard_map` with `check_vma=True`. Partial results are then reduced, or
    reduce-scattered where the requested spec allows it.

    Args:
        params: the parameters of the operator's equation.
        mesh: a `Mesh` or `AbstractMesh`.
        operand_specs: for each operand a `PartitionSpec`, or a tuple with the mesh axes of each dimension.
        result_specs: for each result the same, or None to leave it as the rule does.
        *args: the operands.

    Returns:
        The global results.

    Raises:
        RuleError: a spec shards a dimension that the operator needs whole, or shards one unevenly.
    """
    fn, text, vjp = params["fn"], params["text"], params.get("vjp")
    sizes = dict(mesh.shape)
    rule = Rule.parse(text, *args)
    specs = [from_partition_spec(spec, x.ndim) for spec, x in zip(operand_specs, args, strict=True)]
    for i, (dims, spec) in enumerate(zip(rule.operands, specs, strict=True)):
        if lost := [a for a in axes_of(spec) if a not in project(rule, dims, spec, sizes)]:
            raise RuleError(
                f"'{text}': operand {i} (shape {args[i].shape}) cannot be sharded over '{lost[0]}' by "
                f"{to_partition_spec(spec)}: the operator needs the dimension whole, or its size does not divide. "
                "Gather it first."
            )
    operands = [Operand(Placement(s), bytes_of(x), False, i) for i, (s, x) in enumerate(zip(specs, args, strict=True))]
    outs = result_types(fn, args)
    resolution = resolve(rule, operands, [bytes_of(x) for x in outs], [None] * len(outs), sizes)
    placements = (*resolution.operands, *resolution.results)
    factor_of: dict[str, str] = {}
    for dims, place in zip((*rule.operands, *rule.results), placements, strict=True):
        factors = project(rule, dims, place.spec, sizes)
        factor_of |= {axis: factors[axis] for axis in axes_of(place.spec) if axis not in factor_of}

    return run_opaque_on_shards(rule, fn, outs, mesh, factor_of, result_specs, *args, vjp=vjp)


def run_opaque_on_shards(
    rule: Rule,
    fn: Callable[..., Any],
    results: Sequence[Any],
    mesh: Any,
    factor_of: Mapping[str, str],
    requested: Sequence[Any],
    *args: Any,
    vjp: Vjp | None = None,
) -> list[Any]:
    """Runs opaque code on shards by a rule: `fn` of the operands' shards returns the shards of the results.

    The other arguments are those of `run_on_shards`; `vjp` is that of `operator`.
    """

    def body(shard: Shard, *shards: Any) -> tuple[Any, ...]:
        local = rule.where(factors=tuple(replace(f, size=shard.size(f.name)) for f in rule.factors))
        return apply(_ON_SHARDS, shards, fn=fn, text=local.text, vjp=vjp)

    return run_on_shards(rule, body, results, mesh, factor_of, requested, *args)
