"""What a layout says at each operator: where operands come from, where results are wanted, how the work is cut.

Cost, memory, lowering and reports all ask here, so that what is priced is what is written into the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard import _compat
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_strategy import OperandSpecs, OperatorStrategy, choose_strategy
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.flops import flops_of
from autoshard.sharding.program.partitioner_faults import MISPARTITIONED, Cut, known_fault
from autoshard.spmdrules.core.placement import Spec, axes_of, bytes_sent_per_byte
from autoshard.spmdrules.core.rule import Dims, Rule
from autoshard.spmdrules.ir.program import Op

ONCE_UPDATED = "once updated"


def operand_spec(layout: Layout, value: int) -> Spec:
    """Where a value is before an operator takes it: a (slice of a) parameter where it is stored, a gradient too."""
    if value in layout.roles.inputs:
        return layout.stored(value)
    held = layout.held.get(value)
    if held is not None and not layout.early(held):
        spec, count = layout.stored(held), len(layout.axes.of_value[value])
        return ((),) * (count - len(spec)) + spec[max(len(spec) - count, 0) :]
    if value in layout.roles.gradients:
        return beside_state(layout, value)
    return layout.spec(value)


def result_spec(layout: Layout, op: Op, value: int) -> Spec:
    """Where the result of a deciding operator should end: a gradient as its state is stored, others as computed."""
    if is_gradient(layout.axes, layout.roles, op, value):
        return beside_state(layout, value)
    return layout.spec(value)


def is_gradient(axes: LogicalAxes, roles: Roles, op: Op, value: int) -> bool:
    """Whether an operator that takes a batch gives a result without it."""
    batch, of_value = roles.batch, axes.of_value
    if batch is None or any(batch in dim for dim in of_value[value]):
        return False
    return any(v >= 0 and any(batch in dim for dim in of_value[v]) for v in op.operands)


def beside_state(layout: Layout, value: int) -> Spec:
    """The sharding of a gradient: that of the state which consumes it, if a layout stores any."""
    spec = layout.gradient_spec(value) if layout.storage else None
    return layout.spec(value) if spec is None else spec


@dataclass(frozen=True)
class StateGather:
    """State that is gathered whole outside of any operator.

    Attributes:
        value: the program input.
        axes: the mesh axes over which it is gathered.
        wire_bytes: bytes that leave each device.
        when: in words.
    """

    value: int
    axes: tuple[str, ...]
    wire_bytes: float
    when: str


def state_gathers(layout: Layout, updated: Iterable[int]) -> list[StateGather]:
    """The gathers of small stacks before their loops, and of parameters from where they are updated (ZeRO-1 and 2).

    Args:
        layout: the layout.
        updated: the inputs that come back changed.
    """
    moves = [(v, layout.stored(v), layout.spec(v), "before a loop") for v in layout.gathered_early]
    for v in updated:
        there = layout.gradient_spec(v) if layout.roles.inputs.get(v) == "parameter" else None
        if there is not None:
            moves.append((v, there, layout.stored(v), ONCE_UPDATED))
    found = []
    for v, before, after, when in moves:
        kept = set(axes_of(after))
        extra = tuple(a for a in axes_of(before) if a not in kept)
        local = nbytes(layout.axes.program.avals[v]) / layout.ways({*kept, *extra})
        if wire := bytes_sent_per_byte("all-gather", layout.ways(extra)) * local:
            found.append(StateGather(v, extra, wire, when))
    return found


def strategy(layout: Layout, op: Op, flops_per_byte: float) -> OperatorStrategy:
    """The cut of a deciding operator under a layout."""
    places = [operand_spec(layout, v) if v >= 0 else () for v in op.operands]
    wants, moved = [result_spec(layout, op, v) for v in op.results], moved_bytes(layout.axes, op)
    return strategy_at(op, places, wants, moved, layout.mesh, flops_per_byte)


def moved_bytes(axes: LogicalAxes, op: Op) -> list[float]:
    """Bytes of each operand where a collective moves it: a parameter in the narrowest type that it was cast from."""
    sizes = [float(nbytes(v.aval)) for v in op.eqn.invars]
    if axes.transfer_dtype:
        for i, v in enumerate(op.operands):
            if v in axes.transfer_dtype:
                sizes[i] *= axes.transfer_dtype[v].itemsize / op.eqn.invars[i].aval.dtype.itemsize
    return sizes


def strategy_at(
    op: Op,
    places: Sequence[Spec],
    outs: Sequence[Spec],
    moved: Sequence[float],
    mesh: Mapping[str, int],
    flops_per_byte: float,
) -> OperatorStrategy:
    """The cut of a deciding operator.

    Args:
        op: the operator.
        places: where its operands are; empty: a literal.
        outs: where its results are wanted.
        moved: bytes of its operands (`moved_bytes`).
        mesh: mesh axis -> size.
        flops_per_byte: see `strategy`.
    """
    assert op.rule is not None
    avals = [v.aval for v in op.eqn.invars]
    specs = [place or ((),) * a.ndim for place, a in zip(places, avals, strict=True)]
    operands = OperandSpecs(op.rule.operands, moved, specs, op.rule, mesh)
    results = OperandSpecs(op.rule.results, [nbytes(v.aval) for v in op.eqn.outvars], outs, op.rule, mesh)
    return choose_strategy(op.rule, operands, results, mesh, flops_of(op), flops_per_byte)


def cut_of(plan: OperatorStrategy, mesh: Mapping[str, int]) -> dict[str, str]:
    """Mesh axis -> the factor that it cuts, of axes that cut anything."""
    return {axis: factor for axis, factor in plan.factors.items() if factor is not None and mesh[axis] > 1}


def runs_on_shards(op: Op, plan: OperatorStrategy, mesh: Mapping[str, int]) -> bool:
    """Whether an operator runs on shards as its rule says, since XLA's partitioner would spoil it.

    It is known to compute some strategies wrongly, to abort, or to gather what the rule leaves where it is.
    """
    return _faulty(op, list(cut_of(plan, mesh).values()), mesh)


def _faulty(op: Op, cut: Sequence[str], mesh: Mapping[str, int]) -> bool:
    """Whether the partitioner is known to spoil the operator where these factors are cut."""
    assert op.rule is not None
    if not cut or op.name not in MISPARTITIONED or any(_compat.is_extended(v.aval.dtype) for v in op.eqn.invars):
        return False
    place = Cut([v.aval for v in op.eqn.invars], op.eqn.params, op.rule, tuple(cut))
    axes = sum(n > 1 for n in mesh.values())
    fault = known_fault(op.name, place, axes=axes)
    return fault is not None and fault.avoided


def comes_straight(layout: Layout, op: Op, plan: OperatorStrategy, result: int, want: Spec) -> bool:
    """Whether XLA may take a result straight to where it is wanted, with all that the wish says cut as well."""
    rule = op.rule
    assert rule is not None
    dims = rule.results[result]
    computed = plan.spec(dims)
    if not comes_out_as(rule, dims, computed, want):
        return False
    more = [f for dim, c, w in zip(dims, computed, want, strict=True) if len(w) > len(c) for f in dim]
    return not more or not _faulty(op, [*cut_of(plan, layout.mesh).values(), *more], layout.mesh)


def comes_out_as(rule: Rule, dims: Dims, computed: Spec, want: Spec) -> bool:
    """Whether XLA may take a result from how it is computed straight to where it is wanted.

    Only where the wish cuts further (a partial sum becomes a reduce-scatter then), and not a batch dimension that is
    cut already. Elsewhere the result is pinned to how it is computed first: the partitioner chooses on its own how to
    go there, and from (dp, tp) x (tp, fsdp) to ((dp, fsdp), tp) it computes wrong values. What is looked up in a table
    that is cut both ways is no better off: there it fails to compile where an axis of the indices is cut further.
    """
    indexed = any(f.kind == "index" for f in rule.factors)
    for names, c, w in zip(dims, computed, want, strict=True):
        batch = indexed or any(all(any(f in dim for dim in operand) for operand in rule.operands) for f in names)
        if w[: len(c)] != c or (batch and c and w != c):
            return False
    return True
