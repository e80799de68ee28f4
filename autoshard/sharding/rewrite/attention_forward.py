"""Finds attention in a program by its dataflow: two products around a softmax of the first one's result.

    scores  = q . k          contracted over head_dim
    weights = f(scores)      any operators that are the same at every size, with an exponential and a sum
    out     = weights . v    contracted over the keys: the dimension of the scores that only k has

Which operand is q, which dimensions are queries, keys, batch and heads is read from the dimension numbers of the two
products and from how the rules join dimensions in between. `f` is not looked at here: it is measured and proven later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.rewrite.constants import MOST_VALUES_BETWEEN_PRODUCTS
from autoshard.sharding.rewrite.shrinking import Axes, SmallShapes
from autoshard.sharding.rewrite.slices import Refused
from autoshard.sharding.rewrite.values import Graph, Value

_EXPONENTIALS = ("exp", "exp2")
_ENDS = ("carry", "opaque", "slice", "stack")
_MOVES = ("convert_element_type", "reshape", "squeeze", "transpose")
_SINKS = ("its softmax has more values than keys, such as sinks, which are recognised only as the argument of "
          "autoshard.models.attention(..., sinks=...)")  # fmt: skip


@shown
@dataclass(frozen=True, eq=False)
class Candidate:
    """Two products around an exponential and a sum.

    Attributes:
        scores: the first product.
        weights: the operand of the second product that comes from the scores.
        product: the second product.
        inner: both products, and the values between them.
        query_side, weight_side: which operand of the first product is q, and which of the second one the weights.
    """

    scores: Value
    weights: Value
    product: Value
    inner: tuple[Value, ...]
    query_side: int
    weight_side: int

    @property
    def q(self) -> Value:
        """The queries."""
        return self.scores.operands[self.query_side]

    @property
    def k(self) -> Value:
        """The keys."""
        return self.scores.operands[1 - self.query_side]

    @property
    def v(self) -> Value:
        """The values."""
        return self.product.operands[1 - self.weight_side]

    @property
    def line(self) -> str:
        """The user's line of the scores, else of the second product."""
        return _compat.program_line(self.scores.eqn) or _compat.program_line(self.product.eqn)


@shown
@dataclass(frozen=True, eq=False)
class Unread:
    """A product that cannot be matched, or could not be because of an error in the matcher.

    Attributes:
        product: the product.
        error: the reason, or the error.
    """

    product: Value
    error: Exception

    @property
    def line(self) -> str:
        """The user's line of the product."""
        return _compat.program_line(self.product.eqn)


def dimension_numbers(product: Value, side: int) -> tuple[list[int], list[int], list[int]]:
    """Return the contracted, batch and free dimensions of an operand of a product, without those of size 1."""
    contracted, batch = product.eqn.params["dimension_numbers"]
    shape = product.operands[side].shape
    c, b = ([d for d in found[side] if shape[d] != 1] for found in (contracted, batch))
    free = [d for d in range(len(shape)) if d not in (*contracted[side], *batch[side]) and shape[d] != 1]
    return c, b, free


def candidates(graph: Graph) -> Iterator[Candidate | Unread]:
    """Yield every attention-shaped part of the forward pass of a program."""
    for product in graph.values:
        if product.op != "dot_general" or product.is_static or product.is_backward:
            continue
        for side in (0, 1):
            try:
                found = _candidate(product, side)
            except Exception as error:  # the matcher reads any user's program; the caller records the error
                found = Unread(product, error)
            if found is not None:
                yield found


def _candidate(product: Value, side: int) -> Candidate | Unread | None:
    weights = product.operands[side]
    if _has_sinks(weights):
        return Unread(product, Refused(_SINKS))
    inner, products = _upstream(weights)
    if not products or not _is_softmax(inner):
        return None
    for scores in products:
        reached = _descendants(scores, inner)
        if weights not in reached:
            continue
        # Only operators on the path of the scores join dimensions here. Those of a bias from outside must not.
        flow = [v for v in inner if v in reached]
        shapes = _shapes([scores, *flow, product])
        if shapes is None:
            continue
        for query_side in (0, 1):
            if _is_attention(shapes, scores, product, query_side, side):
                return Candidate(scores, weights, product, (scores, *flow, product), query_side, side)
    return None


def _is_softmax(inner: list[Value]) -> bool:
    """Whether some values have an exponential and a sum."""
    sums = (user.op == "reduce_sum" for value in inner for user in value.users)
    return any(value.op in _EXPONENTIALS for value in inner) and any(sums)


def _has_sinks(weights: Value) -> bool:
    """Whether the weights are a slice of a softmax over scores that other values were appended to."""
    while weights.op in _MOVES and weights.eqn is not None:
        weights = weights.operands[0]
    if weights.op != "slice" or weights.eqn is None:
        return False
    inner, _ = _upstream(weights.operands[0])
    return _is_softmax(inner) and any(value.op == "concatenate" and _upstream(value)[1] for value in inner)


def _upstream(weights: Value) -> tuple[list[Value], list[Value]]:
    """Return the values between the weights and the nearest products before them, and these products."""
    inner: list[Value] = []
    products: list[Value] = []
    seen: set[Value] = set()
    todo = [weights]
    while todo:
        value = todo.pop()
        if (
            value in seen
            or value.is_static
            or value.eqn is None
            or value.op in _ENDS
            or len(seen) > MOST_VALUES_BETWEEN_PRODUCTS
        ):
            continue
        seen.add(value)
        if value.op == "dot_general":
            products.append(value)
            continue
        inner.append(value)
        todo += value.operands
    inner.sort(key=lambda v: v.number)
    return inner, sorted(products, key=lambda v: v.number)


def _descendants(source: Value, inner: list[Value]) -> set[Value]:
    """Return a value and those of `inner`, in the order of the program, that are computed from it."""
    reached = {source}
    for one in inner:
        if any(v in reached for v in one.operands):
            reached.add(one)
    return reached


def _shapes(inner: list[Value]) -> SmallShapes | None:
    try:
        return SmallShapes(inner, lenient=True)
    except Refused:
        return None


def _is_attention(shapes: SmallShapes, scores: Value, product: Value, query_side: int, side: int) -> bool:
    """Whether the second product contracts exactly the keys, and the operands share their batch dimensions."""
    key_side = 1 - query_side
    _, k_batch, keys = dimension_numbers(scores, key_side)
    contracted, w_batch, _ = dimension_numbers(product, side)
    _, v_batch, v_free = dimension_numbers(product, 1 - side)
    q_free = dimension_numbers(scores, query_side)[2]
    axes = shapes.axes
    k, w, v, q = (
        scores.operands[key_side],
        product.operands[side],
        product.operands[1 - side],
        scores.operands[query_side],
    )
    if len(keys) != 1 or not contracted or not q_free or len(v_free) > 1 or q is k:
        return False
    wanted = axes[k][keys[0]]
    found: Axes = tuple(a for d in contracted for a in axes[w][d])
    batch = [axes[k][d] for d in k_batch]
    return bool(wanted) and found == wanted and {axes[v][d] for d in v_batch} == {*batch} and len(w_batch) == len(batch)
