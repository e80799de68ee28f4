"""Operators that move elements by position: transpose, broadcast, reshape, slice, pad, concatenate."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard._compat import primitives
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Dims, LocalParams, Rule, Shard
from autoshard.spmdrules.core.rule_builder import (
    Dim,
    RuleBuilder,
    pass_through,
    replace_dim,
    with_kind,
    without_sharding,
)

_LINEAR_IN_FIRST = ((0,),)


def sets_shape(dims: Dims, *names: str) -> LocalParams:
    """Returns a `local` that sets parameters to the shard's shape of `dims`, and removes the global sharding."""

    def local(params: Mapping[str, Any], shard: Shard) -> Mapping[str, Any]:
        return {**without_sharding(params, shard), **{name: shard.shape(dims) for name in names}}

    return local


def _all_operands(operands: Sequence[Any]) -> tuple[int, ...]:
    return tuple(range(len(operands)))


@rule(lax.transpose_p)
def transpose(x: Any, *, permutation: Sequence[int], **_: Any) -> Rule:
    """``a b c -> c a b; linear 0; moves 0``: the dimensions are permuted.

    https://openxla.org/stablehlo/spec#transpose
    """
    build, dims = pass_through(x.shape)
    return build.rule([dims], [tuple(dims[d] for d in permutation)], _LINEAR_IN_FIRST, (0,))


@rule(lax.broadcast_in_dim_p)
def broadcast_in_dim(
    x: Any, *dynamic: Any, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any
) -> Rule:
    """``b -> a b c; linear 0; moves 0``: the elements are repeated along new dimensions.

    https://openxla.org/stablehlo/spec#broadcast_in_dim
    """
    build, result = pass_through(shape)
    operand = tuple(
        result[d] if size == shape[d] else () for size, d in zip(x.shape, broadcast_dimensions, strict=True)
    )
    return build.rule([operand, *[()] * len(dynamic)], [result], _LINEAR_IN_FIRST, (0,), sets_shape(result, "shape"))


@rule(lax.squeeze_p)
def squeeze(x: Any, *, dimensions: Sequence[int], **_: Any) -> Rule:
    """``a 1 b -> a b; linear 0; moves 0``: some dimensions of size 1 are removed.

    https://openxla.org/stablehlo/spec#reshape
    """
    build, dims = pass_through(x.shape)
    dropped = {d % len(x.shape) for d in dimensions}
    return build.rule([dims], [tuple(dim for d, dim in enumerate(dims) if d not in dropped)], _LINEAR_IN_FIRST, (0,))


@rule(*primitives("expand_dims"))
def expand_dims(x: Any, *, dimensions: Sequence[int], **_: Any) -> Rule:
    """``a b -> a 1 b; linear 0; moves 0``: dimensions of size 1 are added.

    https://openxla.org/stablehlo/spec#reshape
    """
    build, dims = pass_through(x.shape)
    rest = iter(dims)
    rank = len(x.shape) + len(dimensions)
    added = {d % rank for d in dimensions}
    return build.rule([dims], [tuple(() if d in added else next(rest) for d in range(rank))], _LINEAR_IN_FIRST, (0,))


@rule(lax.reshape_p)
def reshape(x: Any, *dynamic: Any, new_sizes: Sequence[int], dimensions: Sequence[int] | None = None, **_: Any) -> Rule:
    """``a b c -> (a b) c; linear 0; moves 0``: dimensions are merged and split; factors common to both shapes pass.

    https://openxla.org/stablehlo/spec#reshape
    """
    build = RuleBuilder()
    if 0 in x.shape:
        operand, result = (tuple(build.whole(n) for n in shape) for shape in (x.shape, new_sizes))
    else:
        read = dimensions or range(len(x.shape))  # the order in which the operand's dimensions are read
        permuted, result = common_factors(build, [x.shape[d] for d in read], new_sizes)
        operand = tuple(dim for _, dim in sorted(zip(read, permuted, strict=True)))
    scalars = [()] * len(dynamic)
    return build.rule([operand, *scalars], [result], _LINEAR_IN_FIRST, (0,), sets_shape(result, "new_sizes"))


def common_factors(build: RuleBuilder, old: Sequence[int], new: Sequence[int]) -> tuple[Dims, Dims]:
    """Finds the factors that two shapes with the same number of elements have in common.

    Both shapes are split into segments where their cumulative products agree. In each segment, the greatest common
    divisor of the leading dimensions is a factor of both; it is divided out, and this repeats until the divisor is 1.
    Then the same is done from the trailing dimensions. What remains in the middle is whole: (6, 4) -> (8, 3) is
    ``(a w) w1 -> (a w2) w3`` with a=2.

    Returns:
        The factors of each dimension of `old` and of `new`, major to minor.
    """
    left, right = _ShapeFactors(old), _ShapeFactors(new)
    ends = sorted(set(left.ends) & set(right.ends))
    for low, high in zip([1, *ends], ends, strict=False):
        for major in (True, False):
            while pair := _next_pair(left, right, low, high, major):
                i, j = pair
                size = math.gcd(left.rest[i], right.rest[j])
                if size == 1:
                    break
                dim = build.next(size)
                left.take(i, dim, size, major)
                right.take(j, dim, size, major)
    return left.dims(build), right.dims(build)


def _next_pair(left: _ShapeFactors, right: _ShapeFactors, low: int, high: int, major: bool) -> tuple[int, int] | None:
    i, j = left.open(low, high, major), right.open(low, high, major)
    return None if i is None or j is None else (i, j)


class _ShapeFactors:
    """One of the two shapes, while its factors are found.

    Attributes:
        rest: the size of each dimension without the factors taken from it so far.
        ends: the cumulative products of the shape.
        major: the factors taken from the major end of each dimension.
        minor: those taken from its minor end.
    """

    def __init__(self, shape: Sequence[int]):
        self.rest = list(shape)
        self.ends = list(itertools.accumulate(shape, operator.mul))
        self.major: list[Dim] = [()] * len(shape)
        self.minor: list[Dim] = [()] * len(shape)

    def open(self, low: int, high: int, major: bool) -> int | None:
        """Returns the first (or last) dimension of the segment from `low` to `high` with a size left above 1."""
        found = [d for d, n in enumerate(self.rest) if n > 1 and low < self.ends[d] <= high]
        return (found[0] if major else found[-1]) if found else None

    def take(self, d: int, dim: Dim, size: int, major: bool) -> None:
        """Takes a factor from the major or the minor end of dimension `d`."""
        self.rest[d] //= size
        if major:
            self.major[d] += dim
        else:
            self.minor[d] = dim + self.minor[d]

    def dims(self, build: RuleBuilder) -> Dims:
        """Returns the factors of each dimension; what is left in the middle is whole."""
        return tuple(
            (*major, *build.whole(rest), *minor)
            for major, rest, minor in zip(self.major, self.rest, self.minor, strict=True)
        )


@rule(lax.concatenate_p)
def concatenate(*xs: Any, dimension: int, **_: Any) -> Rule:
    """``a w, a w1 -> a w2; whole w w1 w2; linear 0 1; moves 0 1``: arrays are joined along a dimension, which is whole.

    The dimension passes if all operands but one are empty.

    https://openxla.org/stablehlo/spec#concatenate
    """
    lengths = [x.shape[dimension] for x in xs]
    build, rest = pass_through([1 if d == dimension else n for d, n in enumerate(xs[0].shape)])
    passing = build.next(sum(lengths)) if sum(n > 0 for n in lengths) == 1 else None
    joined = [build.whole(n) if passing is None or not n else passing for n in (*lengths, sum(lengths))]
    *operands, result = (replace_dim(rest, dimension, dim) for dim in joined)
    return build.rule(operands, [result], (_all_operands(xs),), _all_operands(xs))


@rule(*primitives("split"))
def split(x: Any, *, sizes: Sequence[int], axis: int, **_: Any) -> Rule:
    """``a w -> a w1, a w2; whole w w1 w2; linear 0; moves 0``: an array is split along a dimension, which is whole.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.split.html
    """
    build, dims = with_kind(x.shape, (axis,), "whole")
    return build.rule([dims], [replace_dim(dims, axis, build.whole(n)) for n in sizes], _LINEAR_IN_FIRST, (0,))


@rule(*primitives("stack"))
def stack(*xs: Any, axis: int, **_: Any) -> Rule:
    """``a b, a b -> a w b; whole w; linear 0 1; moves 0 1``: arrays are joined along a new dimension.

    https://docs.jax.dev/en/latest/_autosummary/jax.numpy.stack.html
    """
    build, dims = pass_through(xs[0].shape)
    result = (*dims[:axis], build.whole(len(xs)), *dims[axis:])
    return build.rule([dims] * len(xs), [result], (_all_operands(xs),), _all_operands(xs))


@rule(*primitives("unstack"))
def unstack(x: Any, *, axis: int, **_: Any) -> Rule:
    """``a w -> a, a, a; whole w; linear 0; moves 0``: an array is split into its slices along a dimension.

    https://docs.jax.dev/en/latest/_autosummary/jax.numpy.unstack.html
    """
    count = x.shape[axis]
    build, dims = pass_through((*x.shape[:axis], *x.shape[axis + 1 :]))
    return build.rule([(*dims[:axis], build.whole(count), *dims[axis:])], [dims] * count, _LINEAR_IN_FIRST, (0,))


@rule(*primitives("tile"))
def tile(x: Any, *, reps: Sequence[int], **_: Any) -> Rule:
    """``a b -> a (r b); linear 0; moves 0``: the array is repeated along its dimensions.

    https://docs.jax.dev/en/latest/_autosummary/jax.numpy.tile.html
    """
    build, dims = pass_through(x.shape)
    times = [build.dim("r", n) for n in reps]
    result = tuple(r + dim for r, dim in zip(times, dims, strict=True))
    return build.rule([dims], [result], _LINEAR_IN_FIRST, (0,), sets_shape(tuple(times), "reps"))


@rule(lax.pad_p)
def pad(x: Any, value: Any, *, padding_config: Sequence[tuple[int, int, int]], **_: Any) -> Rule:
    """``a w, [] -> a w1; whole w w1; linear 0 1; moves 0 1``: padded dimensions are whole, others pass.

    If every element gets the same number of padding elements, the padded dimension passes, in blocks of an element and
    its padding: ``t, [] -> (t x); whole x``.

    https://openxla.org/stablehlo/spec#pad
    """
    padding = [tuple(p) for p in padding_config]
    adds = any(n > 0 for p in padding for n in p)
    build = RuleBuilder()
    pairs = [_padded(build, n, *p) for n, p in zip(x.shape, padding, strict=True)]
    operand, result = (tuple(side) for side in zip(*pairs, strict=True)) if pairs else ((), ())
    linear = ((0, 1),) if adds else ((0,), (0, 1))
    return build.rule([operand, ()], [result], linear, (0, 1) if adds else (0,))


def _padded(build: RuleBuilder, size: int, low: int, high: int, inner: int) -> tuple[Dim, Dim]:
    """Returns a dimension before and after padding."""
    if low == high == inner == 0:
        dim = build.next(size)
        return dim, dim
    if size and low >= 0 and high >= 0 and low + high == inner:
        blocks = build.dim("t", size)
        return blocks, blocks + build.whole(inner + 1, "x")
    return build.whole(size), build.whole(low + high + size + max(size - 1, 0) * inner)


@rule(lax.rev_p)
def rev(x: Any, *, dimensions: Sequence[int], **_: Any) -> Rule:
    """``a w -> a w; whole w; linear 0; moves 0``: some dimensions are reversed.

    https://openxla.org/stablehlo/spec#reverse
    """
    build, dims = with_kind(x.shape, dimensions, "whole")
    return build.rule([dims], [dims], _LINEAR_IN_FIRST, (0,))


@rule(lax.slice_p)
def slice_(
    x: Any, *, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Sequence[int] | None, **_: Any
) -> Rule:
    """``a w -> a w1; whole w w1; linear 0; moves 0``: dimensions taken in full pass, sliced ones are whole.

    If every n-th element of a dimension is taken, and n divides its size, blocks of n pass: ``(t x) -> t; whole x``.

    https://openxla.org/stablehlo/spec#slice
    """
    build = RuleBuilder()
    steps = strides or (1,) * len(x.shape)
    slices = list(zip(x.shape, start_indices, limit_indices, steps, strict=True))
    pairs = [_sliced(build, *each) for each in slices]
    operand = tuple(before for before, _ in pairs)

    def local(params: Mapping[str, Any], shard: Shard) -> Mapping[str, Any]:
        here = shard.shape(operand)
        limits = (limit if n == size else n for n, (size, _, limit, _) in zip(here, slices, strict=True))
        return {**params, "limit_indices": tuple(limits)}

    return build.rule([operand], [tuple(after for _, after in pairs)], _LINEAR_IN_FIRST, (0,), local)


def _sliced(build: RuleBuilder, size: int, start: int, limit: int, step: int) -> tuple[Dim, Dim]:
    """Returns a dimension before and after slicing."""
    count = max(0, -((start - limit) // step))
    if (start, count, step) == (0, size, 1):
        dim = build.next(size)
        return dim, dim
    if count and count * step == size:
        blocks = build.dim("t", count)
        return blocks + build.whole(step, "x"), blocks
    return build.whole(size), build.whole(count)


@rule(lax.iota_p)
def iota(*dynamic: Any, dtype: Any, shape: Sequence[int], dimension: int, **_: Any) -> Rule:
    """``-> a b; offset b``: a shard counts from its offset.

    https://openxla.org/stablehlo/spec#iota
    """
    build = RuleBuilder()
    dims = tuple(build.next(n, "offset" if d == dimension else "pass") for d, n in enumerate(shape))
    counted = dims[dimension]

    def body(shard: Shard, *_: Any) -> Any:
        count = lax.broadcasted_iota(jnp.int32, shard.shape(dims), dimension)
        return (count + shard.offset(counted[0]) if counted else count).astype(dtype)

    return build.rule([()] * len(dynamic), [dims], local=sets_shape(dims, "shape"), body=body)


@rule(*primitives("empty"))
def empty(*dynamic: Any, shape: Sequence[int], **_: Any) -> Rule:
    """``-> a b``: an uninitialized array.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.empty.html
    """
    build, dims = pass_through(shape)
    return build.rule([()] * len(dynamic), [dims], local=sets_shape(dims, "shape"))


@rule(*primitives("empty2"))
def empty_scalar(**_: Any) -> Rule:
    """``-> []``: an uninitialized scalar, which scans and their gradients broadcast into buffers.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html
    """
    return RuleBuilder().rule([], [()])
