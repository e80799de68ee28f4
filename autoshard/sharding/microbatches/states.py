"""Which part of a value a microbatch has.

    whole      the value does not depend on the batch: all of it
    split      the rows of its microbatch
    partial    one term of a sum (or maximum, ...) over the microbatches
    own        an estimate of the value from the rows of its microbatch, only where `allow_numerics` permits it
    after      nothing: it is known when all microbatches are done

A microbatch is a shard in time: microbatch m of M has the rows m, m + M, m + 2 M, ... of the batch. With strided rows a
microbatch is sharded over devices as the batch is. A dimension into which the batch was merged has `stride` elements
for each row. It is read as [rows / M, M, stride], and microbatch m takes position m of the middle dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown
from autoshard.spmdrules.core.rule import Dims, Rule


@shown
@dataclass(frozen=True)
class Whole:
    """All of the value."""


@shown
@dataclass(frozen=True)
class After:
    """Known when all microbatches are done.

    Attributes:
        reason: why it is computed from collected rows; None if it is computed from sums only.
    """

    reason: str | None = None


@shown
@dataclass(frozen=True)
class Split:
    """The rows of one microbatch.

    Attributes:
        dim: the dimension that the rows are in.
        stride: the elements of this dimension that belong to one row.
    """

    dim: int
    stride: int = 1


@shown
@dataclass(frozen=True)
class Partial:
    """One term of the value, to be combined by an operation: `sum`, `max`, ..."""

    op: str = "sum"


@shown
@dataclass(frozen=True)
class Own:
    """An estimate of the value from the microbatch's own rows, such as the mean of a batch norm.

    The estimate of a sum is the microbatch's term times the number of microbatches. The estimate of the whole step is
    the mean of the estimates.
    """


State = Whole | After | Split | Partial | Own
WHOLE = Whole()
OWN = Own()


def factor_at(rule: Rule, dims: Dims, split: Split, count: int) -> tuple[str, int] | None:
    """Return the factor of a dimension that has the rows, and the stride within this factor.

    Args:
        rule: the rule of the operator.
        dims: the factors of an operand's or result's dimensions.
        split: where the rows of a microbatch are.
        count: number of microbatches.

    Returns:
        The name of the factor and the stride; None if no single factor has the rows.
    """
    after = 1
    for name in reversed(dims[split.dim]):
        size = rule.factor(name).size or 1
        if split.stride % after == 0 and size % (split.stride // after * count) == 0:
            return name, split.stride // after
        after *= size
    return None


def split_of(rule: Rule, dims: Dims, factor: str, stride: int) -> Split | None:
    """Return where an operand or result has the rows that a factor has; None if it lacks the factor.

    Args:
        rule: the rule of the operator.
        dims: the factors of its dimensions.
        factor: the factor that has the rows.
        stride: the stride within this factor.
    """
    for number, dim in enumerate(dims):
        if factor in dim:
            after = math.prod(rule.factor(name).size or 1 for name in dim[dim.index(factor) + 1 :])
            return Split(number, stride * after)
    return None


def parts(x: Any, split: Split, count: int) -> Any:
    """Return a whole array as an array of its microbatches: `[M, ...]`."""
    before, after = x.shape[: split.dim], x.shape[split.dim + 1 :]
    spread = x.reshape(*before, x.shape[split.dim] // (count * split.stride), count, split.stride, *after)
    moved = jnp.moveaxis(spread, split.dim + 1, 0)
    return moved.reshape(count, *before, x.shape[split.dim] // count, *after)


def part(x: Any, split: Split, count: int, number: Any) -> Any:
    """Return the rows of a whole array that a microbatch has."""
    before, after = x.shape[: split.dim], x.shape[split.dim + 1 :]
    spread = x.reshape(*before, x.shape[split.dim] // (count * split.stride), count, split.stride, *after)
    one = lax.dynamic_index_in_dim(spread, number, split.dim + 1, keepdims=False)
    return one.reshape(*before, x.shape[split.dim] // count, *after)


def joined(stacked: Any, split: Split) -> Any:
    """Return the whole array from its microbatches `[M, ...]`; the inverse of `parts`."""
    count, (*before,) = stacked.shape[0], stacked.shape[1 : split.dim + 1]
    size, after = stacked.shape[split.dim + 1], stacked.shape[split.dim + 2 :]
    spread = stacked.reshape(count, *before, size // split.stride, split.stride, *after)
    return jnp.moveaxis(spread, 0, split.dim + 1).reshape(*before, count * size, *after)
