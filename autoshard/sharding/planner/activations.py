"""The largest activations and gradients of a step, for reports: shapes, shardings, bytes held.

Values of one equivalence class are one row. Values that XLA computes inside the kernels that use them have no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard import _compat
from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.sharding.plan.tensors import Activation
from autoshard.sharding.planner.constants import SHOWN_ACTIVATIONS
from autoshard.spmdrules.core.placement import to_partition_spec


@dataclass(eq=False)
class _Kind:
    """One equivalence class of values: a member, how many a step computes, and where the first is computed."""

    value: int
    count: float = 0.0
    operator: str = ""
    line: str = ""


def activations(
    memory: MemoryModel, layout: Layout, names: Callable[[int], tuple[str, ...]], waiting: Sequence[LiveBuffers] = ()
) -> tuple[Activation, ...]:
    """The largest activations and gradients of a step, those with the most bytes at peak memory first.

    Args:
        memory: the program's memory model.
        layout: the sharding of its values.
        names: the logical axes of a value's dimensions.
        waiting: live buffers of collectives: gathered operands, results that are still to be scattered.
    """
    alike = memory.kinds(layout)
    kind_of = dict(zip(alike.values.tolist(), alike.numbers.tolist(), strict=True))
    kinds = _kinds(memory, kind_of)
    held: dict[int, float] = dict.fromkeys(kinds, 0.0)
    for value, size in memory.at_peak(layout, waiting):
        if kind_of[value] in held:
            held[kind_of[value]] += size
    found: dict[Any, Activation] = {}
    for number, kind in kinds.items():
        one = _activation(memory, layout, names, kind, held[number])
        key = (one.role, one.shape, one.dtype, one.axes, tuple(one.spec))
        same = found.get(key)
        found[key] = one if same is None else same.with_more(one.count, one.held_bytes)
    sizes = {key: float(np.prod(one.shape)) for key, one in found.items()}
    ranked = sorted(found, key=lambda key: (-found[key].held_bytes, -sizes[key]))
    return tuple(found[key] for key in ranked[:SHOWN_ACTIVATIONS])


def _kinds(memory: MemoryModel, kind_of: Mapping[int, int]) -> dict[int, _Kind]:
    """The classes of values that are activations or gradients, in the order in which the program computes them."""
    program, batch, gradients = memory.axes.program, memory.roles.batch, memory.roles.gradients
    kept = set(memory.keep.tolist())
    found: dict[int, _Kind] = {}
    for op in program.ops():
        for v in op.results:
            if v not in kept or not (v in gradients or any(batch in dim for dim in memory.axes.of_value[v])):
                continue
            kind = found.setdefault(kind_of[v], _Kind(v))
            kind.count += op.trips
            if not kind.operator:
                kind.operator, kind.line = op.name, _compat.source_line(op.eqn)
    return found


def _activation(
    memory: MemoryModel, layout: Layout, names: Callable[[int], tuple[str, ...]], kind: _Kind, held_bytes: float
) -> Activation:
    aval = memory.axes.program.avals[kind.value]
    role = "gradient" if kind.value in memory.roles.gradients else "activation"
    return Activation(
        path=kind.operator,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        spec=to_partition_spec(operand_spec(layout, kind.value)),
        axes=names(kind.value),
        role=role,
        line=kind.line,
        count=kind.count,
        held_bytes=held_bytes,
    )
