"""What no layout tells apart is asked about once: values of one kind, operators of one group.

So an unrolled model of a hundred layers is about as small a problem as one layer that is scanned over: what a layout
says of one layer's weight it says of every layer's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from autoshard import _compat
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.fusion import Fusion, Kernel
from autoshard.sharding.program.array_sizes import itemsize
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Block, Op


@dataclass(frozen=True)
class ValueClasses:
    """Values by kind: `decide.home` of one is that of all of its kind.

    Attributes:
        values: the values.
        numbers: the number of each one's kind.
        examples: the first value of each kind.
    """

    values: np.ndarray
    numbers: np.ndarray
    examples: list[int]


def value_classes(axes: LogicalAxes, roles: Roles, values: Iterable[int], apart: Collection[int]) -> ValueClasses:
    """The kinds of values.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        values: the values.
        apart: inputs that a layout may tell from all others (`pinned_apart`).
    """
    stored: dict[int | None, Any] = {None: None}
    for v in roles.inputs:
        stored[v] = _stored_by(axes, roles, v), v if v in apart else None
    numbers: dict[Any, int] = {}
    found: list[int] = []
    examples: list[int] = []
    for v in (values := list(values)):
        given = v in roles.inputs
        becomes, permutation = roles.turned.get(v, (v, ()))
        source = stored[v if given else axes.parameter_aliases.get(v)]
        kind = axes.of_value[v], given, source, v in roles.gradients, axes.of_value[becomes], permutation
        found.append(numbers.setdefault(kind, len(numbers)))
        if len(numbers) > len(examples):
            examples.append(v)
    return ValueClasses(np.array(values, int), np.array(found, int), examples)


@dataclass(eq=False)
class SharedOperands:
    """Values that stand at the same operands of the same groups: what moves one of them moves all.

    Attributes:
        number: tells them from others.
        first: of each the first operator of a group that takes it, counted as in `Program.ops`.
        last: of each the last one.
    """

    number: int
    first: np.ndarray
    last: np.ndarray


@dataclass(eq=False)
class OperatorClass:
    """Operators with the same rule, shapes and classes: one of them stands for all.

    Attributes:
        op: the first of them.
        kernel: its kernel, if it is one.
        runs: how often they run, all together.
        numbers: all of them, counted as in `Program.ops`.
        taken: what they take at each operand.
    """

    op: Op
    kernel: Kernel | None
    runs: float = 0.0
    numbers: list[int] = field(default_factory=list)
    taken: list[list[SharedOperands]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many operators it stands for."""
        return len(self.numbers)

    @cached_property
    def members(self) -> np.ndarray:
        """All of them, as an array."""
        return np.array(self.numbers)

    @cached_property
    def line(self) -> str:
        """The user's line that the first came from."""
        return _compat.source_line(self.op.eqn)


def pinned_apart(axes: LogicalAxes, roles: Roles, pins: Mapping[int, Spec]) -> frozenset[int]:
    """The pinned inputs that others which are like them are not pinned like: of ten equal layers one."""
    if not pins:
        return frozenset()
    like = {v: _stored_by(axes, roles, v) for v in roles.inputs}
    specs: defaultdict[Any, set[Spec | None]] = defaultdict(set)
    for v, kind in like.items():
        specs[kind].add(pins.get(v))
    return frozenset(v for v in pins if len(specs[like[v]]) > 1)


def _stored_by(axes: LogicalAxes, roles: Roles, value: int) -> Any:
    """By what a layout decides where it stores an input that is not pinned."""
    aval = axes.program.avals[value]
    return axes.of_value[value], aval.shape, aval.dtype, roles.inputs[value]


def operator_classes(
    axes: LogicalAxes, roles: Roles, fusion: Fusion, apart: frozenset[int] = frozenset()
) -> list[OperatorClass]:
    """The groups of a program's operators, without those for which no layout has to pay.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        fusion: its kernels.
        apart: inputs that are like no other (`pinned_apart`).
    """
    groups: dict[Any, OperatorClass] = {}
    listed = list(in_loops(axes.program.block))
    inputs, avals, of_value, held = set(axes.program.inputs), axes.program.avals, axes.of_value, axes.parameter_aliases
    numbers: dict[Any, int] = {}
    told = [  # what a layout tells values apart by
        numbers.setdefault(
            (of_value[v], v in roles.gradients, of_value[held[v]] if v in held else None,
             source if (source := held.get(v, v)) in apart else None, axes.transfer_dtype.get(v)),
            len(numbers),
        )
        for v in range(len(avals))
    ]  # fmt: skip
    told.append(-1)  # of literals
    for number, (op, _) in enumerate(listed):
        if op.rule is None:
            continue
        kernel, memory = fusion.kernels.get(id(op)), None
        if kernel is not None:
            there = (*kernel.reads, *kernel.writes)
            memory = Counter((told[v], itemsize(avals[v]), v in inputs, fusion.near.get(v)) for v in there)
            memory = frozenset(memory.items())
        values = tuple([told[v] for v in (*op.operands, *op.results)])
        key = (op.name, id(op.rule), values, memory, tuple([v in inputs for v in op.operands[:3]]))
        found = groups.get(key)
        if found is None:
            found = groups[key] = OperatorClass(op, kernel)
        found.runs += op.trips
        found.numbers.append(number)
    paid = [g for g in groups.values() if _costs(g, axes, roles)]
    _note_taken(paid, listed, axes)
    return paid


def _note_taken(groups: Sequence[OperatorClass], listed: Sequence[tuple[Op, int]], axes: LogicalAxes) -> None:
    """Finds what each group takes. A value is that of one loop: what is moved for it is moved in each loop anew."""
    held, layers = axes.parameter_aliases, axes.layers
    takers: defaultdict[Any, dict[tuple[int, int], list[int]]] = defaultdict(dict)
    for n, g in enumerate(groups):
        for number in g.numbers:
            op, block = listed[number]
            for i, v in enumerate(op.operands):
                if v >= 0:
                    takers[held.get(v, v), layers.get(v), block].setdefault((n, i), []).append(number)
    alike: defaultdict[Any, list[dict[tuple[int, int], list[int]]]] = defaultdict(list)
    for places in takers.values():
        alike[tuple(places)].append(places)
    for g in groups:
        g.taken = [[] for _ in g.op.operands]
    for number, (places, some) in enumerate(alike.items()):
        for n, i in places:
            first, last = (np.array([each[n, i][end] for each in some]) for end in (0, -1))
            groups[n].taken[i].append(SharedOperands(number, first, last))


def _costs(g: OperatorClass, axes: LogicalAxes, roles: Roles) -> bool:
    """Whether any layout has to pay for an operator: it is a kernel, decides, or takes activations elsewhere."""
    if g.kernel is not None or is_decision_point(g.op):
        return True
    if not any(roles.batch in dim for v in g.op.results for dim in axes.of_value[v]):
        return False
    return not all(_stays(v, g.op, axes, roles) for v in g.op.operands)


def _stays(value: int, op: Op, axes: LogicalAxes, roles: Roles) -> bool:
    """Whether every layout has an operand where it has the result: their dimensions are the same, in any order."""
    if value < 0 or not any(axes.of_value[value]):
        return True
    if value in roles.inputs or value in axes.parameter_aliases or value in roles.gradients:
        return False  # may be stored elsewhere
    after = axes.of_value[op.results[0]]
    classes = [c for dim in after for c in dim]
    return sorted(axes.of_value[value]) == sorted(after) and roles.batch in classes and len({*classes}) == len(classes)


def in_loops(block: Block, number: int = 0, counter: Iterator[int] | None = None) -> Iterator[tuple[Op, int]]:
    """Every operator, in the order of `Program.ops`, with the number of the loop, branch or remat that it stands in."""
    counter = count(1) if counter is None else counter
    for op in block.ops:
        yield op, number
        for inner in op.blocks:
            own = op.name.startswith("remat") or op.results != inner.outputs
            yield from in_loops(inner, next(counter) if own else number, counter)
