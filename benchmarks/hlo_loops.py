"""Trip counts of the loops of an HLO program.

XLA:GPU and XLA:CPU print a `known_trip_count` in `backend_config`. XLA:TPU does not: there the count follows from the
condition (`state[i] < limit` or another comparison), the initial `state[i]`, and the increment in the body. Each is
traced through copies, tuples, fusions, calls and values that enclosing loops carry unchanged. The count is None if one
of them is not a constant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil

from hlo import Computation, Instruction, Module

# A scalar that is an element of the loop's state (None: no element) plus a constant. None if it has another form.
Linear = tuple[int | None, int] | None
Given = Mapping[int, Linear]
COPIES = ("copy", "bitcast", "convert", "reshape", "broadcast", "copy-start", "copy-done", "optimization-barrier")


def trips(module: Module, parent: Computation, loop: Instruction) -> int | None:
    """Return how often a `while` of a computation runs its body, or None if unknown."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    compared = _comparison(module, module.computations[loop.attribute("condition") or ""])
    if compared is None:
        return None
    (index, shift), direction, (carried, limit) = compared
    body = module.computations[loop.attribute("body") or ""]
    step = _element(module, body, body.root, index)
    start = _initial(module, parent, loop, index)
    if carried is not None:
        initial = _initial(module, parent, loop, carried)
        limit = limit + initial if initial is not None and _unchanged(module, body, carried) else None
    if start is None or limit is None or step is None or step[0] != index:
        return None
    return _count(start + shift, limit, step[1], direction)


def _comparison(module: Module, condition: Computation) -> tuple[tuple[int, int], str, tuple[int | None, int]] | None:
    """Return the compared element of the state with its offset, the direction, and the limit."""
    root, where, given = condition.root, condition, {}
    while root.opcode == "fusion":  # the comparison alone is often put in a fusion
        given = _inputs(module, where, root, given)
        where = module.computations[root.called[0]]
        root = where.root
    if root.opcode != "compare":
        return None
    left, right = (_linear(module, where, operand, given) for operand in where.inputs(root))
    direction = root.attribute("direction") or ""
    if left and left[0] is None:
        left, right, direction = right, left, direction.translate(str.maketrans("LG", "GL"))
    return ((left[0], left[1]), direction, right) if left and right and left[0] is not None else None


def _initial(module: Module, parent: Computation, loop: Instruction, index: int) -> int | None:
    """Return the initial value of an element of a loop's state, or None if unknown."""
    value = _element(module, parent, parent.named[loop.operands[0]], index)
    if value is None or value[0] is None:
        return value and value[1]
    outer = module.loops.get(parent.name)
    if outer is None or not _unchanged(module, parent, value[0]):
        return None
    start = _initial(module, *outer, value[0])
    return None if start is None else start + value[1]


def _unchanged(module: Module, body: Computation, index: int) -> bool:
    return _element(module, body, body.root, index) == (index, 0)


def _element(module: Module, where: Computation, whole: Instruction, index: int, given: Given | None = None) -> Linear:
    """Return an element of a tuple."""
    whole = _source(where, whole)
    if whole.opcode == "tuple":
        return _linear(module, where, where.named[whole.operands[index]], given or {})
    if whole.opcode in ("fusion", "call"):
        inside = module.computations[whole.called[0]]
        return _element(module, inside, inside.root, index, _inputs(module, where, whole, given or {}))
    return (index, 0) if whole.opcode == "parameter" else None


def _linear(module: Module, where: Computation, value: Instruction, given: Given) -> Linear:
    value = _source(where, value)
    match value.opcode:
        case "constant":
            return (None, int(value.arguments)) if re.fullmatch(r"-?\d+", value.arguments) else None
        case "parameter":
            return given.get(int(value.arguments))
        case "get-tuple-element":
            return _element(module, where, where.inputs(value)[0], int(value.attribute("index") or 0), given)
        case "add" | "subtract":
            left, right = (_linear(module, where, operand, given) for operand in where.inputs(value))
            sign = 1 if value.opcode == "add" else -1
            if not left or not right or None not in (left[0], right[0]) or (sign < 0 and right[0] is not None):
                return None
            return (right[0] if left[0] is None else left[0], left[1] + sign * right[1])
        case "fusion" | "call":
            inside = module.computations[value.called[0]]
            return _linear(module, inside, inside.root, _inputs(module, where, value, given))
    return None


def _inputs(module: Module, where: Computation, value: Instruction, given: Given) -> Given:
    return {number: _linear(module, where, operand, given) for number, operand in enumerate(where.inputs(value))}


def _source(where: Computation, value: Instruction) -> Instruction:
    """Return the original of a value: follow copies and tuples back."""
    while True:
        if value.opcode in COPIES:
            value = where.inputs(value)[0]
        elif (
            value.opcode == "get-tuple-element" and (whole := _source(where, where.inputs(value)[0])).opcode == "tuple"
        ):
            value = where.named[whole.operands[int(value.attribute("index") or 0)]]
        else:
            return value


def _count(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction in ("GT", "GE") or (direction == "NE" and step < 0):
        start, limit, step = -start, -limit, -step
    distance = limit - start + (direction in ("LE", "GE"))
    if distance <= 0:
        return 0  # the condition fails at once
    return ceil(distance / step) if step > 0 else None
