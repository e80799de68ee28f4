"""The parameters that a scan can gather one iteration early.

A loop over stacked layers takes one slice of each stack in every iteration, and gathers it where an operator uses it.
What is gathered can be computed before the iteration if it depends on slices of the scan's operands and on its
constants alone: the slice itself, its cast, its rounding to 8 bits. Values of the loop's carry are known too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec, strategy_in_layout
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.program.operator_kinds import REDUCTIONS, is_decision_point
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Block, Op

# Calls and control flow whose bodies may use values of the code around them when they are lowered (`lower.lowering`).
OPEN_CALLS = frozenset({"call", "closed_call", "eval_jaxpr", "jit", "remat2", "scan", "while", "cond"})
COMPUTED = "they depend on what the loop computes"
CONSTANT = "they are the same in every iteration"
SINGLE = "there is no earlier iteration"
ON_HOST = "they are in host memory"
IN_CALL = "they are used in a call whose body sees only its own operands"


@shown
@dataclass(frozen=True)
class Gather:
    """A parameter that an operator uses in another sharding than it is stored in.

    Attributes:
        value: the operand: the parameter, or a slice or cast of it.
        spec: the sharding in which the operator uses it.
    """

    value: int
    spec: Spec


@shown
@dataclass(frozen=True, eq=False)
class LoopOperands:
    """The parameters that the operators of a scan's body use.

    Attributes:
        chains: those that can be gathered one iteration early -> the operators that compute them, in order, from slices
            of the scan's operands and from its constants.
        late: those that cannot -> the reason.
        slices: slice of an operand -> the number of the operand among those that the scan slices.
    """

    chains: dict[int, tuple[Op, ...]]
    late: dict[int, str]
    slices: dict[int, int]


def is_parameter(axes: LogicalAxes, roles: Roles, value: int) -> bool:
    """Whether a value is a parameter, or a slice or a cast of one."""
    return roles.inputs.get(axes.parameter_aliases.get(value, value)) == "parameter"


def loop_operands(axes: LogicalAxes, roles: Roles, scan: Op) -> LoopOperands:
    """Find the parameters that the operators of a scan's body use.

    Args:
        axes: the logical axes of the program.
        roles: their roles.
        scan: the operator.
    """
    body = scan.blocks[0]
    made: dict[int, tuple[int, Op]] = {}  # value -> number and operator that computes it
    inner: set[int] = set()  # values that inner loops take slices of, or change
    used: dict[int, bool] = {}  # parameter -> whether all of its uses can have it early
    for number, (op, is_open) in enumerate(operators(body)):
        if not op.blocks:
            made.update(dict.fromkeys(op.results, (number, op)))
        inner.update(edge.inner for edge in op.edges if edge.inner not in op.operands)
        for v in parameters_of(axes, roles, op):
            used[v] = used.get(v, True) and is_open
    consts, carry = _compat.scan_arity(scan.eqn.params)
    found = LoopOperands({}, {}, {v: k for k, v in enumerate(body.inputs[consts + carry :])})
    known = {*body.inputs[:consts], *found.slices}
    for value, is_open in used.items():
        ops, ends = ancestors(value, made, known)
        if ends & inner:
            continue  # the inner loop gathers it itself
        if not ends <= known:
            found.late[value] = COMPUTED
        elif not ends & found.slices.keys():
            found.late[value] = CONSTANT
        elif scan.eqn.params["length"] < 2:
            found.late[value] = SINGLE
        elif any(_compat.is_on_host(axes.program.avals[v]) for v in ends):
            found.late[value] = ON_HOST
        elif not is_open:
            found.late[value] = IN_CALL
        else:
            found.chains[value] = ops
    return found


def parameters_of(axes: LogicalAxes, roles: Roles, op: Op) -> tuple[int, ...]:
    """The parameters among the operands of an operator that gathers them under some layout."""
    return tuple(v for v in op.operands if v >= 0 and is_parameter(axes, roles, v)) if may_gather(op) else ()


def gathers_of(layout: Layout, op: Op, prices: LinkPrices) -> list[Gather]:
    """The parameters that one operator uses in another sharding than they are stored in."""
    parameters = parameters_of(layout.axes, layout.roles, op)
    if not parameters:
        return []
    assert op.rule is not None
    chosen = strategy_in_layout(layout, op, prices)
    wanted = zip(op.operands, map(chosen.spec, op.rule.operands), strict=True)
    return [Gather(v, spec) for v, spec in wanted if v in parameters and operand_spec(layout, v) != spec]


def loop_gathers(layout: Layout, scan: Op, prices: LinkPrices) -> tuple[Gather, ...]:
    """What the operators of a scan's body gather under a layout, in the order of first use.

    Args:
        layout: the layout.
        scan: the operator.
        prices: what bytes on the links of the target cost.
    """
    ops = operators(scan.blocks[0])
    return tuple(dict.fromkeys(gather for op, _ in ops for gather in gathers_of(layout, op, prices)))


def may_gather(op: Op) -> bool:
    """Whether an operator gathers stored parameters under some layout."""
    return not op.blocks and is_decision_point(op) and op.name not in REDUCTIONS


def operators(block: Block, is_open: bool = True) -> Iterator[tuple[Op, bool]]:
    """Yield the operators of a body, and whether each may use values of the body besides its operands."""
    for op in block.ops:
        yield op, is_open
        for inner in op.blocks:
            yield from operators(inner, is_open and op.name in OPEN_CALLS)


def ancestors(value: int, made: dict[int, tuple[int, Op]], known: set[int]) -> tuple[tuple[Op, ...], set[int]]:
    """Return the operators that compute a value, in order, and the values that these need and do not compute."""
    ops: dict[int, Op] = {}
    ends: set[int] = set()
    left = [value]
    while left:
        v = left.pop()
        if v in known or v not in made:
            ends.add(v)
        elif made[v][0] not in ops:
            number, op = made[v]
            ops[number] = op
            left += [operand for operand in op.operands if operand >= 0]
    return tuple(ops[number] for number in sorted(ops)), ends
