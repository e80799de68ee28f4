"""Reductions and cumulative operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Reduction, Rule, Shard
from autoshard.spmdrules.core.rule_builder import drops_sharding, with_kind


def reduced(x: Any, axes: Sequence[int], op: Reduction, sharding: Any = None) -> Rule:
    """Returns the rule of a reduction over `axes`.

    Its result is partial where these are sharded. It is linear if it is a sum, and only moves elements if it reduces
    dimensions of size 1.
    """
    build, kept = with_kind(x.shape, axes, "reduce", op)
    result = tuple(dim for d, dim in enumerate(kept) if d not in axes)
    linear, moves = ((0,),) if op == "sum" else (), _moved_operands(x, axes)
    return build.rule([kept], [result], () if moves else linear, moves, local=drops_sharding(sharding))


def _moved_operands(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the operands that are only moved: operand 0 if all `axes` have size 1."""
    return (0,) if all(x.shape[d] == 1 for d in axes) else ()


@rule(lax.reduce_sum_p)
def reduce_sum(x: Any, *, axes: Sequence[int], out_sharding: Any = None, **_: Any) -> Rule:
    """``a r -> a; reduce r; linear 0``: the sum over some dimensions.

    https://openxla.org/stablehlo/spec#reduce
    """
    return reduced(x, axes, "sum", out_sharding)


@rule(lax.reduce_max_p)
def reduce_max(x: Any, *, axes: Sequence[int], out_sharding: Any = None, **_: Any) -> Rule:
    """``r a -> a; reduce r:max``: the largest element over some dimensions.

    https://openxla.org/stablehlo/spec#reduce
    """
    return reduced(x, axes, "max", out_sharding)


@rule(lax.reduce_min_p)
def reduce_min(x: Any, *, axes: Sequence[int], out_sharding: Any = None, **_: Any) -> Rule:
    """``a r -> a; reduce r:min``: the smallest element over some dimensions.

    https://openxla.org/stablehlo/spec#reduce
    """
    return reduced(x, axes, "min", out_sharding)


@rule(lax.reduce_prod_p)
def reduce_prod(x: Any, *, axes: Sequence[int], out_sharding: Any = None, **_: Any) -> Rule:
    """``a r -> a; reduce r:mul``: the product over some dimensions.

    https://openxla.org/stablehlo/spec#reduce
    """
    return reduced(x, axes, "mul", out_sharding)


@rule(lax.reduce_and_p)
def reduce_and(x: Any, *, axes: Sequence[int], out_sharding: Any = None, **_: Any) -> Rule:
    """``a r -> a; reduce r:and``: the bitwise or logical AND over some dimensions.

    https://openxla.org/stablehlo/spec#reduce
    """
    return reduced(x, axes, "and", out_sharding)


@rule(lax.reduce_or_p)
def reduce_or(x: Any, *, axes: Sequence[int], out_sharding: Any = None, **_: Any) -> Rule:
    """``a r -> a; reduce r:or``: the bitwise or logical OR over some dimensions.

    https://openxla.org/stablehlo/spec#reduce
    """
    return reduced(x, axes, "or", out_sharding)


@rule(lax.reduce_xor_p)
def reduce_xor(x: Any, *, axes: Sequence[int], out_sharding: Any = None, **_: Any) -> Rule:
    """``a r -> a; reduce r:xor``: the bitwise XOR over some dimensions.

    https://openxla.org/stablehlo/spec#reduce
    """
    return reduced(x, axes, "xor", out_sharding)


@rule(lax.argmax_p)
def argmax(x: Any, *, axes: Sequence[int], index_dtype: Any, **_: Any) -> Rule:
    """``a r -> a; reduce r:argmax``: the position of the largest element; a shard returns that of its largest one.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.argmax.html
    """
    return _position(lax.argmax, x, axes, index_dtype, "argmax")


@rule(lax.argmin_p)
def argmin(x: Any, *, axes: Sequence[int], index_dtype: Any, **_: Any) -> Rule:
    """``r a -> a; reduce r:argmin``: the position of the smallest element; a shard returns that of its smallest one.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.argmin.html
    """
    return _position(lax.argmin, x, axes, index_dtype, "argmin")


def _position(find: Callable[..., Any], x: Any, axes: Sequence[int], index_dtype: Any, op: Reduction) -> Rule:
    found = reduced(x, axes, op).where(moves=())  # the results are positions, not elements
    (axis,) = axes
    searched = found.operands[0][axis]

    def body(shard: Shard, x: Any) -> Any:
        here = find(x, axis, index_dtype)
        return here + jnp.asarray(shard.offset(searched[0]), index_dtype) if searched else here

    return found.where(body=body)


@rule(lax.reduce_p)
def reduce(*avals: Any, dimensions: Sequence[int], **_: Any) -> Rule:
    """``a w, a w, [], [] -> a, a; whole w``: a reduction by a user-defined function.

    https://openxla.org/stablehlo/spec#reduce
    """
    arrays = len(avals) // 2
    build, dims = with_kind(avals[0].shape, dimensions, "whole")
    result = tuple(dim for d, dim in enumerate(dims) if d not in dimensions)
    return build.rule([dims] * arrays + [()] * arrays, [result] * arrays)


@rule(lax.cumsum_p)
def cumsum(x: Any, *, axis: int, **_: Any) -> Rule:
    """``a w -> a w; whole w; linear 0``: cumulative sums.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.cumsum.html
    """
    build, dims = with_kind(x.shape, (axis,), "whole")
    moves = _moved_operands(x, (axis,))
    return build.rule([dims], [dims], () if moves else ((0,),), moves)


@rule(lax.cumprod_p, lax.cummax_p, lax.cummin_p, lax.cumlogsumexp_p)
def cumulative(x: Any, *, axis: int, **_: Any) -> Rule:
    """``a w -> a w; whole w``: cumulative products, maxima, minima or log-sum-exps.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.cumlogsumexp.html
    """
    build, dims = with_kind(x.shape, (axis,), "whole")
    return build.rule([dims], [dims], moves=_moved_operands(x, (axis,)))
