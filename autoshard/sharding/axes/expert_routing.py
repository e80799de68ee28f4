"""Splits the axis of experts in two: experts that a router chooses among, and experts that compute rows.

The rules unify the two, because they number the same experts. But values of tokens and experts (router logits, masks)
must stay with their tokens, while the rows of an expert move to the device that holds the expert, over the same mesh
axis. So only values that are connected to a product with expert weights keep the axis of experts. In all other values
it becomes a new axis. Contractions do not connect values. Other operators connect only values with the same axes of
dispatched tokens. So a mask is not connected to the gates of rows, which are sums of the mask and gates over tokens.

No plan shards the new axis, unless a product dispatches tokens of the whole batch (`dispatched_rows`), as in
`einsum("tec,td->ecd")`. Then `ep` shards it in the masks: each device gathers all tokens and computes the rows of its
own experts. If the masks stayed with their tokens, the rows of all experts would be summed over devices. Experts have
more rows in total than there are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

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

    tokens, products = _dispatched_tokens(axes, roles, parent.keys()), list[int]()
    for op in axes.program.ops():
        here = [v for v in (*op.operands, *op.results) if v in parent]
        for tie in op.edges:
            if tie.inner in parent and tie.outer in parent:
                join((tie.inner, tie.outer))
        if not here or op.rule is None:
            continue
        if op.name not in CONTRACTIONS:
            for some in _by_tokens(axes, here, tokens):
                join(some)
        elif _is_product(op, axes, roles, here):
            join(here)
            products.append(here[0])
    reached = {find(v) for v in products}
    return {v for v in parent if find(v) in reached}


def _dispatched_tokens(axes: LogicalAxes, roles: Roles, with_experts: Set[int]) -> set[int]:
    """Return the axes of tokens that masks dispatch to experts.

    A contraction dispatches tokens, or their gradients, if it sums over these axes, both operands have rows of the
    batch, and one operand and the result have experts. Axes of expert weights are left out: the width and hidden units.
    """
    weights = [v for v, role in roles.inputs.items() if role == "parameter" and v in with_experts]
    in_weights, found = {axis for v in weights for axis in _axes_of(axes, v)}, set[int]()
    for op in axes.program.ops():
        if op.name not in CONTRACTIONS or op.results[0] not in with_experts:
            continue
        pair = op.operands[:2]
        if sum(v in with_experts for v in pair) == 1 and all(v >= 0 and _have_rows(v, axes, roles) for v in pair):
            one, other, result = (_axes_of(axes, v) for v in (*pair, op.results[0]))
            found |= (one & other) - result - in_weights
    return found


def _by_tokens(axes: LogicalAxes, values: Iterable[int], tokens: set[int]) -> list[list[int]]:
    """Group values that have the same of these axes."""
    found: dict[frozenset[int], list[int]] = {}
    for v in values:
        found.setdefault(frozenset(tokens & _axes_of(axes, v)), []).append(v)
    return list(found.values())


def _axes_of(axes: LogicalAxes, value: int) -> set[int]:
    return {axis for dim in axes.of_value[value] for axis in dim}


def _have_rows(value: int, axes: LogicalAxes, roles: Roles) -> bool:
    return value in roles.dispatched or value in roles.row or roles.have_rows(axes.of_value[value])


def _is_product(op: Op, axes: LogicalAxes, roles: Roles, here: list[int]) -> bool:
    """Whether a contraction multiplies rows of experts by expert weights, or computes the gradient of such weights.

    Both operands and the result have experts then, and at least one of them, the weight, has no rows of the batch.
    """
    values = (*op.operands[:2], op.results[0])
    with_batch = [_have_rows(v, axes, roles) for v in values if v >= 0]
    return set(values) <= set(here) and any(with_batch) and not all(with_batch)
