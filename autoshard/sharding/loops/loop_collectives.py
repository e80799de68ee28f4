"""Moves gathers of weights before the loops that use them, and reductions of their gradients after these loops.

A recurrent network runs a loop over time, whose carry has rows of the batch. Its body uses the same weights in every
iteration, and the backward pass adds up their gradients in the carry of its loop. If weights are stored in shards, an
operator gathers a weight where it uses it, so in every iteration, and a gradient is reduced to shards in every
iteration. Two operators in the traced program change this:

    gather_before_loop  the weight is gathered once, and used whole in the body
    reduce_after_loop   in the body, the gradient has the sharding in which it is computed. XLA then reduces it once,
                        after the loop (its code motion of all-reduces in while loops)

Each device then holds these weights and gradients whole while the loop runs. The forward and the backward loop share a
gathered weight, because XLA merges equal gathers. So a loop is changed only if all whole weights, and the gradients of
the loop, take at most `WHOLE_WEIGHTS_SHARE` of a device's memory.

A loop over microbatches has no rows of the batch in its carry. All weights are the same in each of its iterations, and
it is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.analysis import Analysis, analyse
from autoshard.sharding.axes.weights.loop_sums import ADDITIONS, REARRANGING, LoopSum, loop_sums
from autoshard.sharding.layout.operator_sharding import is_gradient
from autoshard.sharding.loops.constants import WHOLE_WEIGHTS_SHARE
from autoshard.sharding.loops.frames import FRAMES
from autoshard.sharding.program.array_sizes import is_float, nbytes
from autoshard.sharding.program.operator_kinds import is_declared
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.rewrite.evaluation import Edit, FrameEdits, rewritten
from autoshard.spmdrules.families.weight_gathers import OUTSIDE_LOOPS, gather_before_loop, reduce_after_loop
from autoshard.spmdrules.ir.program import Block, Op, Program, inlined, users_of


def with_loop_collectives(traced: Traced, memory_bytes: float) -> Traced:
    """Return a traced step whose loops over time gather each weight once, and reduce each gradient once.

    A pipeline stays as it is: its loop over the ticks has gathers of its own (`gather_once`).

    Args:
        traced: the step.
        memory_bytes: the memory of one device.
    """
    if traced.stages > 1 or not _may_change(traced.program):
        return traced
    with _compat.auto_axes():
        inlined_step = with_program(traced, rewritten(traced.closed))
        edits = _edits(inlined_step, analyse(inlined_step), memory_bytes)
        return traced if edits is None else with_program(traced, rewritten(inlined_step.closed, edits))


def with_program(traced: Traced, closed: Any) -> Traced:
    """Return a traced step with another program."""
    jaxpr = _compat.open_jaxpr(closed)
    in_avals, out_avals = [v.aval for v in jaxpr.invars], [v.aval for v in jaxpr.outvars]
    return replace(traced, closed=closed, in_avals=in_avals, out_avals=out_avals)


def _may_change(program: Program) -> bool:
    """Whether the program has a loop with a weight among its constants, or with a sum of products in its carry."""
    if any(op.name in OUTSIDE_LOOPS for op in program.ops()):
        return False
    scans = [op for op in program.ops() if _is_loop(op)]
    sources = _sources(program) if scans else {}
    return any(_weights(op, sources) or loop_sums(op) for op in scans)


def _is_loop(op: Op) -> bool:
    """Whether an operator is a loop whose carry has more than sums. A loop over microbatches carries only sums."""
    if op.name != "scan" or op.eqn.params["length"] < 2:
        return False
    consts, count = _compat.scan_arity(op.eqn.params)
    body = op.blocks[0]
    users = users_of(inlined(body))

    def is_sum(position: int) -> bool:
        found = users.get(body.inputs[consts + position], [])
        return len(found) == 1 and found[0].name in ADDITIONS and found[0].results[0] == body.outputs[position]

    return any(op.eqn.invars[consts + n].aval.ndim and not is_sum(n) for n in range(count))


def _edits(traced: Traced, analysis: Analysis, memory_bytes: float) -> FrameEdits | None:
    """Return the changes of a step; None if there are none."""
    program, batch, edits = traced.program, analysis.roles.batch, FrameEdits()
    if batch is None:
        return None
    sources = {v: s for v, s in _sources(program).items() if analysis.roles.inputs.get(s) == "parameter"}
    plan = _Changes(analysis, sources, WHOLE_WEIGHTS_SHARE * memory_bytes)
    for loop in _loops(program.block):
        consts, count = _compat.scan_arity(loop.op.eqn.params)
        carry = loop.op.blocks[0].inputs[consts : consts + count]
        if any(batch in dim for v in carry for dim in analysis.axes.of_value[v]):
            plan.add(loop, edits.at(loop.path))
    return edits if plan.changed else None


@shown
@dataclass(frozen=True, eq=False)
class _Loop:
    """A scan, the block that contains it, the path of that block's frame, and the position of its equation there."""

    op: Op
    block: Block
    path: tuple[int, ...]
    position: int


def _loops(block: Block, path: tuple[int, ...] = ()) -> Iterator[_Loop]:
    """Yield the loops of a block that can be changed, outer ones first."""
    positions = {id(eqn): n for n, eqn in enumerate(_compat.open_jaxpr(block.jaxpr).eqns)}
    for op in block.ops:
        position = positions.get(id(op.eqn))
        if position is None or op.name not in FRAMES:
            continue
        if _is_loop(op):
            yield _Loop(op, block, path, position)
        yield from _loops(op.blocks[0], (*path, position))


@shown
@dataclass(eq=False)
class _Changes:
    """The changes of a step.

    Attributes:
        analysis: the analysis of the step.
        sources: each weight -> its parameter.
        most_bytes: the most bytes of whole weights and of the gradients of one loop.
        whole: the gathered weights, in their frames -> their bytes.
        inside: the paths of changed loops' bodies -> the values in them that are gathered before the loop.
        changed: whether anything was changed.
    """

    analysis: Analysis
    sources: Mapping[int, int]
    most_bytes: float
    whole: dict[tuple[tuple[int, ...], int], float] = field(default_factory=dict)
    inside: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    changed: bool = False

    def add(self, loop: _Loop, edits: FrameEdits) -> None:
        """Change one loop, if the whole weights and its gradients take at most `most_bytes`."""
        avals, eqn = self.analysis.axes.program.avals, loop.op.eqn
        gathered = {v for n in range(len(loop.path) + 1) for v in self.inside.get(loop.path[:n], ())}
        weights = {n: uses for n, uses in _weights(loop.op, self.sources).items()
                   if loop.op.operands[n] not in gathered}  # fmt: skip
        sums = [each for each in loop_sums(loop.op) if self._is_gradient(each) and _starts_at_zero(loop, each)]
        whole = {(loop.path, loop.op.operands[n]): float(nbytes(avals[loop.op.operands[n]])) for n in weights}
        held = sum({**self.whole, **whole}.values())
        if held + sum(nbytes(avals[each.result]) for each in sums) > self.most_bytes:
            return
        self.inside[(*loop.path, loop.position)] = {v for uses in weights.values() for v in uses}
        for n in weights:
            var, key = eqn.invars[n], ("gathered", loop.op.operands[n])
            edits.operands[loop.position, n] = key
            if (loop.path, loop.op.operands[n]) not in self.whole:
                gather = Edit((var,), (key,), lambda x: [gather_before_loop(x)], eqn)
                edits.before.setdefault(loop.position, []).append(gather)
        for each in sums:
            var = eqn.outvars[each.position]
            reduction = Edit((var,), (var,), lambda x: [reduce_after_loop(x)], eqn)
            edits.before.setdefault(loop.position + 1, []).append(reduction)
        self.whole |= whole
        self.changed |= bool(weights or sums)

    def _is_gradient(self, each: LoopSum) -> bool:
        """Whether a sum is an array, and all of its terms are sums over the batch."""
        axes, roles = self.analysis.axes, self.analysis.roles
        of_batch = (is_gradient(axes, roles, op, op.results[0]) for op in each.terms)
        return bool(axes.of_value[each.result]) and all(of_batch)


def _starts_at_zero(loop: _Loop, each: LoopSum) -> bool:
    """Whether the initial value of a sum is a literal number in every element, as for the gradients of a loop."""
    consts, _ = _compat.scan_arity(loop.op.eqn.params)
    start = loop.op.operands[consts + each.position]
    made = next((op for op in loop.block.ops if start in op.results), None)
    return made is not None and made.name == "broadcast_in_dim" and made.operands[0] < 0


def _sources(program: Program) -> dict[int, int]:
    """Return the input that each value comes from: value -> input.

    The value equals the input, or one iteration's slice of it, up to its type, order and shape.
    """
    sources = {v: v for v in program.inputs}

    def visit(block: Block) -> None:
        for op in block.ops:
            if op.name == "scan":
                consts, count = _compat.scan_arity(op.eqn.params)
                pairs = list(zip(op.operands, op.blocks[0].inputs, strict=True))
                sources.update({inner: sources[v] for v, inner in [*pairs[:consts], *pairs[consts + count :]]
                                if v in sources})  # fmt: skip
            if _rearranges(op) and op.operands[0] in sources:
                sources[op.results[0]] = sources[op.operands[0]]
            for inner in op.blocks:
                visit(inner)

    visit(program.block)
    return sources


def _rearranges(op: Op) -> bool:
    """Whether an operator keeps all elements of its operand. It may change their type, order and shape."""
    if op.name == "broadcast_in_dim":
        return op.eqn.invars[0].aval.size == op.eqn.outvars[0].aval.size
    return op.name in REARRANGING


def _weights(scan: Op, sources: Mapping[int, int]) -> dict[int, set[int]]:
    """Return the weights among the constants of a scan: number of the constant -> the values in the body that equal it.

    Stacks that the body slices do not count, and neither do tables in which it looks up rows.
    """
    consts, _ = _compat.scan_arity(scan.eqn.params)
    found = {}
    for n, v in enumerate(scan.operands[:consts]):
        if v in sources and scan.eqn.invars[n].aval.ndim and is_float(scan.eqn.invars[n].aval):
            equal = {scan.blocks[0].inputs[n]}
            if _is_used_whole(scan.blocks[0], equal):
                found[n] = equal
    return found


def _is_used_whole(block: Block, equal: set[int]) -> bool:
    """Whether no operator of a block takes only a part of a value.

    A declared operator may take a part, such as a layer of a stack.

    Args:
        block: the block.
        equal: the value, and those that equal it up to type, order and shape. Further ones are added.
    """
    for op in inlined(block):
        taken = [n for n, v in enumerate(op.operands) if v in equal]
        if not taken:
            continue
        if _rearranges(op):
            equal.update(op.results)
        elif op.name == "scan":
            consts, _ = _compat.scan_arity(op.eqn.params)
            if any(n >= consts for n in taken):
                return False
            equal.update(op.blocks[0].inputs[n] for n in taken)
            if not _is_used_whole(op.blocks[0], equal):
                return False
        elif op.blocks or is_declared(op) or op.name in ("slice", "dynamic_slice", "gather"):
            return False
    return True
