"""The traffic that each input of a plan causes."""

from __future__ import annotations

import itertools
from typing import Any

from autoshard import _compat
from autoshard._units import line_text
from autoshard.sharding.cost.collectives import collective
from autoshard.sharding.cost.equivalence_classes import ops_with_scopes
from autoshard.sharding.layout.operator_sharding import state_gathers, strategy_in_layout
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.sharding.report.constants import TRANSPOSED_DIMENSIONS
from autoshard.spmdrules.core.placement import bytes_sent_per_byte


def traffic_of(bound: BoundPlan, number: int) -> dict[tuple[str, str, str, str], float]:
    """The traffic of one input of a bound plan: (kind, mesh axes, what moves, source line) -> bytes per step.

    A gradient is recognised by its axes. Several parameters with the same axes get equal parts of their traffic.
    """
    layout, prices = bound.layout, bound.executable.link_prices
    axes, program = layout.axes, layout.axes.program
    source = program.inputs[number]
    leaves = axes.of_value[source]
    parameters = [v for v, role in layout.roles.inputs.items() if role == "parameter"]
    own_orders = {key for v in parameters for key in _slices(axes, v)}
    slices = _slices(axes, source)
    if len(leaves) <= TRANSPOSED_DIMENSIONS:  # a contraction may return a transposed gradient
        slices |= {t for key in slices for t in itertools.permutations(key)} - own_orders
    same_axes = max(sum(axes.of_value[v] == leaves for v in parameters), 1)
    is_parameter = source in parameters
    traffic: dict[tuple[str, str, str, str], float] = {}
    gathered: set[Any] = set()
    for op, block in ops_with_scopes(program.block):
        if not is_decision_point(op) or not _touches(op, source, slices, axes, is_parameter):
            continue
        for move in strategy_in_layout(layout, op, prices).moves:
            value = op.operands[move.array] if move.array >= 0 else op.results[-1 - move.array]
            share = 1.0
            if move.array >= 0 and (value == source or axes.parameter_aliases.get(value) == source):
                what = "the tensor"
                gather = (move.kind, move.axes, block)
                if gather in gathered:
                    continue  # as in `cost`: one gather serves all uses in a loop
                gathered.add(gather)
            elif move.array < 0 and is_parameter and axes.of_value[value] in slices and _is_gradient(op, layout):
                what, share = "its gradient", 1 / same_axes
            else:
                continue
            done = collective(bound.assignment, move.kind, move.axes, move.local_bytes, op.trips, "")
            key = (done.kind, " ".join(move.axes), what, line_text(_compat.source_line(op.eqn)))
            traffic[key] = traffic.get(key, 0.0) + done.wire_bytes * done.count * share
    for move in state_gathers(layout, [source]):
        if move.value == source:
            local = move.wire_bytes / bytes_sent_per_byte("all-gather", layout.shard_count(move.axes))
            done = collective(bound.assignment, "all-gather", move.axes, local, 1.0, "")
            traffic[done.kind, " ".join(move.axes), "the tensor", move.when] = done.wire_bytes
    return traffic


def _slices(axes: Any, value: int) -> set[Any]:
    """The axes of a tensor, and those of its slice in one loop iteration."""
    leaves = axes.of_value[value]
    return {leaves, leaves[1:]} if leaves and any(c in axes.stacked for c in leaves[0]) else {leaves}


def _touches(op: Any, source: int, slices: set[Any], axes: Any, is_parameter: bool) -> bool:
    if any(v == source or axes.parameter_aliases.get(v) == source for v in op.operands):
        return True
    return is_parameter and any(axes.of_value[v] in slices for v in op.results)


def _is_gradient(op: Any, layout: Any) -> bool:
    return any(v >= 0 and layout.roles.have_rows(layout.axes.of_value[v]) for v in op.operands)
