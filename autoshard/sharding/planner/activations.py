"""The largest activations and gradients of a step, for reports: shapes, shardings, bytes at peak memory.

Each row is one equivalence class of values. A value that XLA fuses into the kernels that use it has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.sharding.plan.tensors import Activation
from autoshard.sharding.planner.constants import SHOWN_ACTIVATIONS
from autoshard.spmdrules.core.placement import to_partition_spec


@shown
@dataclass(eq=False)
class _ValueClass:
    """One equivalence class of values.

    Attributes:
        value: the first of its values.
        count: how many of its values a step computes.
        operator: the operator that computes the first value.
        line: the source line of that operator.
    """

    value: int
    count: float = 0.0
    operator: str = ""
    line: str = ""


def activations(
    memory: MemoryModel,
    layout: Layout,
    names: Callable[[int], tuple[str, ...]],
    live_buffers: Sequence[LiveBuffers] = (),
) -> tuple[Activation, ...]:
    """The largest activations and gradients of a step, those with the most bytes at peak memory first.

    Args:
        memory: the program's memory model.
        layout: the sharding of its values.
        names: returns the logical axes of a value's dimensions.
        live_buffers: the buffers of collectives: gathered operands, results that are not scattered yet.
    """
    numbering = memory.classes_of(layout)
    class_of = dict(zip(numbering.values.tolist(), numbering.numbers.tolist(), strict=True))
    classes = _value_classes(memory, class_of)
    held_bytes: dict[int, float] = dict.fromkeys(classes, 0.0)
    for value, size in memory.at_peak(layout, live_buffers):
        if class_of[value] in held_bytes:
            held_bytes[class_of[value]] += size
    found: dict[Any, Activation] = {}
    for number, value_class in classes.items():
        one = _activation(memory, layout, names, value_class, held_bytes[number])
        key = (one.role, one.shape, one.dtype, one.axes, tuple(one.spec))
        same = found.get(key)
        found[key] = one if same is None else same.with_more(one.count, one.held_bytes)
    sizes = {key: float(np.prod(one.shape)) for key, one in found.items()}
    ranked = sorted(found, key=lambda key: (-found[key].held_bytes, -sizes[key]))
    return tuple(found[key] for key in ranked[:SHOWN_ACTIVATIONS])


def _value_classes(memory: MemoryModel, class_of: Mapping[int, int]) -> dict[int, _ValueClass]:
    """The equivalence classes of activations and gradients, in the order in which the program computes them."""
    program, have_rows, gradients = memory.axes.program, memory.roles.have_rows, memory.roles.gradients
    kept = set(memory.keep.tolist())
    found: dict[int, _ValueClass] = {}
    for op in program.ops():
        for v in op.results:
            if v not in kept or not (v in gradients or have_rows(memory.axes.of_value[v])):
                continue
            value_class = found.setdefault(class_of[v], _ValueClass(v))
            value_class.count += op.trips
            if not value_class.operator:
                value_class.operator, value_class.line = op.name, _compat.source_line(op.eqn)
    return found


def _activation(
    memory: MemoryModel,
    layout: Layout,
    names: Callable[[int], tuple[str, ...]],
    value_class: _ValueClass,
    held_bytes: float,
) -> Activation:
    value = value_class.value
    aval = memory.axes.program.avals[value]
    role = "gradient" if value in memory.roles.gradients else "activation"
    return Activation(
        path=value_class.operator,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        spec=to_partition_spec(operand_spec(layout, value)),
        axes=names(value),
        role=role,
        line=value_class.line,
        count=value_class.count,
        held_bytes=held_bytes,
    )
