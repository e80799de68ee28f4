"""Sums over the iterations of a loop: a value of the carry to which each iteration adds terms.

    carry' = carry + product of this iteration

The gradient of a weight that a loop uses in every iteration is such a sum. If each device has partial terms, XLA can
reduce the sum over the devices once, after the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, is_decision_point
from autoshard.spmdrules.families.weight_gathers import after_loop_p
from autoshard.spmdrules.ir.program import Op, Program, inlined

ADDITIONS = ("add", "add_any")
# Operators that keep all elements of their operand. They may change their type, order and shape.
REARRANGING = ("convert_element_type", "transpose", "reshape", "squeeze")
_TERMS = (*CONTRACTIONS, "reduce_sum")


@shown
@dataclass(frozen=True, eq=False)
class LoopSum:
    """A sum that a scan computes.

    Attributes:
        position: its position in the carry.
        result: its value after the loop.
        terms: the operators of the body that compute what an iteration adds.
        values: its values in the body and `result`: the carry, the terms, and what is computed between them.
    """

    position: int
    result: int
    terms: tuple[Op, ...]
    values: frozenset[int]


def loop_sums(scan: Op) -> list[LoopSum]:
    """Find the sums of a scan, in the order of its carry.

    A term is a contraction, or a sum over a dimension. Only the sum uses it.

    Args:
        scan: the operator.
    """
    consts, count = _compat.scan_arity(scan.eqn.params)
    body = scan.blocks[0]
    ops = list(inlined(body))
    made = {v: op for op in ops for v in op.results}
    users = Counter(v for op in ops for v in op.operands) + Counter(body.outputs)
    found = []
    for position in range(count):
        carry = body.inputs[consts + position]
        terms: list[Op] = []
        values: set[int] = set()
        left = [body.outputs[position]]
        while left:
            v = left.pop()
            if users[v] != 1 or (v != carry and v not in made):
                break
            values.add(v)
            if v == carry:
                continue
            op = made[v]
            if op.name in _TERMS and is_decision_point(op):
                terms.append(op)
            elif op.name in (*ADDITIONS, *REARRANGING, "reduce_sum"):  # a sum over dimensions of size 1
                left += op.operands
            else:
                break
        else:
            if terms and carry in values:
                result = scan.results[position]
                found.append(LoopSum(position, result, tuple(terms), frozenset({*values, result})))
    return found


def is_loop_term(sums: Mapping[int, int], op: Op) -> bool:
    """Whether an operator computes a term of a sum that is reduced after its loop.

    Args:
        sums: `Roles.loop_sums`.
        op: the operator.
    """
    return len(op.results) == 1 and op.name in _TERMS and op.results[0] in sums


def reduced_loop_sums(program: Program) -> dict[int, int]:
    """Return the values of each sum that is reduced after its loop (`reduce_after_loop`) -> its reduced value.

    Args:
        program: the program.
    """
    reduced = {op.operands[0]: op.results[0] for op in program.ops() if op.name == after_loop_p.name}
    if not reduced:
        return {}
    sums = (each for op in program.ops() if op.name == "scan" for each in loop_sums(op))
    return {v: reduced[each.result] for each in sums if each.result in reduced for v in each.values}
