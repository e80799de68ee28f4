"""Splits the axis of experts in two: experts that a router chooses among, and experts that compute rows.

The rules unify the two, because they number the same experts. But values of tokens and experts (router logits, masks)
must stay with their tokens, while the rows of an expert move to the device that holds the expert, over the same mesh
axis. So only the values that a product with expert weights reaches, without passing through another contraction, keep
the axis of experts. In all other values it becomes a new axis.

No plan shards the new axis, unless a product dispatches tokens of the whole batch (`dispatched_rows`), as in
`einsum("tec,td->ecd")`. Then `ep` shards it in the masks: each device gathers all tokens and computes the rows of its
own experts. If the masks stayed with their tokens, the rows of all experts would be summed over devices. Experts have
more rows in total than there are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op


def split_expert_axes(axes: LogicalAxes, roles: Roles) -> tuple[int, ...]:
    """Give the experts of each router a logical axis of their own, in place, and return these axes.

    Args:
        axes: the logical axes. `sizes` and `of_value` are changed.
        roles: the roles of the axes.
    """
    routers = []
    for experts in roles.experts:
        with_experts = [v for v, leaves in enumerate(axes.of_value) if any(experts in dim for dim in leaves)]
        computed = _computed_by_experts(axes, roles, with_experts)
        outside = [v for v in with_experts if v not in computed]
        if not computed or not outside:
            continue
        routers.append(router := len(axes.sizes))
        axes.sizes.append(axes.sizes[experts])
        memo: dict[Leaves, Leaves] = {}
        for v in outside:
            leaves = axes.of_value[v]
            if leaves not in memo:
                memo[leaves] = tuple(tuple(router if c == experts else c for c in dim) for dim in leaves)
            axes.of_value[v] = memo[leaves]
    return tuple(routers)


def _computed_by_experts(axes: LogicalAxes, roles: Roles, with_experts: Iterable[int]) -> set[int]:
    """The values with experts that are connected to a product with expert weights."""
    parent = {v: v for v in with_experts}

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
        for tie in op.edges:
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
    """Whether a contraction multiplies rows of experts by expert weights, or computes the gradient of such weights.

    Both operands and the result have experts then, and at least one of them, the weight, has no rows of the batch.
    """
    values = (*op.operands[:2], op.results[0])
    of_rows = roles.dispatched | roles.row
    with_batch = [v in of_rows or roles.have_rows(axes.of_value[v]) for v in values if v >= 0]
    return set(values) <= set(here) and any(with_batch) and not all(with_batch)
