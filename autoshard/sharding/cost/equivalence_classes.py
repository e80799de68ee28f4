"""Equivalence classes of values and operators that no layout distinguishes. Each class is priced once.

An unrolled model of a hundred layers is then about as small a problem as a scan over one layer, because a layout shards
the weights of all layers alike.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.axes.stored_values import may_be_stored, sources_of
from autoshard.sharding.axes.weights.joined_gradients import joined_gradients
from autoshard.sharding.axes.weights.joined_sums import joined_sums
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.cost.kernels.kernel import Kernel
from autoshard.sharding.layout.operator_sharding import transfer_bytes
from autoshard.sharding.program.array_sizes import itemsize, nbytes
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.families.weight_gathers import after_loop_p
from autoshard.spmdrules.ir.merged_recomputation import is_merged_checkpoint, merged_values
from autoshard.spmdrules.ir.program import Block, Op


@shown
@dataclass(frozen=True)
class ValueClasses:
    """Classes of values for which every layout gives the same `operand_spec`.

    Attributes:
        values: the values.
        numbers: for each value, the number of its class.
        examples: the first value of each class.
    """

    values: np.ndarray
    numbers: np.ndarray
    examples: list[int]


def value_classes(axes: LogicalAxes, roles: Roles, values: Iterable[int], distinct: Collection[int]) -> ValueClasses:
    """Return the classes of values.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        values: the values.
        distinct: inputs that a layout may distinguish from all others (`distinctly_fixed`).
    """
    stored: dict[int | None, Any] = {None: None}
    for v in roles.inputs:
        stored[v] = _storage_class(axes, roles, v), v if v in distinct else None
    numbers: dict[Any, int] = {}
    found: list[int] = []
    examples: list[int] = []
    aliases = sources_of(axes, roles)
    joins = _classes_of_joins(axes, roles, aliases, stored)
    for v in (values := list(values)):
        is_input = v in roles.inputs
        transposed, permutation = roles.transposed_gradients.get(v, (v, ()))
        source = stored[v if is_input else aliases.get(v)]
        joined = joins.get(roles.joined.origin.get(v))
        kinds = is_input, v in roles.gradients, v in roles.loop_sums
        key = axes.of_value[v], kinds, source, axes.of_value[transposed], permutation, joined
        found.append(numbers.setdefault(key, len(numbers)))
        if len(numbers) > len(examples):
            examples.append(v)
    return ValueClasses(np.array(values, int), np.array(found, int), examples)


def _classes_of_joins(
    axes: LogicalAxes, roles: Roles, aliases: Mapping[int, int], of_source: Mapping[Any, Any]
) -> dict[int | None, int]:
    """Return a number for each joined weight. Weights that every layout shards alike have the same number.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        aliases: see `sources_of`.
        of_source: for each input, what a layout can distinguish.
    """
    found: dict[int | None, int] = {}
    numbers: dict[Any, int] = {}
    for v, join in roles.joined.joins.items():  # in the order of the program, so operands come first
        operands = [
            (passing, axes.of_value[o], of_source[aliases.get(o, o)], found.get(roles.joined.origin.get(o, -1)))
            for o, passing in join.operands
        ]
        found[v] = numbers.setdefault((axes.of_value[v], *operands), len(numbers))
    return found


@shown
@dataclass(eq=False)
class SharedOperands:
    """Values that are the same operands of the same operator classes. If a layout moves one of them, it moves all.

    Attributes:
        number: identifies them.
        first: for each value, the number of the first operator that takes it, counted as in `Program.ops`.
        last: for each value, the number of the last one.
        is_moved_for_one: whether a layout can move each of them for one operand of one operator only.
    """

    number: int
    first: np.ndarray
    last: np.ndarray
    is_moved_for_one: bool


@shown
@dataclass(frozen=True)
class Facts:
    """What is known of an operator class without a layout.

    Attributes:
        transfer_bytes: see `operator_sharding.transfer_bytes`.
        memory: what its kernel reads and writes: the value, its bytes before sharding, and its shares in
            `Fusion.narrow` and `Fusion.on_chip`. Values in host memory count as 0 bytes.
        rounded: the positions of its operands that are in `Fusion.rounded`.
        absorbed: None, unless its kernel computes reductions of its result (`Kernel.absorbed`). Then the bytes of the
            result, how often these would move if the reductions were kernels of their own, and the result's share in
            `Fusion.on_chip`.
    """

    transfer_bytes: list[float]
    memory: list[tuple[int, float, float, float]]
    rounded: tuple[int, ...]
    absorbed: tuple[float, int, float] | None


@shown
@dataclass(eq=False)
class OperatorClass:
    """Operators with the same rule, shapes and logical axes.

    Attributes:
        op: the first of them.
        kernel: its kernel, if it is one.
        runs: number of runs of all of them in a step.
        numbers: their numbers, counted as in `Program.ops`.
        shared: for each operand, the values that the operators take there.
        reducing: the numbers of the operators at which the results are reduced: their own, or those after a loop
            that sums the results (`Roles.loop_sums`). Some partial results are added before they are reduced
            (`axes.weights.joined_sums`, `axes.weights.joined_gradients`): there, only the last operator counts.
        waiting: pairs of operator numbers. The partial result of the first operator is held until that of the second
            one is added to it.
    """

    op: Op
    kernel: Kernel | None
    runs: float = 0.0
    numbers: list[int] = field(default_factory=list)
    shared: list[list[SharedOperands]] = field(default_factory=list)
    reducing: list[int] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    _facts: Facts | None = field(default=None, init=False, repr=False)

    def facts(self, axes: LogicalAxes, roles: Roles, fusion: Fusion) -> Facts:
        """What all layouts have in common; `axes`, `roles` and `fusion` are those of the program."""
        if self._facts is None:
            kernel, avals = self.kernel, axes.program.avals
            memory = [
                (v, 0.0 if _compat.is_on_host(avals[v]) else float(nbytes(avals[v])),
                 fusion.narrow.get(v, 1.0), fusion.on_chip.get(v, 0.0))
                for v in ((*kernel.reads, *kernel.writes) if kernel else ())
            ]  # fmt: skip
            rounded = tuple([i for i, v in enumerate(self.op.operands) if v in fusion.rounded])
            absorbed = None
            if kernel is not None and (v := kernel.absorbed) >= 0:
                times = 1 if v in fusion.written else 2
                absorbed = nbytes(avals[v]) * fusion.narrow.get(v, 1.0), times, fusion.on_chip.get(v, 0.0)
            self._facts = Facts(transfer_bytes(axes, roles, self.op), memory, rounded, absorbed)
        return self._facts

    @property
    def count(self) -> int:
        """The number of operators."""
        return len(self.numbers)

    @cached_property
    def members(self) -> np.ndarray:
        """Their numbers as an array."""
        return np.array(self.numbers)

    @cached_property
    def reduced_at(self) -> np.ndarray:
        """`reducing` as an array; `members` itself if the operators reduce their results themselves."""
        return self.members if self.reducing == self.numbers else np.array(self.reducing, int)

    @cached_property
    def line(self) -> str:
        """The user's source line of the first operator."""
        return self.op.line


def distinctly_fixed(axes: LogicalAxes, roles: Roles, fixed: Mapping[int, Spec]) -> frozenset[int]:
    """Return the fixed inputs whose spec differs from that of otherwise equal inputs, such as one of ten layers."""
    if not fixed:
        return frozenset()
    classes = {v: _storage_class(axes, roles, v) for v in roles.inputs}
    specs: defaultdict[Any, set[Spec | None]] = defaultdict(set)
    for v, key in classes.items():
        specs[key].add(fixed.get(v))
    return frozenset(v for v in fixed if len(specs[classes[v]]) > 1)


def _storage_class(axes: LogicalAxes, roles: Roles, value: int) -> Any:
    """Return what decides how a layout stores an input that is not fixed."""
    aval = axes.program.avals[value]
    return axes.of_value[value], aval.shape, aval.dtype, roles.inputs[value]


def operator_classes(
    axes: LogicalAxes, roles: Roles, fusion: Fusion, distinct: frozenset[int] = frozenset()
) -> list[OperatorClass]:
    """Return the classes of a program's operators, without those that cost nothing under any layout.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        fusion: its kernels.
        distinct: inputs that share no class with other values (`distinctly_fixed`).
    """
    classes: dict[Any, OperatorClass] = {}
    ops = list(ops_with_scopes(axes.program.block))
    inputs, avals, of_value, aliases = (
        set(axes.program.inputs),
        axes.program.avals,
        axes.of_value,
        sources_of(axes, roles),
    )
    of_source = {v: (_storage_class(axes, roles, v), v if v in distinct else None) for v in roles.inputs}
    joins = _classes_of_joins(axes, roles, aliases, of_source)
    of_memory: dict[Any, int] = {}  # what is known of a value that a kernel reads or writes -> its number
    numbers: dict[Any, int] = {}
    class_of = [  # the class of each value, by everything that a layout can distinguish
        numbers.setdefault(
            (of_value[v], v in roles.gradients, v in roles.loop_sums, v in roles.decoded_weights,
             of_value[aliases[v]] if v in aliases else None,
             source if (source := aliases.get(v, v)) in distinct else None, axes.transfer_dtype.get(v),
             joins.get(roles.joined.origin.get(v)), v in fusion.rounded),
            len(numbers),
        )
        for v in range(len(avals))
    ]  # fmt: skip
    class_of.append(-1)  # of literals, which have the number -1
    merged = merged_values(axes.program)
    after_loop = {op.results[0]: number for number, (op, _) in enumerate(ops) if op.name == after_loop_p.name}
    added = {id(op) for found in joined_sums(axes, roles.rows) for op in found.scatters[:-1]}
    adding = {
        id(op): id(after) for group in joined_gradients(axes, roles.rows) for op, after in itertools.pairwise(group)
    }
    number_of = {id(op): number for number, (op, _) in enumerate(ops)} if adding else {}
    for number, (op, _) in enumerate(ops):
        if op.rule is None or (merged and op.results and merged.keys() >= {*op.results}):
            continue
        kernel, memory = fusion.kernels.get(id(op)), None
        if kernel is not None:
            moved = (*kernel.reads, *kernel.writes)
            facts = [(class_of[v], itemsize(avals[v]), v in inputs, fusion.on_chip.get(v)) for v in moved]
            memory = tuple(sorted([of_memory.setdefault(each, len(of_memory)) for each in facts]))
        values = tuple([class_of[v] for v in (*op.operands, *op.results)])
        key = (op.name, id(op.rule), values, memory, tuple([v in inputs for v in op.operands[:3]]))
        found = classes.get(key)
        if found is None:
            found = classes[key] = OperatorClass(op, kernel)
        found.runs += op.trips
        found.numbers.append(number)
        if id(op) in adding:
            found.waiting.append((number, number_of[adding[id(op)]]))
        elif id(op) not in added:
            of_loop = roles.loop_sums.get(op.results[0], -1) if op.results else -1
            found.reducing.append(after_loop.get(of_loop, number))
    priced = [each for each in classes.values() if _may_cost(each, axes, roles)]
    _note_shared(priced, ops, axes, roles, merged)
    return priced


def _note_shared(
    classes: Sequence[OperatorClass],
    ops: Sequence[tuple[Op, int]],
    axes: LogicalAxes,
    roles: Roles,
    merged: Mapping[int, int],
) -> None:
    """Set `shared` of each class. One value in two loops counts as two, because each loop moves it again."""
    aliases, layers = axes.parameter_aliases, axes.stack_positions
    users: defaultdict[Any, dict[tuple[int, int], list[int]]] = defaultdict(dict)
    for n, each in enumerate(classes):
        for number in each.numbers:
            op, scope = ops[number]
            for i, v in enumerate(op.operands):
                v = merged.get(v, v)
                v = roles.rearranged_weights.get(v, v)
                if v >= 0:
                    users[aliases.get(v, v), layers.get(v), scope].setdefault((n, i), []).append(number)
    same_users: defaultdict[Any, list[dict[tuple[int, int], list[int]]]] = defaultdict(list)
    for places in users.values():
        same_users[tuple(places)].append(places)
    for each in classes:
        each.shared = [[] for _ in each.op.operands]
    moves = [is_decision_point(each.op) or moves_operands(each.op, axes, roles) for each in classes]
    for number, (places, values) in enumerate(same_users.items()):
        is_single = sum(moves[n] for n, _ in places) == 1
        for n, i in places:
            first, last = (np.array([value[n, i][end] for value in values]) for end in (0, -1))
            for_one = is_single and moves[n] and bool((first == last).all())
            classes[n].shared[i].append(SharedOperands(number, first, last, for_one))


def _may_cost(op_class: OperatorClass, axes: LogicalAxes, roles: Roles) -> bool:
    """Whether an operator costs anything under some layout: it is a kernel, a decision point, or moves activations."""
    op = op_class.op
    if op_class.kernel is not None or is_decision_point(op):
        return True
    if not moves_operands(op, axes, roles):
        return False
    return not all(_stays(v, op, axes, roles) for v in op.operands)


def moves_operands(op: Op, axes: LogicalAxes, roles: Roles) -> bool:
    """Whether an operator that is not a decision point moves operands under some layout.

    It returns rows of the batch, a decoded weight, or a stored weight that is transposed, reshaped or joined.
    """
    moving = roles.decoded_weights, roles.rearranged_weights, roles.joined.joins
    if any(v in weights for v in op.results for weights in moving):
        return True
    return any([roles.have_rows(axes.of_value[v]) for v in op.results])


def _stays(value: int, op: Op, axes: LogicalAxes, roles: Roles) -> bool:
    """Whether every layout shards an operand like the result: they have the same logical axes, in any order."""
    if value < 0 or not any(axes.of_value[value]):
        return True
    if may_be_stored(axes, roles, value):
        return False
    after = axes.of_value[op.results[0]]
    classes = [c for dim in after for c in dim]
    return sorted(axes.of_value[value]) == sorted(after) and roles.have_rows(after) and len({*classes}) == len(classes)


def ops_with_scopes(block: Block, number: int = 0, counter: Iterator[int] | None = None) -> Iterator[tuple[Op, int]]:
    """Yield every operator, in the order of `Program.ops`, with the number of its innermost loop, branch or remat."""
    counter = count(1) if counter is None else counter
    for op in block.ops:
        yield op, number
        for inner in op.blocks:
            own = op.results != inner.outputs or (op.name.startswith("remat") and not is_merged_checkpoint(op))
            yield from ops_with_scopes(inner, next(counter) if own else number, counter)
