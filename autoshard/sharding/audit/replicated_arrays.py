"""Arrays that the plan cuts and of which the compiled program keeps the whole on every device.

Inputs and results are compared one by one. Of temporaries, the large ones whose sizes are those of a value on the same
line that the plan cuts, as it does all values of these sizes, and not those of a piece of any: which value a temporary
is cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.audit.traffic_diff import place
from autoshard.sharding.hlo.parser import Computation, Instruction, Program
from autoshard.sharding.layout.operator_sharding import operand_spec, strategy
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.spmdrules.core.placement import Spec, axes_of, from_partition_spec

Shape = tuple[int, ...]

LARGE = 0.02  # of the peak: smaller temporaries are not looked at
NO_BUFFERS = ("bitcast", "conditional", "get-tuple-element", "parameter", "tuple", "while")


@shown
@dataclass(frozen=True)
class ReplicatedArray:
    """An array that is whole, or cut less than the plan says, on every device.

    Attributes:
        what: `input`, `result` or `temporary`.
        name: its path; of a temporary the operator that makes it.
        shape: as it is on a device.
        bytes: as it is on a device.
        planned_bytes: what the plan says.
        line: the user's, of a temporary.
    """

    what: Literal["input", "result", "temporary"]
    name: str
    shape: str
    bytes: float
    planned_bytes: float
    line: str = ""


def replicated(executable: Executable, program: Program, peak_bytes: float) -> tuple[ReplicatedArray, ...]:
    """What is whole although the plan cuts it, the largest first."""
    plan = executable.plan
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    entry = program.entry
    results = [a for i in ([entry.root] if entry.root.opcode != "tuple" else entry.takes(entry.root)) for a in i.arrays]
    taken = [entry.parameters[n].arrays[0] for n in sorted(entry.parameters) if entry.parameters[n].arrays]
    found = [*_leaves("input", plan.inputs, taken, sizes), *_leaves("result", plan.outputs, results, sizes)]
    found += _temporaries(executable, program, sizes, LARGE * peak_bytes)
    return tuple(sorted(found, key=lambda w: -w.bytes))


def _leaves(
    what: Literal["input", "result"], leaves: Sequence[Leaf], arrays: Sequence[Any], sizes: Mapping[str, int]
) -> Iterator[ReplicatedArray]:
    if len(leaves) != len(arrays):
        return
    for leaf, array in zip(leaves, arrays, strict=True):
        local = local_shape(leaf.shape, from_partition_spec(leaf.spec, len(leaf.shape)), sizes)
        if len(local) == len(array.dims) and math.prod(array.dims) > math.prod(local):
            item = array.nbytes / max(array.elements, 1)
            yield ReplicatedArray(what, leaf.path, str(array), array.nbytes, item * math.prod(local))


def _temporaries(
    executable: Executable, program: Program, sizes: Mapping[str, int], least: float
) -> list[ReplicatedArray]:
    cut = cut_shapes(executable, sizes)
    found: dict[Shape, ReplicatedArray] = {}
    for _, i in scheduled(program):
        for array in i.arrays if i.opcode not in NO_BUFFERS else ():
            shape = _squeezed(array.dims)
            if array.nbytes < max(least, 1) or shape not in cut or shape in found:
                continue
            line, name = program.line(i), i.op_name.rpartition("/")[2] or i.name
            if place(line) in cut[shape].places:
                planned = array.nbytes / cut[shape].ways
                found[shape] = ReplicatedArray("temporary", name, str(array), array.nbytes, planned, line)
    return list(found.values())


@dataclass
class Cut:
    """Into how many pieces a plan cuts the values of one shape at least, and on which lines they stand."""

    ways: int
    places: set[str] = field(default_factory=set)


def cut_shapes(executable: Executable, sizes: Mapping[str, int]) -> dict[Shape, Cut]:
    """Global shapes whose values a plan cuts, all of them and always.

    Dimensions of 1 are left out. An operand that the plan gathers for its operator is not always cut.
    """
    layout = executable.layout
    avals = layout.axes.program.avals
    cuts: dict[Shape, Cut] = {}
    pieces = set()

    def note(value: int, spec: Spec, line: str = "") -> None:
        shape = getattr(avals[value], "shape", ())
        if value >= 0 and len(spec) == len(shape):
            n = math.prod(sizes[a] for a in axes_of(spec))
            cut = cuts.setdefault(_squeezed(shape), Cut(n))
            cut.ways = min(cut.ways, n)
            cut.places.add(line)
            pieces.add(_squeezed(local_shape(shape, spec, sizes)))

    for value in range(len(avals)):
        for spec in (layout.spec(value), operand_spec(layout, value), layout.gradient_spec(value)):
            note(value, spec or layout.spec(value))
    for op in layout.axes.program.ops():
        line = place(_compat.source_line(op.eqn))
        for value in (*op.operands, *op.results):
            if value >= 0:
                note(value, layout.spec(value), line)
        if op.rule is not None and is_decision_point(op):
            plan = strategy(layout, op, executable.flops_per_byte)
            for value, dims in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True):
                note(value, plan.spec(dims), line)
    return {shape: cut for shape, cut in cuts.items() if cut.ways > 1 and shape and shape not in pieces}


def scheduled(program: Program) -> Iterator[tuple[Computation, Instruction]]:
    """The instructions that run by themselves, not those inside fusions."""
    reached, todo = {program.entry.name}, [program.entry]
    while todo:
        where = todo.pop()
        for i in where.instructions:
            yield where, i
            names = [i.attribute("body")] if i.opcode == "while" else []
            names += i.called if i.opcode in ("call", "conditional") else []
            for name in names:
                if name in program.computations and name not in reached:
                    reached.add(name)
                    todo.append(program.computations[name])


def local_shape(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one device's piece."""
    ways = [math.prod(sizes[a] for a in dim) for dim in spec]
    return tuple(-(-n // w) for n, w in zip(shape, ways, strict=True))


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)
