"""Runs an operator on shards of its operands by its rule, where XLA's partitioner cannot or should not.

`run_on_shards` is one `shard_map`: operands are sharded along the chosen factors, the rule's body runs on each shard,
and partial results are reduced, or reduce-scattered where the requested spec allows it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from autoshard import _compat
from autoshard.spmdrules.core.factor_projection import project
from autoshard.spmdrules.core.placement import Placement, Spec, axes_of, from_partition_spec, to_partition_spec
from autoshard.spmdrules.core.reshard_path import reshard_path
from autoshard.spmdrules.core.rule import Body, Dims, Rule, RuleError, Shard
from autoshard.spmdrules.custom_ops.opaque_primitive import returning_list, unify_varying_axes


def body_of(eqn: Any, rule: Rule) -> Body:
    """Returns what a shard runs for an equation: the rule's body, else the operator with parameters for the shard."""
    if rule.body is not None:
        return rule.body

    def run(shard: Shard, *shards: Any) -> list[Any]:
        params = rule.local(eqn.params, shard) if rule.local is not None else eqn.params
        return _compat.bind(eqn, params, *shards)

    return run


def run_on_shards(
    rule: Rule,
    body: Body,
    results: Sequence[Any],
    mesh: Any,
    factor_of: Mapping[str, str],
    requested: Sequence[Any],
    *args: Any,
    reducing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[Any]:
    """Runs an operator on shards. Values and gradients equal those of the operator on global operands.

    Args:
        rule: the operator's rule, sizes bound.
        body: what a shard runs, `body(shard, *operand_shards)`.
        results: shape and type of each global result.
        mesh: a `Mesh` or `AbstractMesh`.
        factor_of: mesh axis -> the factor that it shards; where several axes shard one factor, major ones first.
        requested: for each result a `PartitionSpec`, or a tuple with the mesh axes of each dimension, or None to leave
            it as the rule does.
        *args: the operands.
        reducing: makes the context in which the partial values of a result are reduced.

    Returns:
        The global results.

    Raises:
        RuleError: a result is partial under an operation that cannot be reduced, or a factor cannot be sharded like
            this.
    """
    sizes = dict(mesh.shape)
    axes: dict[str, tuple[str, ...]] = {}
    for axis, factor in factor_of.items():
        axes[factor] = (*axes.get(factor, ()), axis)
    counts = {f: math.prod(sizes[a] for a in over) for f, over in axes.items()}

    def spec(dims: Dims) -> Spec:
        return tuple(tuple(a for f in dim for a in axes.get(f, ())) for dim in dims)

    for dims in (*rule.operands, *rule.results):
        found = project(rule, dims, spec(dims), sizes)
        if lost := [a for a in axes_of(spec(dims)) if found.get(a) != factor_of[a]]:
            raise RuleError(
                f"'{rule}': mesh axis '{lost[0]}' cannot shard factor '{factor_of[lost[0]]}': it does not divide "
                "evenly, or its shards would not be contiguous. Shard another factor over this axis."
            )
    places = [_placement_after_body(spec(dims), rule, j, axes) for j, dims in enumerate(rule.results)]
    goals = [
        None if r is None else from_partition_spec(r, len(d)) for r, d in zip(requested, rule.results, strict=True)
    ]
    final_specs = [_spec_after_reduction(*each, sizes) for each in zip(places, goals, results, strict=True)]
    flat_body = returning_list(body)

    def run(*shards: Any) -> list[Any]:
        index = {f: lax.axis_index(over) for f, over in axes.items()}
        shard = Shard(rule, counts, index, {f: over[0] for f, over in axes.items() if len(over) == 1})
        outs = flat_body(shard, *unify_varying_axes(shards))
        reduced = []
        for each in zip(outs, places, final_specs, strict=True):
            with reducing():
                reduced.append(_reduce_partials(*each))
        return reduced

    in_specs = tuple(to_partition_spec(spec(dims)) for dims in rule.operands)
    out_specs = [to_partition_spec(final_spec) for final_spec in final_specs]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    return [
        _constrain(x, final_spec, goal, mesh)
        for x, final_spec, goal in zip(mapped(*args), final_specs, goals, strict=True)
    ]


def _placement_after_body(spec: Spec, rule: Rule, result: int, axes: Mapping[str, Sequence[str]]) -> Placement:
    """Returns the placement of a result after the body has run."""
    ops = {f: rule.partial(f, result) for f in axes}
    return Placement(spec, tuple((a, op) for f, op in ops.items() if op is not None for a in axes[f]))


def _spec_after_reduction(place: Placement, requested: Spec | None, aval: Any, mesh: dict[str, int]) -> Spec:
    """Returns the spec of a result at the end of the `shard_map`.

    A partial sum over an axis is reduce-scattered where the requested spec has that axis next in a dimension.
    """
    sums = {axis for axis, op in place.partial if op == "sum"}
    spec = [list(dim) for dim in place.spec]
    for d, goal in enumerate(requested or ()):
        local = aval.shape[d] // math.prod(mesh[a] for a in spec[d])
        for axis in goal[len(spec[d]) :] if list(goal[: len(spec[d])]) == spec[d] else ():
            if axis not in sums or local % mesh[axis]:
                break
            spec[d].append(axis)
            local //= mesh[axis]
    return tuple(map(tuple, spec))


def _reduce_partials(x: Any, place: Placement, final_spec: Spec) -> Any:
    """Reduces a shard's partials, and marks a result as replicated over the axes along which it does not vary.

    Scatters come first, because they leave fewer bytes to reduce over other axes.
    """
    partial = dict(place.partial)
    for d, axes in enumerate(final_spec):
        if scattered := tuple(a for a in axes if a in partial):
            x = _scatter_sum(x, scattered, d)
    left = [(axis, op) for axis, op in place.partial if axis not in axes_of(final_spec)]
    if sums := tuple(axis for axis, op in left if op == "sum"):
        x = _of_parts(lambda part: lax.psum(part, sums), x)  # one collective
    for axis, op in left:
        if op != "sum":
            x = _reduce(x, axis, op)
    for axis in sorted(_compat.varying_axes(x) - set(axes_of(final_spec))):
        first = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
        x = _reduce(first, axis, "or" if x.dtype == jnp.bool_ else "sum")
    return x


def _scatter_sum(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    """Reduce-scatters a shard's partial sums along a dimension.

    XLA:TPU scatters along the first dimension only. Along another one it reduces the whole array, or copies it before
    and after. So leading dimensions of size 1 are dropped for the collective.
    """
    front = range(dim) if math.prod(x.shape[:dim]) == 1 else ()

    def scatter(part: Any) -> Any:
        return lax.psum_scatter(part, axes, scatter_dimension=dim - len(front), tiled=True)

    return lax.expand_dims(_of_parts(scatter, lax.squeeze(x, front)), front)


def _of_parts(reduce: Callable[[Any], Any], x: Any) -> Any:
    """Reduces a value, or the real and imaginary parts of a complex one.

    XLA:TPU has no reductions of complex numbers. It gathers the terms of all devices, and each device adds them.
    """
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return reduce(x)
    return lax.complex(reduce(lax.real(x)), reduce(lax.imag(x)))


def _reduce(x: Any, axis: str, op: str) -> Any:
    if op == "sum":
        return _of_parts(lambda part: lax.psum(part, axis), x)
    if op in ("max", "min"):
        return (lax.pmax if op == "max" else lax.pmin)(x, axis)
    if op in ("and", "or") and x.dtype == jnp.bool_:
        return (lax.pmin if op == "and" else lax.pmax)(x.astype(jnp.int32), axis).astype(jnp.bool_)
    if op in _ELEMENTWISE:
        return functools.reduce(_ELEMENTWISE[op], _gather_terms(x, axis))
    raise RuleError(
        f"a partial '{op}' of {x.dtype} over mesh axis '{axis}' cannot be reduced. Declare its factor 'whole'."
    )


_ELEMENTWISE = {"mul": jnp.multiply, "and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor}


def _gather_terms(x: Any, axis: str) -> list[Any]:
    """Gathers the terms of all shards on every shard. Used where no collective performs the reduction."""
    wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    own = jnp.arange(lax.axis_size(axis)).reshape(-1, *[1] * x.ndim) == lax.axis_index(axis)
    return list(lax.psum(jnp.where(own, wide, jnp.zeros_like(wide)), axis).astype(x.dtype))


def _constrain(x: Any, final_spec: Spec, goal: Spec | None, mesh: Any) -> Any:
    """Constrains a global result to the requested spec, step by step, unless it already has it."""
    if goal is None or goal == final_spec:
        return x
    memory = _compat.memory_kind(x)
    for spec in reshard_path(final_spec, goal):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, to_partition_spec(spec), memory_kind=memory))
    return x
