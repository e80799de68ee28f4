"""What part each input and each logical axis plays in a program, read off its structure and never off names.

batch       the axis that most activations carry and that stands foremost in an input; no parameter has it
parameter   an input without the batch axis that meets a value with it (in a contraction, a gather, a broadcast)
optimizer   any other array of the state: it only meets values of its own shape
parallel    axes that a weight produces and another weight contracts again (heads, ffn, experts, vocabulary): what
            tensor parallelism shards; `residual` is the one that all of them start from and return to
sequence    axes of the data other than batch; of one that a loop runs over in blocks (keys of attention) their number
context     those of them that no loop runs over
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.axis_uses import AxisUses, find_uses
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.program.array_sizes import axis_weight, is_float
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Program

Role = Literal["data", "parameter", "optimizer", "other"]
STATE: tuple[Role, ...] = ("parameter", "optimizer")
FUSED_WEIGHTS = 16  # at most so many weights are joined into one before they are used (the gates of a cell)


@shown
@dataclass(eq=False)
class Roles:
    """The parts that inputs and axes play; every axis list is ordered by how much it would save."""

    inputs: dict[int, Role]  # program input -> its role
    batch: int | None
    sequence: tuple[int, ...]
    context: tuple[int, ...]
    residual: int | None
    parallel: tuple[int, ...]
    experts: tuple[int, ...]
    vocabulary: tuple[int, ...]
    classes: tuple[int, ...]  # what a loss sums over
    heads: tuple[int, ...]  # with the query groups of each key-value head behind them
    gradients: frozenset[int] = frozenset()  # values made by summing over the batch, and what is made of those
    # gradients that are only there to be transposed -> what they become, and how (JAX computes them so)
    turned: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)


def find_roles(program: Program, axes: LogicalAxes, state: Sequence[int] = (), *, batch: int | None = None) -> Roles:
    """Finds the roles.

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that come back as outputs (known from the pytree structure), which are never data.
        batch: its batch (`batch_axis`), where that was asked for already.
    """
    batch = batch_axis(program, axes, frozenset(state)) if batch is None else batch
    inputs, owner = _input_roles(program, axes, batch, frozenset(state))
    parameters = [v for v, role in inputs.items() if role == "parameter"]
    in_parameters = {c for v in parameters for dim in axes.of_value[v] for c in dim}
    weight = Counter()
    for v in parameters:
        for c in {c for dim in axes.of_value[v] for c in dim} - axes.stacked:
            weight[c] += axis_weight(program.avals[v])
    use = find_uses(program, axes, batch, in_parameters, owner)
    shared = {c for c, weights in use.weights.items() if len(weights) > 1}
    data = [v for v, role in inputs.items() if role == "data"]
    in_data = {c for v in data for dim in axes.of_value[v] for c in dim}
    residual = _residual(use, shared - use.heads, weight, in_data)
    ordered = [c for c, _ in sorted(weight.items(), key=lambda item: (-item[1], item[0]))]
    # parts of one dimension (key-value heads, query groups) must stand major first, or none can be sharded
    ordered = _major_first(ordered, axes, parameters)
    passed_on = {c for c in use.made if any(a != b for a in use.made[c] for b in use.contracted[c])}
    able = (passed_on | _summed_up(use) | use.indexed | use.experts) - {residual} - use.inner
    able = able or shared - {residual} - use.inner
    parallel = tuple(c for c in ordered if c in able)
    groups = {
        c for v in parameters for dim in axes.of_value[v] for major, c in itertools.pairwise(dim) if major in use.heads
    }  # fmt: skip
    with_batch = {c for dims in set(axes.of_value) for dim in dims for c in dim if any(batch in d for d in dims)}
    sequence = dict.fromkeys(
        c for v in data for dim in axes.of_value[v] for c in _sequence(dim, axes.stacked)
        if c != batch and c in with_batch and not use.weights[c]
    )  # fmt: skip
    return Roles(
        inputs=inputs,
        batch=batch,
        sequence=tuple(sequence),
        context=tuple(c for c in sequence if c not in axes.stacked),
        residual=residual,
        parallel=parallel,
        experts=tuple(c for c in ordered if c in use.experts),
        vocabulary=tuple(c for c in ordered if c in use.indexed),
        classes=tuple(c for c in parallel if c in _summed_up(use)),
        heads=tuple(c for c in parallel if c in use.heads or c in groups),
        gradients=(gradients := _gradients(program, axes, batch)),
        turned=_turned(program, gradients),
    )


def _sequence(dim: Sequence[int], stacked: frozenset[int]) -> Sequence[int]:
    """The axes of a dimension of the data that a sequence can be cut along.

    Of blocks that a loop runs over it is their number, and only where that stands with the block in one dimension.
    """
    if len(dim) > 1 and dim[0] in stacked:
        return dim[:1]
    return [c for c in dim if c not in stacked]


def _turned(program: Program, gradients: frozenset[int]) -> dict[int, tuple[int, tuple[int, ...]]]:
    uses = Counter(v for op in program.ops() for v in op.operands)
    return {
        op.operands[0]: (op.results[0], tuple(op.eqn.params["permutation"]))
        for op in program.ops()
        if op.name == "transpose" and op.operands[0] in gradients and uses[op.operands[0]] == 1
    }


def _gradients(program: Program, axes: LogicalAxes, batch: int | None) -> frozenset[int]:
    """The arrays without the batch that are made from arrays with it: gradients, and moments and parameters after them.

    What a loop carries is one of them from its start, where it is one at the end (accumulated gradients).
    """
    if batch is None:
        return frozenset()
    carries = {leaves: any(batch in dim for dim in leaves) for leaves in set(axes.of_value)}
    has_batch = [carries[leaves] for leaves in axes.of_value]
    inputs, found, before = set(program.inputs), set(), -1
    while len(found) > before:
        before = len(found)
        for op in program.ops():
            if op.rule is not None:
                if any(v >= 0 and (has_batch[v] or v in found) for v in op.operands):
                    found.update(v for v in op.results if not has_batch[v] and v not in inputs)
                continue
            for tie in op.ties:
                if {tie.outer, tie.inner} & found:
                    found.update(v for v in (tie.outer, tie.inner) if not has_batch[v] and v not in inputs)
    return frozenset(v for v in found if len(program.avals[v].shape) > 0)


def batch_axis(program: Program, axes: LogicalAxes, state: frozenset[int]) -> int | None:
    """Of the axes that nearly as many activation bytes carry as any, the one that stands foremost in an input.

    Where state is all that comes in, the step makes its batch itself.

    Where no state is known, parameters are inputs like others, with axes that activations carry, too. What tells them
    from the batch is that the next weight sums over them; over the batch at most a gradient sums, later.
    """
    carried: Counter[int] = Counter()
    for leaves, size in _result_bytes(program, axes).items():
        for c in {c for dim in leaves for c in dim}:
            carried[c] += size
    of_state = {c for v in state for dim in axes.of_value[v] for c in dim}
    position: dict[int, tuple[int, int]] = {}
    for n, v in enumerate(program.inputs):
        if v in state:
            continue
        for d, dim in enumerate(axes.of_value[v]):
            for c in dim:
                position[c] = min(position.get(c, (99, 0)), (d, n))
    able = {c for c in position if c not in of_state and c not in axes.stacked and carried[c]}
    if not able and state:
        drawn = _drawn(program, axes, carried)
        return drawn if drawn is not None else batch_axis(program, axes, frozenset())  # what looked like state was all
    if not able:
        return None
    most = max(carried[c] for c in able)
    summed = {} if state else _first_summed(program, axes)
    last = len(program.avals)

    def order(c: int) -> tuple[int, ...]:
        dim, number = position[c]
        return dim, -summed.get(c, last), number, c

    return min((c for c in able if carried[c] >= 0.7 * most), key=order)


def _drawn(program: Program, axes: LogicalAxes, carried: Mapping[int, int]) -> int | None:
    """The batch of a step that makes its own: of the axes that no input has the one that most bytes carry.

    A product keeps it where it meets a weight, and another one sums over it: that is the weight's gradient.
    """
    kept: set[int] = set()
    summed: set[int] = set()
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if op.rule is not None and op.name in CONTRACTIONS:
            for f in op.rule.factors:
                (summed if f.kind == "reduce" else kept).update(factors.get(f.name, ()))
    given = {c for v in program.inputs for dim in axes.of_value[v] for c in dim}
    return max((kept & summed) - given - axes.stacked, key=lambda c: (carried[c], -c), default=None)


def _result_bytes(program: Program, axes: LogicalAxes) -> Counter[Leaves]:
    """The bytes that operators give in one step, by the classes of their results."""
    found: Counter[Leaves] = Counter()
    for op in program.ops():
        if op.rule is not None:
            for v in op.results:
                if not _compat.is_extended((aval := program.avals[v]).dtype):
                    found[axes.of_value[v]] += int(axis_weight(aval) * op.trips)
    return found


def _first_summed(program: Program, axes: LogicalAxes) -> dict[int, int]:
    """The number of the first operator that contracts an axis, or addresses it by index."""
    found: dict[int, int] = {}
    for number, (op, factors) in enumerate(zip(program.ops(), axes.of_op, strict=True)):
        if op.rule is not None and op.name in (*CONTRACTIONS, "gather"):
            kind = "index" if op.name == "gather" else "reduce"
            for f in op.rule.factors:
                if f.kind == kind:
                    for c in factors.get(f.name, ()):
                        found.setdefault(c, number)
    return found


def _input_roles(
    program: Program, axes: LogicalAxes, batch: int | None, state: frozenset[int]
) -> tuple[dict[int, Role], dict[int, frozenset[int]]]:
    """The role of each input, and which inputs each value without the batch axis was made from."""
    owner: dict[int, frozenset[int]] = {v: frozenset({v}) for v in program.inputs}
    parameters: set[int] = set()
    carries = [any(batch in dim for dim in dims) for dims in axes.of_value]

    def visit(block: Any) -> None:
        for op in block.ops:
            if op.rule is None:
                for tie in op.ties:
                    if tie.outer in owner:
                        owner.setdefault(tie.inner, owner[tie.outer])
                for inner in op.blocks:
                    visit(inner)
                continue
            owned = frozenset[int]().union(*(owner[v] for v in op.operands if v in owner and not carries[v]))
            if any(carries[v] for v in (*op.operands, *op.results) if v >= 0):
                parameters.update(owned)
            elif 0 < len(owned) <= FUSED_WEIGHTS:
                for v in op.results:
                    owner.setdefault(v, owned)

    visit(program.block)
    roles: dict[int, Role] = {}
    for v in program.inputs:
        aval = program.avals[v]
        if carries[v] or (v not in state and not is_float(aval) and aval.ndim):
            roles[v] = "data"
        elif not aval.ndim or not is_float(aval):
            roles[v] = "other"
        elif v in parameters:
            roles[v] = "parameter"
        else:
            roles[v] = "data" if state and v not in state else "optimizer"
    return roles, owner


def _summed_up(use: AxisUses) -> set[int]:
    """Axes that a weight makes and that are then summed up, such as the classes of a loss; no part of a head."""
    beside_heads = {w for c in use.heads for w in use.weights[c]}
    return {c for c in use.made if c in use.reduced and not use.weights[c] & beside_heads}


def _residual(use: AxisUses, able: set[int], weight: Counter[int], in_data: set[int]) -> int | None:
    """The axis that most weights start from or return to."""
    found = [c for c in weight if c in able]
    if len(found) < 2:
        return None
    return max(found, key=lambda c: (len(use.weights[c]), c in in_data, weight[c], -c))


def _major_first(ordered: list[int], axes: LogicalAxes, values: Sequence[int]) -> list[int]:
    for v in values:
        for dim in axes.of_value[v]:
            places = sorted(ordered.index(c) for c in dim if c in ordered)
            for place, c in zip(places, [c for c in dim if c in ordered], strict=True):
                ordered[place] = c
    return ordered
