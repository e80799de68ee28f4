"""Operators that address elements by values: gather, scatter, dynamic slices.

A dimension that is addressed by values has an `index` factor: a shard handles the positions in its range and masks the
others. Where the result lacks the dimension, exactly one shard holds each element and the others hold zero, so the
result is a partial sum.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard._compat import primitive
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Body, Dims, Kind, LocalParams, Reduction, Rule, Shard
from autoshard.spmdrules.core.rule_builder import Dim, RuleBuilder, is_numeric, pass_through

_CLIP = lax.GatherScatterMode.CLIP
_WINDOW = "u"  # the stem of factors from which windows are taken; a window may reach into the next shard
_FILL = lax.GatherScatterMode.FILL_OR_DROP


def _widened(positions: Any) -> Any:
    """Casts positions to a signed type that holds every size and -1; larger positions are clipped to its maximum."""
    wide = jnp.int64 if positions.dtype.itemsize == 8 else jnp.int32
    if jnp.issubdtype(positions.dtype, jnp.unsignedinteger):
        positions = jnp.minimum(
            positions, np.array(min(jnp.iinfo(wide).max, jnp.iinfo(positions.dtype).max), positions.dtype)
        )
    return positions.astype(wide)


def _starts_at(shard: Shard, dim: Dim) -> Any:
    return shard.offset(dim[0]) if dim else 0


@rule(lax.gather_p)
def gather(
    x: Any, indices: Any, *, dimension_numbers: Any, slice_sizes: Sequence[int], mode: Any, fill_value: Any = None,
    **_: Any,
) -> Rule:  # fmt: skip
    """``v d, b -> b d; index v; linear 0; moves 0``: rows selected by position.

    Dimensions taken in full, batch dimensions and those of the indices pass. A dimension from which windows are taken
    has the index factor ``u``, and in the result the windows' own dimension is whole.

    https://openxla.org/stablehlo/spec#gather
    """
    numbers = dimension_numbers
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    # XLA's partitioner aborts the process on indices narrower than 32 bits into a sharded dimension.
    shardable = is_numeric(x.dtype) and (mode == _FILL or indices.dtype.itemsize >= 4)
    build = RuleBuilder()
    picked = {d: build.dim("b", n) for d, n in enumerate(indices.shape[:-1])}
    dims, windows = [], []
    for d, (size, taken) in enumerate(zip(x.shape, slice_sizes, strict=True)):
        if d in batching:
            dims.append(picked[batching[d]])
            continue
        dims.append(_addressed(build, size, taken, d in numbers.start_index_map and shardable))
        if d not in numbers.collapsed_slice_dims:
            windows.append(dims[-1] if taken == size else build.whole(taken))
    vector = build.whole(indices.shape[-1])
    result = _interleave(numbers.offset_dims, windows, list(picked.values()))
    linear = mode != _FILL or _fills_with_zero(fill_value, x.dtype)
    operand = tuple(dims)
    base_rule = build.rule(
        [operand, (*picked.values(), vector)], [result], ((0,),) if linear else (), (0,) if linear else ()
    )
    if any(f.kind == "index" for f in base_rule.factors):
        return base_rule.where(body=_gather_body(operand, numbers, slice_sizes, mode, fill_value))
    return base_rule.where(local=_slice_sizes(operand, slice_sizes, x.shape))


def _fills_with_zero(fill_value: Any, dtype: Any) -> bool:
    """Whether the fill value for positions out of bounds stays the same when terms are summed: 0 or NaN."""
    if fill_value is None:
        return bool(jnp.issubdtype(dtype, jnp.inexact))
    return bool(fill_value == 0 or fill_value != fill_value)


def _addressed(build: RuleBuilder, size: int, taken: int, by_value: bool) -> Dim:
    """Creates a dimension from which windows of `taken` elements are taken."""
    if taken == size:
        return build.dim("d", size)
    return build.dim("v" if taken == 1 else _WINDOW, size, "index") if by_value and taken else build.whole(size)


def is_window(factor: str) -> bool:
    """Whether a factor of a gather or scatter is a dimension in which windows are read or written."""
    return factor.startswith(_WINDOW)


def _interleave(where: Sequence[int], placed: Sequence[Dim], others: Sequence[Dim]) -> Dims:
    """Puts `placed` at the positions `where`, and `others` at the remaining ones, each in order."""
    first, second = iter(placed), iter(others)
    return tuple(next(first) if d in where else next(second) for d in range(len(placed) + len(others)))


def _slice_sizes(dims: Dims, sizes: Sequence[int], shape: Sequence[int]) -> LocalParams:
    def local(params: Mapping[str, Any], shard: Shard) -> Mapping[str, Any]:
        return {**params, "slice_sizes": _local_sizes(shard, dims, sizes, shape)}

    return local


def _local_sizes(shard: Shard, dims: Dims, sizes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns window sizes for a shard: windows that span their dimension span the shard; others keep their size."""
    here = shard.shape(dims)
    return tuple(n if taken == size else taken for n, taken, size in zip(here, sizes, shape, strict=True))


def _global_shape(shard: Shard, dims: Dims) -> tuple[int, ...]:
    return tuple(shard.rule.factor(dim[0]).size or 0 if dim else 1 for dim in dims)


def _gather_body(dims: Dims, numbers: Any, sizes: Sequence[int], mode: Any, fill_value: Any) -> Body:
    """Returns a body that gathers the rows that this shard holds, with zeros for the others.

    Rows out of bounds are filled on one shard.
    """

    def body(shard: Shard, x: Any, indices: Any) -> Any:
        shape = _global_shape(shard, dims)
        outside, held, local = _locate(shard, dims, _widened(indices), numbers.start_index_map, sizes, shape, x.shape)
        x = _with_margins(shard, x, dims, sizes)
        out = lax.gather(x, local, numbers, _local_sizes(shard, dims, sizes, shape), mode=_CLIP, unique_indices=False)
        rows = [n for d, n in enumerate(out.shape) if d not in numbers.offset_dims]
        assert tuple(rows) == held.shape
        spread = _row_broadcaster(out.shape, numbers.offset_dims)
        if mode == _FILL:
            # Every shard reads every window, so only the first one fills.
            others = [shard.index[f] != 0 for dim in dims for f in dim if is_window(f) and shard.count(f) > 1]
            fill = _fill_value(fill_value, out.dtype)
            fill = jnp.where(functools.reduce(jnp.logical_or, others), jnp.zeros_like(fill), fill) if others else fill
            out = jnp.where(spread(outside), fill, out)
        return jnp.where(spread(held), out, jnp.zeros((), out.dtype))

    return body


def _locate(
    shard: Shard, dims: Dims, indices: Any, mapped: Sequence[int], sizes: Sequence[int], global_shape: Sequence[int],
    local_shape: Sequence[int],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Locates the rows of the indices on a shard.

    A window may cross the border of a shard, so each shard is padded with a margin of zeros and reads every window.
    A window's position counts from the start of the margin.

    Returns:
        For each row: whether it is out of bounds, whether this shard holds it, and its position on this shard.
    """
    outside, held = jnp.zeros(indices.shape[:-1], bool), jnp.ones(indices.shape[:-1], bool)
    local = []
    for p, d in enumerate(mapped):
        position, last = indices[..., p], global_shape[d] - sizes[d]
        outside |= (position < 0) | (position > last)
        position = jnp.clip(position, 0, last)
        if sizes[d] != global_shape[d]:
            position = position - _starts_at(shard, dims[d])
            if margin := _margin(shard, dims[d], sizes[d]):
                position = jnp.clip(position + margin, 0, local_shape[d] + margin)
            else:
                held &= (position >= 0) & (position <= local_shape[d] - sizes[d])
                position = jnp.clip(position, 0, local_shape[d] - sizes[d])
        local.append(position.astype(indices.dtype))
    return outside, held, jnp.stack(local, -1) if local else indices


def _margin(shard: Shard, dim: Dim, taken: int) -> int:
    """Returns how far a window may reach beyond a shard: its size if the dimension is sharded, else 0."""
    return taken if dim and is_window(dim[0]) and shard.count(dim[0]) > 1 else 0


def _with_margins(shard: Shard, x: Any, dims: Dims, sizes: Sequence[int], sign: int = 1) -> Any:
    """Pads a shard with zeros where windows may reach beyond it; with `sign` -1, removes that padding."""
    margins = [sign * _margin(shard, dim, taken) for dim, taken in zip(dims, sizes, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(m, m, 0) for m in margins]) if any(margins) else x


def _row_broadcaster(shape: Sequence[int], windows: Sequence[int]) -> Any:
    """Returns a function that broadcasts one value for each row to `shape`, along its `windows` dimensions."""
    rows = tuple(d for d in range(len(shape)) if d not in windows)
    return lambda per_row: lax.broadcast_in_dim(per_row, tuple(shape), rows)


def _fill_value(value: Any, dtype: Any) -> Any:
    """Returns what `gather` puts at positions out of bounds."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(np.nan, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max, dtype)


def _scatter(
    name: str, avals: tuple[Any, ...], params: Mapping[str, Any], kind: Kind, op: Reduction | None, identity: Any = None
) -> Rule:
    """Returns the rule of a scatter: updates sharded along the rows of the indices give partial results under `op`.

    Args:
        name: the primitive's name.
        avals: operand, indices, updates.
        params: the primitive's parameters.
        kind: the kind of the rows: reduce, or whole where the order of updates matters.
        op: the operation that combines the updates.
        identity: replaces the operand on all shards of the rows except the first; None keeps the operand.
    """
    x, indices, updates = avals
    numbers = params["dimension_numbers"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    build = RuleBuilder()
    shared = set(batching.values())
    rows = {
        d: build.dim("b", n) if d in shared else build.dim("n", n, kind, op) for d, n in enumerate(indices.shape[:-1])
    }
    sizes = _window_sizes(x.shape, updates.shape, numbers, batching)
    dims, windows = [], []
    for d, (size, taken) in enumerate(zip(x.shape, sizes, strict=True)):
        if d in batching:
            dims.append(rows[batching[d]])
            continue
        dims.append(_addressed(build, size, taken, d in numbers.scatter_dims_to_operand_dims))
        if d not in numbers.inserted_window_dims:
            windows.append(dims[-1] if taken == size else build.whole(taken))
    operand = tuple(dims)
    vector = build.whole(indices.shape[-1])
    update = _interleave(numbers.update_window_dims, windows, list(rows.values()))
    body = _scatter_body(name, operand, sizes, params, identity)
    return build.rule([operand, (*rows.values(), vector), update], [operand], body=body)


def _window_sizes(
    shape: Sequence[int], updates: Sequence[int], numbers: Any, batching: Mapping[int, int]
) -> tuple[int, ...]:
    """Returns the size of an update along each dimension of the operand."""
    window = (updates[d] for d in numbers.update_window_dims)
    dropped = {*numbers.inserted_window_dims, *batching}
    return tuple(1 if d in dropped else next(window) for d in range(len(shape)))


def _scatter_body(name: str, dims: Dims, sizes: Sequence[int], params: Mapping[str, Any], identity: Any) -> Body:
    """Returns a body that drops updates of rows that other shards hold, and keeps the operand on one shard only."""
    numbers, clips = params["dimension_numbers"], params["mode"] == _CLIP
    scatter = primitive(name)
    assert scatter is not None
    overrides = {"mode": _FILL, "indices_are_sorted": False, "unique_indices": False}

    def body(shard: Shard, x: Any, indices: Any, updates: Any) -> Any:
        shape = _global_shape(shard, dims)
        mapped = numbers.scatter_dims_to_operand_dims
        outside, held, local = _locate(shard, dims, _widened(indices), mapped, sizes, shape, x.shape)
        kept = held if clips else held & ~outside
        x = _with_margins(shard, x, dims, sizes)
        if kept.size > 1:  # XLA may write a single row by its position alone, see `partitioner_faults.writes_one_row`
            local = jnp.where(kept[..., None], local, jnp.asarray(x.shape, local.dtype)[jnp.asarray(mapped, int)])
        if identity is not None:
            sharded = [f.name for f in shard.rule.factors if f.kind == "reduce" and shard.count(f.name) > 1]
            first = jnp.all(jnp.asarray([shard.index[f] == 0 for f in sharded]))
            x = jnp.where(first, x, jnp.asarray(identity, x.dtype))
        out = scatter.bind(x, local, updates, **{**params, **overrides})
        out = jnp.where(kept.reshape(()), out, x) if kept.size == 1 else out
        return _with_margins(shard, out, dims, sizes, -1)

    return body


@rule(primitive("scatter_add"))
def scatter_add(x: Any, indices: Any, updates: Any, **params: Any) -> Rule:
    """``v d, n, n d -> v d; reduce n; index v; linear 0 2``: updates added to rows at given positions.

    The first shard of the updates adds them to the operand, the others add them to zeros.

    https://openxla.org/stablehlo/spec#scatter
    """
    return _scatter("scatter_add", (x, indices, updates), params, "reduce", "sum", 0).where(linear=((0, 2),))


@rule(primitive("scatter_sub"))
def scatter_sub(x: Any, indices: Any, updates: Any, **params: Any) -> Rule:
    """``v d, n, n d -> v d; reduce n; index v; linear 0 2``: updates subtracted from rows at given positions.

    https://openxla.org/stablehlo/spec#scatter
    """
    return _scatter("scatter_sub", (x, indices, updates), params, "reduce", "sum", 0).where(linear=((0, 2),))


@rule(primitive("scatter_mul"))
def scatter_mul(x: Any, indices: Any, updates: Any, **params: Any) -> Rule:
    """``v d, n, n d -> v d; reduce n:mul; index v; linear 0``: rows at given positions multiplied by updates.

    https://openxla.org/stablehlo/spec#scatter
    """
    return _scatter("scatter_mul", (x, indices, updates), params, "reduce", "mul", 1).where(linear=((0,),))


@rule(primitive("scatter_min"))
def scatter_min(x: Any, indices: Any, updates: Any, **params: Any) -> Rule:
    """``v d, n, n d -> v d; reduce n:min; index v``: the elementwise minimum of rows and updates.

    https://openxla.org/stablehlo/spec#scatter
    """
    return _scatter("scatter_min", (x, indices, updates), params, "reduce", "min")


@rule(primitive("scatter_max"))
def scatter_max(x: Any, indices: Any, updates: Any, **params: Any) -> Rule:
    """``v d, n, n d -> v d; reduce n:max; index v``: the elementwise maximum of rows and updates.

    https://openxla.org/stablehlo/spec#scatter
    """
    return _scatter("scatter_max", (x, indices, updates), params, "reduce", "max")


@rule(lax.scatter_p)
def scatter(x: Any, indices: Any, updates: Any, **params: Any) -> Rule:
    """``v d, n, n d -> v d; whole n; index v; linear 0 2; moves 0 2``: rows written at given positions.

    All rows are needed, because a later one may overwrite an earlier one.

    https://openxla.org/stablehlo/spec#scatter
    """
    base_rule = _scatter("scatter", (x, indices, updates), params, "whole", None)
    if params.get("update_jaxpr") is not None:  # x.at[i].apply(f) changes elements and has no updates
        return base_rule
    return base_rule.where(linear=((0, 2),), moves=(0, 2))


@rule(lax.dynamic_slice_p)
def dynamic_slice(x: Any, *starts: Any, slice_sizes: Sequence[int], **_: Any) -> Rule:
    """``v a, [], [] -> w a; whole w; index v; linear 0; moves 0``: a window at a position computed at run time.

    https://openxla.org/stablehlo/spec#dynamic_slice
    """
    build, rest = pass_through([n if n == taken else 1 for n, taken in zip(x.shape, slice_sizes, strict=True)])
    operand, result = [], []
    for dim, size, taken in zip(rest, x.shape, slice_sizes, strict=True):
        if taken != size:
            dim = build.dim("v", size, "index") if is_numeric(x.dtype) else build.whole(size)
        operand.append(dim)
        result.append(dim if taken == size else build.whole(taken))
    dims = tuple(operand)

    def body(shard: Shard, x: Any, *starts: Any) -> Any:
        for axis, (size, taken, start) in enumerate(zip(_global_shape(shard, dims), slice_sizes, starts, strict=True)):
            if taken == size:
                continue
            places = jnp.clip(_widened(start), 0, size - taken) + jnp.arange(taken) - _starts_at(shard, dims[axis])
            held = (places >= 0) & (places < x.shape[axis])
            x = jnp.take(x, jnp.clip(places, 0, x.shape[axis] - 1), axis, mode="clip")
            if shard.count(dims[axis][0]) > 1:
                x = jnp.where(_along(held, axis, x.ndim), x, jnp.zeros((), x.dtype))
        return x

    return build.rule([dims, *[()] * len(starts)], [tuple(result)], ((0,),), (0,), body=body)


def _along(vector: Any, axis: int, rank: int) -> Any:
    return vector.reshape(*(-1 if d == axis else 1 for d in range(rank)))


@rule(lax.dynamic_update_slice_p)
def dynamic_update_slice(x: Any, update: Any, *starts: Any, **_: Any) -> Rule:
    """``v a, w a, [], [] -> v a; whole w; index v; linear 0 1; moves 0 1``: a window is overwritten by an update.

    https://openxla.org/stablehlo/spec#dynamic_update_slice
    """
    build, rest = pass_through([n if n == taken else 1 for n, taken in zip(x.shape, update.shape, strict=True)])
    shape, written = x.shape, update.shape
    operand, window = [], []
    for dim, size, taken in zip(rest, shape, written, strict=True):
        operand.append(dim if taken == size else build.dim("v", size, "index"))
        window.append(dim if taken == size else build.whole(taken))
    dims = tuple(operand)

    def body(shard: Shard, x: Any, update: Any, *starts: Any) -> Any:
        if 0 in update.shape:
            return x
        written_here = jnp.ones((), bool)
        for axis, (size, taken, start) in enumerate(zip(shape, written, starts, strict=True)):
            if taken == size:
                continue
            first = jnp.clip(_widened(start), 0, size - taken)
            places = jnp.arange(x.shape[axis]) + _starts_at(shard, dims[axis]) - first
            update = jnp.take(update, jnp.clip(places, 0, taken - 1), axis, mode="clip")
            written_here = written_here & _along((places >= 0) & (places < taken), axis, x.ndim)
        return jnp.where(written_here, update, x)

    return build.rule([dims, tuple(window), *[()] * len(starts)], [dims], ((0, 1),), (0, 1), body=body)
