"""Reads a mask that is an array: which keys of a sequence a query sees, as a conjunction of three kinds of terms.

    equal     a[batch, query] == b[batch, key]     documents that are packed into one sequence
    keys      p[batch, key]                        keys that are padding
    queries   p[batch, query]                      queries that are padding

Together they are one pair of segment arrays, which kernels take: a query sees the keys of its own segment. `a`, `b` and
`p` may be computed in any way: the kernel's segments are computed from them. A mask by positions may be one more term.
It is a static array (`static_masks`). Everything else is refused, such as `!=`, `<` between two rows, or a mask that
differs between heads.

A mask is read through changes of shape and logical operators, also those that are written with numbers 0 and 1. Indices
are followed symbolically: `index` holds for each dimension of an array the axes of the scores that select its element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from autoshard._shown import shown
from autoshard.sharding.rewrite.constants import MOST_STEPS_TO_ROWS
from autoshard.sharding.rewrite.masks.static_masks import elements, used_dims
from autoshard.sharding.rewrite.shrinking import Axes
from autoshard.sharding.rewrite.slices import DROPOUT, Refused, is_random
from autoshard.sharding.rewrite.values import Value

Index = tuple[Axes, ...]

_UNKNOWN = (
    "the scores or weights are chosen by a condition that is an array or a threshold, and neither padding nor segments "
    "that are compared with =="
)
_OF_LAYER = (
    "the mask depends on a value of each layer, such as a window that alternates. Let each iteration of jax.lax.scan "
    "run one layer of each kind, each with its own mask"
)
_SHAPES = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "stop_gradient")


@shown
@dataclass(frozen=True)
class Row:
    """An array with one element for each position of a sequence.

    Attributes:
        top: where the mask takes it, maybe repeated along other dimensions.
        index: the index of `top`.
        base: the same array before changes of shape.
        base_index: the index of `base`; no axes for a dimension on which no element depends.
    """

    top: Value
    index: Index
    base: Value
    base_index: Index

    @property
    def axes(self) -> frozenset[Axes]:
        """The axes of the scores on which it depends."""
        return frozenset(self.base_index) - {()}

    @property
    def key(self) -> tuple[int, Index]:
        """What equal arrays share."""
        return self.base.number, self.base_index


@shown
@dataclass(frozen=True)
class Term:
    """One term of a conjunction.

    Attributes:
        kind: `equal`, `keys` or `queries`.
        rows: the array of the queries and that of the keys if `equal`; else one array.
        is_positive: whether a pair is visible where the array is True. True if `equal`.
    """

    kind: Literal["equal", "keys", "queries"]
    rows: tuple[Row, ...]
    is_positive: bool = True

    @property
    def key(self) -> Any:
        """What equal terms share."""
        return self.kind, self.is_positive, tuple(row.key for row in self.rows)


@shown
@dataclass(eq=False)
class Reading:
    """What a condition is.

    Attributes:
        terms: the terms.
        inner: the values between the arrays and the condition, the condition included.
        static: the static arrays that it takes.
    """

    terms: list[Term] = field(default_factory=list)
    inner: list[Value] = field(default_factory=list)
    static: list[Value] = field(default_factory=list)


def readings(
    condition: Value, index: Index, batch: frozenset[Axes], queries: frozenset[Axes], keys: Axes
) -> dict[bool, Reading]:
    """Return how a condition can be read. The keys say where it lets a pair see: where it is True, or False.

    Args:
        condition: an array of booleans.
        index: the axes of its dimensions.
        batch: the axes that queries and keys share: those of the batch and of heads.
        queries: the other axes of the queries.
        keys: the axis of the keys.

    Raises:
        Refused: it can be read in neither way.
    """
    if is_random(condition):
        raise Refused(DROPOUT)
    found: dict[bool, Reading] = {}
    reason: Refused | None = None
    for is_positive in (True, False):
        reader = _Reader(batch, queries, keys)
        try:
            reader.read(condition, index, is_positive)
            found[is_positive] = reader.made
        except Refused as refused:
            reason = reason or refused
    if not found:
        assert reason is not None
        raise reason
    return found


class _Reader:
    def __init__(self, batch: frozenset[Axes], queries: frozenset[Axes], keys: Axes):
        self.batch, self.queries, self.keys = batch, queries, keys
        self.made = Reading()

    def read(self, value: Value, index: Index, is_positive: bool, steps: int = 0) -> None:
        """Add the terms that make a value true, or false."""
        if steps > MOST_STEPS_TO_ROWS:
            raise Refused(_UNKNOWN)
        if value.is_static:
            self.made.static.append(value)
            return
        if value.aval.dtype.kind == "b" and (kind := self.side(row := row_of(value, index))):
            self.made.terms.append(Term(kind, (row,), is_positive))
            return
        following = self.following(value, index, is_positive)
        self.made.static += [v for v in value.operands if v.is_static and all(v is not one for one, *_ in following)]
        for operand, its_index, its_sign in following:
            self.read(operand, repeated(operand, its_index), its_sign, steps + 1)
        self.made.inner.append(value)

    def side(self, row: Row) -> Literal["keys", "queries"] | None:
        """Return whether an array has one element for each key, or for each query."""
        if sum(map(bool, row.base_index)) > len(row.axes):
            return None  # a diagonal
        own = row.axes - self.batch
        if own <= {self.keys}:
            return "keys"
        return "queries" if len(own) == 1 and own <= self.queries else None

    def following(self, value: Value, index: Index, is_positive: bool) -> list[tuple[Value, Index, bool]]:
        """Return what a value is the conjunction of: operands, their indices, and whether each is to be true."""
        op, operands = value.op, value.operands
        is_boolean = value.aval.dtype.kind == "b"
        if op in _SHAPES or op == "convert_element_type":
            if op == "convert_element_type" and (is_boolean or not is_truth(operands[0])):
                return self.compared(value, index, is_positive) if is_boolean else self.refuse(operands)
            return [(operands[0], before_shape(value, index), is_positive)]
        if op == "not" and is_boolean:
            return [(operands[0], index, not is_positive)]
        conjunction = (op == "and" and is_boolean) or (op in ("mul", "min") and all(map(is_truth, operands)))
        if (conjunction and is_positive) or (op == "or" and is_boolean and not is_positive):
            return [(v, index, is_positive) for v in operands]
        if op == "sub" and constant_of(operands[0]) == 1 and is_truth(operands[1]):
            return [(operands[1], index, not is_positive)]
        if op == "select_n" and len(operands) == 3 and operands[0].shape == value.shape:
            return self.chosen(operands, index, is_positive)
        return self.compared(value, index, is_positive)

    def chosen(self, operands: Sequence[Value], index: Index, is_positive: bool) -> list[tuple[Value, Index, bool]]:
        """A choice of which one case is known: `where(a, b, False)` is `a & b`."""
        which, *cases = operands
        known = [constant_of(v) for v in cases]
        if all(x is not None and x in (0, 1) for x in known) and known[0] != known[1]:
            return [(which, index, is_positive == bool(known[1]))]
        for n in range(2):
            if known[n] is not None and known[n] in (0, 1) and bool(known[n]) != is_positive and is_truth(cases[1 - n]):
                return [(which, index, n == 0), (cases[1 - n], index, is_positive)]
        return self.refuse(operands)

    def compared(self, value: Value, index: Index, is_positive: bool) -> list[tuple[Value, Index, bool]]:
        """A comparison: of a number 0 or 1 with a constant, or of two rows."""
        op = "ne" if value.op == "convert_element_type" else value.op  # to booleans: is not 0
        if op not in ("eq", "ne", "gt", "ge", "lt", "le"):
            return self.refuse(value.operands)
        first = value.operands[0]
        constant = 0 if value.op == "convert_element_type" else constant_of(value.operands[1])
        if constant is not None and is_truth(first):
            outcome = [bool(_COMPARISONS[op](x, constant)) for x in (0, 1)]
            if outcome[0] != outcome[1]:
                return [(first, index, is_positive == outcome[1])]
        if op == ("eq" if is_positive else "ne") and first.aval.dtype.kind in "biu":
            rows = [row_of(v, repeated(v, index)) for v in value.operands]
            sides = [self.side(row) for row in rows]
            if {*sides} == {"queries", "keys"}:
                pair = rows if sides[0] == "queries" else rows[::-1]
                self.made.terms.append(Term("equal", tuple(pair)))
                return []
        return self.refuse(value.operands)

    def refuse(self, operands: Sequence[Value]) -> Any:
        raise Refused(_OF_LAYER if any(map(_is_of_layer, operands)) else _UNKNOWN)


_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip


def repeated(operand: Value, index: Index) -> Index:
    """Return the index of an operand. A size of 1 is repeated, and a number has no index."""
    if not operand.shape:
        return ()
    return tuple(() if n == 1 else axes for n, axes in zip(operand.shape, index, strict=True))


def is_truth(value: Value) -> bool:
    """Whether all elements of an array are booleans, or numbers 0 and 1 that were made of booleans."""
    if value.aval.dtype.kind == "b":
        return True
    if (known := constant_of(value)) is not None:
        return known in (0, 1)
    if value.is_static:
        return False
    operands = value.operands
    if value.op in _SHAPES or value.op == "convert_element_type":
        return is_truth(operands[0])
    if value.op in ("mul", "min"):
        return all(map(is_truth, operands))
    if value.op == "select_n":
        return all(map(is_truth, operands[1:]))
    return value.op == "sub" and constant_of(operands[0]) == 1 and is_truth(operands[1])


def constant_of(value: Value) -> Any:
    """Return the number that all elements of a static array are; None if they differ or are not known."""
    if not value.is_static or used_dims(value):
        return None
    return np.ravel(elements(value, [np.zeros((), np.int64) for _ in value.shape]))[0]


def row_of(value: Value, index: Index) -> Row:
    """Follow an array to where it is smallest, and find on which dimensions its elements depend."""
    base, base_index = value, index
    while base.op in _SHAPES:
        try:
            inner = before_shape(base, base_index)
        except Refused:
            break
        base, base_index = base.operands[0], inner
    varying = _varying(base)
    return Row(value, index, base, tuple(axes if d in varying else () for d, axes in enumerate(base_index)))


def _varying(value: Value, steps: int = 0) -> frozenset[int]:
    """Return the dimensions on whose index the elements of an array may depend."""
    rank = [d for d, n in enumerate(value.shape) if n != 1]
    if value.is_static:
        return used_dims(value)
    if steps > MOST_STEPS_TO_ROWS or value.op not in (
        *_SHAPES,
        *_COMPARISONS,
        "and",
        "or",
        "not",
        "convert_element_type",
    ):
        return frozenset(rank)
    if value.op not in _SHAPES:
        return frozenset().union(*(_varying(v, steps + 1) for v in value.operands if v.shape))
    names: Index = tuple((d,) if n != 1 else () for d, n in enumerate(value.shape))
    try:
        inner = before_shape(value, names)
    except Refused:
        return frozenset(rank)
    return frozenset(d for e in _varying(value.operands[0], steps + 1) for d in inner[e])


def _is_of_layer(value: Value) -> bool:
    """Whether a value is one number, or repeats one, that a loop slices out of an array."""
    while value.op in (*_SHAPES, "convert_element_type"):
        value = value.operands[0]
    return value.op == "slice" and value.eqn is None and not value.shape


def before_shape(value: Value, index: Index) -> Index:
    """Return the index of the operand of a change of shape.

    Raises:
        Refused: dimensions are merged or split, or `lax.reshape` reads them in another order.
    """
    operand, params = value.operands[0], value.eqn.params
    if value.op == "reshape" and params["dimensions"] is not None:
        raise Refused(_UNKNOWN)
    if value.op in ("stop_gradient", "convert_element_type"):
        return index
    if value.op == "broadcast_in_dim":
        pairs = zip(operand.shape, params["broadcast_dimensions"], strict=True)
        return tuple(() if n == 1 else index[d] for n, d in pairs)
    if value.op == "transpose":
        return tuple(index[params["permutation"].index(d)] for d in range(len(index)))
    before, after = ([n for n in v.shape if n != 1] for v in (operand, value))
    if before != after:
        raise Refused(_UNKNOWN)
    left = iter(axes for axes, n in zip(index, value.shape, strict=True) if n != 1)
    return tuple(() if n == 1 else next(left) for n in operand.shape)


def canonical(row: Row, x: Any, batch: Sequence[Axes], position: Axes, xp: Any = jnp) -> Any:
    """Return the array of a row as `[batch, positions]`; a size is 1 if no element depends on it.

    Args:
        row: the row.
        x: the array of its base.
        batch: the axes of the batch, major to minor.
        position: the axis of its positions.
        xp: `jax.numpy` or NumPy.
    """
    for d in reversed(range(x.ndim)):
        if row.base_index[d] == ():
            x = xp.take(x, 0, axis=d)
    left = [axes for axes in row.base_index if axes != ()]
    order = [axes for axes in (*batch, position) if axes in left]
    x = xp.transpose(x, [left.index(axes) for axes in order])
    return x.reshape(*(x.shape[order.index(axes)] if axes in order else 1 for axes in (*batch, position)))
