"""The states of values in a cut step: which part of a value one microbatch has.

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


class NotCut(Exception):
    """The step cannot be cut into microbatches. The text gives the reason."""


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


def factor_at(rule: Rule, dims: Dims, split: Split, count: int, rows: int | None = None) -> tuple[str, int] | None:
    """Return the factor of a dimension that has the rows, and the stride within this factor.

    Args:
        rule: the rule of the operator.
        dims: the factors of an operand's or result's dimensions.
        split: where the rows of a microbatch are.
        count: number of pieces that the rows are cut into.
        rows: the number of all rows, if one factor must have them all. Consecutive rows are then in one piece.

    Returns:
        The name of the factor and the stride; None if no single factor has the rows.
    """
    after = 1
    for name in reversed(dims[split.dim]):
        size = rule.factor(name).size or 1
        inner, rest = divmod(split.stride, after)
        if inner and not rest and (size % (inner * count) == 0 if rows is None else size == inner * rows):
            return name, inner
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


@shown
@dataclass(frozen=True)
class Cut:
    """How rows are cut. Row (r, b, m) of a batch, with r major and m minor, belongs to microbatch m and replica r.

    Attributes:
        count: number of microbatches.
        replicas: number of groups of rows whose terms are summed apart, until the loop has ended.
        rows: the number of all rows, if there are several replicas.
    """

    count: int
    replicas: int = 1
    rows: int = 0

    @property
    def pieces(self) -> int:
        """The number of pieces that the rows are cut into."""
        return self.count * self.replicas

    def spread(self, x: Any, split: Split) -> Any:
        """Return a whole array with its rows as four dimensions: `[..., R, rows / R / M, M, stride, ...]`."""
        before, after = x.shape[: split.dim], x.shape[split.dim + 1 :]
        rows = x.shape[split.dim] // (self.pieces * split.stride)
        self.check(x.shape[split.dim], split)
        return x.reshape(*before, self.replicas, rows, self.count, split.stride, *after)

    def check(self, size: int, split: Split) -> None:
        """Check that the rows are the major part of a dimension of this size, as groups of consecutive rows need.

        Raises:
            NotCut: another dimension was merged in front of them.
        """
        if self.replicas > 1 and size != self.rows * split.stride:
            raise NotCut("the rows of the batch were merged behind another dimension")

    def parts(self, x: Any, split: Split) -> Any:
        """Return a whole array as an array of its microbatches: `[M, ...]`, or `[M, R, ...]` with several replicas."""
        before, after = x.shape[: split.dim], x.shape[split.dim + 1 :]
        moved = jnp.moveaxis(self.spread(x, split), (split.dim + 2, split.dim), (0, 1))
        lead = (self.count, self.replicas) if self.replicas > 1 else (self.count,)
        return moved.reshape(*lead, *before, x.shape[split.dim] // self.pieces, *after)

    def part(self, x: Any, split: Split, number: Any, replica: Any = 0) -> Any:
        """Return the rows of a whole array that a replica of a microbatch has."""
        before, after = x.shape[: split.dim], x.shape[split.dim + 1 :]
        one = lax.dynamic_index_in_dim(self.spread(x, split), number, split.dim + 2, keepdims=False)
        if self.replicas > 1:
            one = lax.dynamic_index_in_dim(one, replica, split.dim, keepdims=False)
        return one.reshape(*before, x.shape[split.dim] // self.pieces, *after)

    def joined(self, made: Any, split: Split) -> Any:
        """Return the whole array from its microbatches; the inverse of `parts`."""
        made = made if self.replicas > 1 else made[:, None]
        self.check(made.shape[split.dim + 2] * self.pieces, split)
        before, size, after = made.shape[2 : split.dim + 2], made.shape[split.dim + 2], made.shape[split.dim + 3 :]
        rows = made.reshape(self.count, self.replicas, *before, size // split.stride, split.stride, *after)
        moved = jnp.moveaxis(rows, (0, 1), (split.dim + 2, split.dim))
        return moved.reshape(*before, self.pieces * size, *after)
