"""The experts that a router chooses among and the experts whose rows are computed: two logical axes.

Every rule joins them, and rightly: they are the same numbers. But what is made of tokens and experts both (logits,
masks) stays with its tokens, while the rows of an expert go where the expert is, over the same mesh axis. So of an
axis of experts only what its products reach, without leaving it through another contraction, keeps its class; the rest
becomes an axis of its own, which no plan cuts.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op


def split_expert_axes(axes: LogicalAxes, roles: Roles) -> None:
    """Gives the router's experts a class of their own in `axes`, where there is a router."""
    for experts in roles.experts:
        having = [v for v, leaves in enumerate(axes.of_value) if any(experts in dim for dim in leaves)]
        inside = _inside(axes, roles, experts, having)
        outside = [v for v in having if v not in inside]
        if not inside or not outside:
            continue
        router = len(axes.sizes)
        axes.sizes.append(axes.sizes[experts])
        memo: dict[Leaves, Leaves] = {}
        for v in outside:
            leaves = axes.of_value[v]
            if leaves not in memo:
                memo[leaves] = tuple(tuple(router if c == experts else c for c in dim) for dim in leaves)
            axes.of_value[v] = memo[leaves]


def _inside(axes: LogicalAxes, roles: Roles, experts: int, having: Iterable[int]) -> set[int]:
    """The values that the products of experts reach."""
    parent = {v: v for v in having}

    def find(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    def join(values: Iterable[int]) -> None:
        first, *rest = (find(v) for v in values)
        for v in rest:
            parent[find(v)] = first

    products: list[int] = []
    for op in axes.program.ops():
        here = [v for v in (*op.operands, *op.results) if v in parent]
        for tie in op.ties:
            if tie.inner in parent and tie.outer in parent:
                join((tie.inner, tie.outer))
        if not here or op.rule is None:
            continue
        if op.name not in CONTRACTIONS:
            join(here)
        elif _is_product(op, axes, roles, here):
            join(here)
            products.append(here[0])
    reached = {find(v) for v in products}
    return {v for v in parent if find(v) in reached}


def _is_product(op: Op, axes: LogicalAxes, roles: Roles, here: list[int]) -> bool:
    """Whether rows of experts meet weights of experts, or make a gradient of those: all have experts, one no batch."""
    whole = (*op.operands[:2], op.results[0])
    with_batch = [any(roles.batch in dim for dim in axes.of_value[v]) for v in whole if v >= 0]
    return set(whole) <= set(here) and any(with_batch) and not all(with_batch)
