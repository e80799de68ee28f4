"""Finds the gradients of a recognised attention: what differentiation made of its two products.

    d_weights = d_out . v        a product with v over its features
    d_v       = weights . d_out  a product with the weights over the queries
    d_q, d_k  = products with k over the keys, and with q over the queries, of what comes from d_weights

Nothing else is assumed of the backward pass. What lies between is proven, not read. `d_out` is the value from which,
with q, k and v, all three gradients can be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.sharding.rewrite.attention_forward import Candidate, dimension_numbers
from autoshard.sharding.rewrite.constants import MOST_STEPS_TO_GRADIENT
from autoshard.sharding.rewrite.slices import Refused, Slice, cut_out
from autoshard.sharding.rewrite.values import Value


@shown
@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of one attention.

    Attributes:
        d_out: the cotangent of the result.
        d_q, d_k, d_v: the gradients; None where the program computes none.
        slice: what computes them.
    """

    d_out: Value
    d_q: Value | None
    d_k: Value | None
    d_v: Value | None
    slice: Slice

    @property
    def present(self) -> tuple[Value, ...]:
        """The gradients that the program computes."""
        return tuple(v for v in (self.d_q, self.d_k, self.d_v) if v is not None)


def gradients_of(found: Candidate, out: Value) -> Gradients | None:
    """Return the gradients of a recognised attention; None if the program has none.

    Raises:
        Refused: there are some, but not those of an attention with one use.
    """
    d_weights = [(p, s) for p, s in _products_with(found.v, found.product) if _is_over(found, p, s, "features")]
    d_vs = [(p, s) for p, s in _products_with(found.weights, found.product) if _is_over_queries(found, p, s)]
    if not d_weights and not d_vs:
        return None
    downstream = _downstream([p for p, _ in d_weights])
    d_qs = [p for p, s in _products_with(found.k, found.scores) if p.operands[1 - s] in downstream]
    d_ks = [p for p, s in _products_with(found.q, found.scores) if p.operands[1 - s] in downstream]
    for name, some in (("v", d_vs), ("q", d_qs), ("k", d_ks)):
        if len(some) > 1:
            raise Refused(f"its {name} has {len(some)} gradients; a kernel computes one, from one use of the result")
    d_v, d_q, d_k = (some[0] if some else None for some in ([p for p, _ in d_vs], d_qs, d_ks))
    results = tuple(v for v in (d_q, d_k, d_v) if v is not None)
    if not results:
        return None
    starts = [p.operands[1 - s] for p, s in [*d_weights, *d_vs]]
    reason: Refused | None = None
    for d_out in _bases(starts, found, out):
        try:
            return Gradients(d_out, d_q, d_k, d_v, cut_out(results, (found.q, found.k, found.v, d_out)))
        except Refused as refused:
            reason = reason or refused
    raise reason or Refused("its gradients have no common cotangent")


def _products_with(value: Value, except_for: Value) -> list[tuple[Value, int]]:
    """Return the products that take a value, and on which side."""
    users = [u for u in dict.fromkeys(value.users) if u.op == "dot_general" and u is not except_for and u.is_used]
    return [(u, side) for u in users for side in (0, 1) if u.operands[side] is value]


def _is_over(found: Candidate, product: Value, side: int, what: str) -> bool:
    """Whether a product contracts exactly the features of v."""
    contracted = dimension_numbers(product, side)[0]
    return contracted == dimension_numbers(found.product, 1 - found.weight_side)[2]


def _is_over_queries(found: Candidate, product: Value, side: int) -> bool:
    """Whether a product contracts exactly the dimensions of the weights that are not keys and not batch."""
    contracted = dimension_numbers(product, side)[0]
    return sorted(contracted) == sorted(dimension_numbers(found.product, found.weight_side)[2])


def _downstream(sources: Sequence[Value]) -> set[Value]:
    """Return all values that are computed from some without another product."""
    reached, todo = set(sources), list(sources)
    while todo:
        for user in todo.pop().users:
            if user not in reached and user.op != "dot_general" and user.op not in ("stack", "slice"):
                reached.add(user)
                todo.append(user)
    return reached


def _bases(starts: Sequence[Value], found: Candidate, out: Value) -> list[Value]:
    """Return the values that may be the cotangent, those nearest to the products first."""
    known: list[Value] = []
    todo = list(dict.fromkeys(starts))
    for _ in range(MOST_STEPS_TO_GRADIENT):
        if not todo:
            break
        known += [v for v in todo if v not in known]
        todo = [o for v in todo for o in v.operands if not v.is_static and o not in known and not o.is_static
                and v.op in ("transpose", "convert_element_type", "div", "mul", "reshape", "broadcast_in_dim", "neg",
                             "select_n", "squeeze", "expand_dims")]  # fmt: skip
    size = out.aval.size
    return [v for v in known if v.aval.size == size]
