"""Finds arrays that the plan shards and the compiled program replicates on every device.

Inputs and results are compared one by one. It is not known which value a temporary of the compiled program holds. A
large temporary is reported if it has the unsharded shape of a value on the same line, the plan shards every value of
this shape, and no shard has this shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.audit.constants import LARGE_TEMPORARY_SHARE
from autoshard.sharding.audit.traffic_diff import file_and_line
from autoshard.sharding.hlo.parser import Computation, Instruction, Program
from autoshard.sharding.layout.operator_sharding import operand_spec, strategy_in_layout
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.spmdrules.core.placement import Spec, axes_of, from_partition_spec

Shape = tuple[int, ...]

# Opcodes of instructions that allocate no buffer of their own.
NO_BUFFERS = ("bitcast", "conditional", "get-tuple-element", "parameter", "tuple", "while")


@shown
@dataclass(frozen=True)
class ReplicatedArray:
    """An array that is replicated, or sharded over fewer devices than the plan says.

    Attributes:
        what: `input`, `result` or `temporary`.
        name: its path; for a temporary, the operator that computes it.
        shape: its shape on one device.
        bytes: its bytes on one device.
        planned_bytes: its bytes on one device by the plan.
        line: the user's source line, for a temporary.
    """

    what: Literal["input", "result", "temporary"]
    name: str
    shape: str
    bytes: float
    planned_bytes: float
    line: str = ""


def replicated(executable: Executable, program: Program, peak_bytes: float) -> tuple[ReplicatedArray, ...]:
    """Return the arrays that the plan shards and the program replicates, in descending order of bytes."""
    plan = executable.plan
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    entry = program.entry
    results = [
        a for i in ([entry.root] if entry.root.opcode != "tuple" else entry.operands_of(entry.root)) for a in i.arrays
    ]
    inputs = [entry.parameters[n].arrays[0] for n in sorted(entry.parameters) if entry.parameters[n].arrays]
    named = [replace(leaf, path=named_path(leaf.path, plan.arguments)) for leaf in plan.inputs]
    found = [*_leaves("input", named, inputs, sizes), *_leaves("result", plan.outputs, results, sizes)]
    found += _temporaries(executable, program, sizes, LARGE_TEMPORARY_SHARE * peak_bytes)
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
    executable: Executable, program: Program, sizes: Mapping[str, int], min_bytes: float
) -> list[ReplicatedArray]:
    sharded = sharded_shapes(executable, sizes)
    found: dict[Shape, ReplicatedArray] = {}
    for _, i in scheduled(program):
        for array in i.arrays if i.opcode not in NO_BUFFERS else ():
            shape = _squeezed(array.dims)
            if array.nbytes < max(min_bytes, 1) or shape not in sharded or shape in found:
                continue
            line, name = program.line(i), i.op_name.rpartition("/")[2] or i.name
            if file_and_line(line) in sharded[shape].places:
                planned = array.nbytes / sharded[shape].shard_count
                found[shape] = ReplicatedArray("temporary", name, str(array), array.nbytes, planned, line)
    return list(found.values())


@shown
@dataclass
class ShardedShape:
    """The sharding of all values of one shape.

    Attributes:
        shard_count: the smallest number of shards of such a value.
        places: the places of the operators that use these values.
    """

    shard_count: int
    places: set[str] = field(default_factory=set)


def sharded_shapes(executable: Executable, sizes: Mapping[str, int]) -> dict[Shape, ShardedShape]:
    """Return the unsharded shapes, without dimensions of size 1, of which the plan always shards every value.

    A value that the plan gathers for an operator is not always sharded.
    """
    layout = executable.layout
    avals = layout.axes.program.avals
    found: dict[Shape, ShardedShape] = {}
    shard_shapes = set()

    def record(value: int, spec: Spec, line: str = "") -> None:
        shape = getattr(avals[value], "shape", ())
        if value >= 0 and len(spec) == len(shape):
            n = math.prod(sizes[a] for a in axes_of(spec))
            entry = found.setdefault(_squeezed(shape), ShardedShape(n))
            entry.shard_count = min(entry.shard_count, n)
            entry.places.add(line)
            shard_shapes.add(_squeezed(local_shape(shape, spec, sizes)))

    for value in range(len(avals)):
        for spec in (layout.spec(value), operand_spec(layout, value), layout.gradient_spec(value)):
            record(value, spec or layout.spec(value))
    for op in layout.axes.program.ops():
        line = file_and_line(_compat.source_line(op.eqn))
        for value in (*op.operands, *op.results):
            if value >= 0:
                record(value, layout.spec(value), line)
        if op.rule is not None and is_decision_point(op):
            plan = strategy_in_layout(layout, op, executable.link_prices)
            rule = plan.rule(op)
            for value, dims in zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True):
                record(value, plan.spec(dims), line)
    return {shape: s for shape, s in found.items() if s.shard_count > 1 and shape and shape not in shard_shapes}


def scheduled(program: Program) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the instructions that are scheduled, which excludes those inside fusions."""
    seen, pending = {program.entry.name}, [program.entry]
    while pending:
        where = pending.pop()
        for i in where.instructions:
            yield where, i
            names = [i.attribute("body")] if i.opcode == "while" else []
            names += i.called if i.opcode in ("call", "conditional") else []
            for name in names:
                if name in program.computations and name not in seen:
                    seen.add(name)
                    pending.append(program.computations[name])


def local_shape(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one device's shard."""
    counts = [math.prod(sizes[a] for a in dim) for dim in spec]
    return tuple(-(-n // count) for n, count in zip(shape, counts, strict=True))


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)
