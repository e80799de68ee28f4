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
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec, strategy_in_layout
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.program.operator_kinds import REDUCTIONS, is_decision_point
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Block, Op

# Calls whose operators may use values of the code around them when they are lowered (`lower.lowering`).
OPEN_CALLS = frozenset({"call", "closed_call", "eval_jaxpr", "jit", "remat2", "scan", "while", "cond"})
COMPUTED = "it depends on what the loop computes"
CONSTANT = "it is the same in every iteration"
ON_HOST = "it waits in host memory"
IN_CALL = "it is used in a call whose body sees only its operands"


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
class LoopGathers:
    """What a scan gathers.

    Attributes:
        early: what it can gather one iteration early, in the order of first use.
        chain: the operators that compute these values from slices of the scan's operands, in order.
        slices: slice of an operand -> the number of the operand among those that the scan slices.
        late: what it cannot gather early -> the reason.
    """

    early: tuple[Gather, ...]
    chain: tuple[Op, ...]
    slices: dict[int, int]
    late: dict[Gather, str]


def is_parameter(layout: Layout, value: int) -> bool:
    """Whether a value is a parameter, or a slice or a cast of one."""
    return layout.roles.inputs.get(layout.aliased_inputs.get(value, value)) == "parameter"


def gathers_of(layout: Layout, op: Op, prices: LinkPrices) -> list[Gather]:
    """The parameters that one operator uses in another sharding than they are stored in."""
    if op.blocks or not is_decision_point(op) or op.name in REDUCTIONS:
        return []
    values = [v for v in op.operands if v >= 0 and is_parameter(layout, v)]
    if not values:
        return []
    assert op.rule is not None
    chosen = strategy_in_layout(layout, op, prices)
    wanted = [(v, chosen.spec(dims)) for v, dims in zip(op.operands, op.rule.operands, strict=True) if v in values]
    return [Gather(v, spec) for v, spec in wanted if operand_spec(layout, v) != spec]


def loop_gathers(layout: Layout, scan: Op, prices: LinkPrices) -> LoopGathers:
    """Find what a scan gathers, and what of it one iteration early.

    Args:
        layout: the layout.
        scan: the operator.
        prices: what bytes on the links of the target cost.
    """
    body = scan.blocks[0]
    made: dict[int, Op] = {}
    inner: set[int] = set()  # values that inner loops take slices of, or change
    found: dict[Gather, bool] = {}  # -> whether all of its uses can have it early
    for op, is_open in _operators(body):
        if not op.blocks:
            made.update(dict.fromkeys(op.results, op))
        inner.update(edge.inner for edge in op.edges if edge.inner not in op.operands)
        for gather in gathers_of(layout, op, prices):
            found[gather] = found.get(gather, True) and is_open
    consts, carry = _compat.scan_arity(scan.eqn.params)
    slices = {v: k for k, v in enumerate(body.inputs[consts + carry :])}
    known = {*body.inputs[:consts], *slices}
    early, late, chain = [], {}, {}
    for gather, is_open in found.items():
        ops, ends = _ancestors(gather.value, made, known)
        if ends & inner:
            continue  # the inner loop gathers it itself
        if not ends <= known:
            late[gather] = COMPUTED
        elif not ends & slices.keys():
            late[gather] = CONSTANT
        elif any(_compat.is_on_host(layout.axes.program.avals[v]) for v in ends):
            late[gather] = ON_HOST
        elif not is_open:
            late[gather] = IN_CALL
        else:
            early.append(gather)
            chain.update((id(op), op) for op in ops)
    order = {id(op): n for n, (op, _) in enumerate(_operators(body))}
    return LoopGathers(tuple(early), tuple(sorted(chain.values(), key=lambda op: order[id(op)])), slices, late)


def _operators(block: Block, is_open: bool = True) -> Iterator[tuple[Op, bool]]:
    """Yield the operators of a body, and whether each may use values of the body besides its operands."""
    for op in block.ops:
        yield op, is_open
        for inner in op.blocks:
            yield from _operators(inner, is_open and op.name in OPEN_CALLS)


def _ancestors(value: int, made: dict[int, Op], known: set[int]) -> tuple[list[Op], set[int]]:
    """Return the operators that compute a value, and the values that these need and do not compute."""
    ops, ends, seen, left = [], set(), set(), [value]
    while left:
        v = left.pop()
        if v in seen or v < 0:
            continue
        seen.add(v)
        if v in known or v not in made:
            ends.add(v)
        elif made[v] not in ops:
            ops.append(made[v])
            left += made[v].operands
    return ops, ends
