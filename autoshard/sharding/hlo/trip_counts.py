"""The trip counts of a compiled program's loops.

XLA for GPU and CPU prints them (`known_trip_count`). For TPU they are derived from the loop: its condition compares an
element of the loop's state with a limit, the body adds a step to that element, and the element starts with a number:

    trips = ceil((limit - start) / step)

The comparison, the limit, the step and the start are found by evaluating scalars. A scalar is a number, or an element
of the enclosing loop's state plus a number, or unknown. An element that a loop's body does not change has the value
that it had before the loop.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from autoshard.sharding.hlo.parser import Computation, Instruction, Program

Path = tuple[int, ...]  # indices of an element of nested tuples
# A number (the path is None), or the element of the loop's state at a path plus a number; None if unknown.
Scalar = tuple[Path | None, int] | None
Given = Callable[[int, Path], Scalar]  # index of a computation's parameter, path in it -> the scalar there
COPIES = ("bitcast", "convert", "copy", "copy-start", "copy-done", "opt-barrier", "optimization-barrier", "reshape")
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}


class Loops:
    """The trip counts of a program's loops."""

    def __init__(self, program: Program):
        self.program = program
        # Name of a loop's body -> the computation with the loop, and the loop.
        self.enclosing_loops = {
            i.attribute("body"): (computation, i)
            for computation in program.computations.values()
            for i in computation.instructions
            if i.opcode == "while"
        }
        self.trips = lru_cache(maxsize=None)(self._trips)

    def _trips(self, computation: Computation, loop: Instruction) -> int | None:
        """The number of iterations of a `while` of a computation; None if it is unknown."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        return self._derived_trip_count(computation, loop)

    def _derived_trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        condition = self.program.computations[loop.attribute("condition")]
        compared = self._comparison(condition, condition.root, state)
        if compared is None:
            return None
        counter, direction, limit = compared
        start, step, end = self.before(computation, loop, counter), self.step(loop, counter), limit
        if end[0] is not None:  # the limit is an element of the state too
            first = self.before(computation, loop, end)
            end = first if first is not None and self.step(loop, end) == 0 else None
        if start is None or step is None or end is None:
            return None
        return trip_count(start[1], end[1], step, direction)

    def _comparison(
        self, computation: Computation, root: Instruction, given: Given
    ) -> tuple[tuple[Path, int], str, tuple[Path | None, int]] | None:
        """The comparison under which a loop continues: an element of the state, the direction, the limit."""
        if root.opcode in ("fusion", "call"):
            inner = self.program.computations[root.called[0]]
            return self._comparison(inner, inner.root, self._arguments(computation, root, given))
        if root.opcode != "compare":
            return None
        left, right = (self.scalar(computation, i, (), given) for i in computation.operands_of(root))
        direction = root.attribute("direction")
        if left and left[0] is None:
            left, right, direction = right, left, SWAPPED[direction]
        if left is None or right is None or left[0] is None:
            return None
        return (left[0], left[1]), direction, right

    def step(self, loop: Instruction, element: tuple[Path | None, int]) -> int | None:
        """The number that a loop's body adds to an element of its state; None if unknown."""
        path = element[0]
        body = self.program.computations[loop.attribute("body")]
        after = self.scalar(body, body.root, path or (), state)
        return after[1] if after and path is not None and after[0] == path else None

    def before(self, computation: Computation, loop: Instruction, element: tuple[Path | None, int]) -> Scalar:
        """The initial value of an element of a loop's state, plus the number that is added to it."""
        path, added = element
        found = self.scalar(computation, computation.by_name[loop.operands[0]], path or (), self._outside(computation))
        return None if found is None or found[0] is not None else (None, found[1] + added)

    def _outside(self, computation: Computation) -> Given:
        """The elements of a loop body's parameter that are the same in every iteration."""

        def given(number: int, path: Path) -> Scalar:
            enclosing = self.enclosing_loops.get(computation.name)
            if enclosing is None or self.step(enclosing[1], (path, 0)) != 0:
                return None
            return self.before(*enclosing, (path, 0))

        return given

    def _arguments(self, computation: Computation, call: Instruction, given: Given) -> Given:
        """The values of a called computation's parameters."""
        operands = computation.operands_of(call)
        return lambda number, path: self.scalar(computation, operands[number], path, given)

    def scalar(self, computation: Computation, value: Instruction, path: Path, given: Given) -> Scalar:
        """The scalar at a path of a value."""
        operands = computation.operands_of(value)
        match value.opcode:
            case "parameter":
                return given(int(value.arguments), path)
            case "constant":
                return (None, int(value.arguments)) if re.fullmatch(r"-?\d+", value.arguments.strip()) else None
            case "get-tuple-element":
                return self.scalar(computation, operands[0], (value.index, *path), given)
            case "tuple":
                return self.scalar(computation, operands[path[0]], path[1:], given) if path else None
            case "add" | "subtract":
                left, right = (self.scalar(computation, i, path, given) for i in operands)
                return _sum(left, right, -1 if value.opcode == "subtract" else 1)
            case "fusion" | "call":
                inner = self.program.computations[value.called[0]]
                return self.scalar(inner, inner.root, path, self._arguments(computation, value, given))
            case "while":
                unchanged = bool(path) and self.step(value, (path, 0)) == 0
                return self.scalar(computation, operands[0], path, given) if unchanged else None
            case opcode if opcode in COPIES:
                return self.scalar(computation, operands[0], path, given)
        return None


def state(number: int, path: Path) -> Scalar:
    """The parameter of a loop's condition or body is the loop's state."""
    return path, 0


def _sum(left: Scalar, right: Scalar, sign: int) -> Scalar:
    if left is None or right is None or (right[0] is not None and (sign < 0 or left[0] is not None)):
        return None
    return (right[0] if left[0] is None else left[0]), left[1] + sign * right[1]


def trip_count(start: int, end: int, step: int, direction: str) -> int | None:
    """The number of iterations of a loop that runs while `start + n step` compares with `end`; None if it never ends.

    Args:
        start: initial value.
        end: limit.
        step: number that each iteration adds.
        direction: the comparison under which the loop continues, a key of `COMPARISONS`.
    """
    if not COMPARISONS[direction](start, end):
        return 0
    if direction == "EQ":
        return 1 if step else None
    if direction in ("GT", "GE") or (direction == "NE" and step < 0):
        start, end, step = -start, -end, -step
    distance = end - start + (direction in ("LE", "GE"))
    if step <= 0 or distance < 0 or (direction == "NE" and distance % step):
        return None
    return math.ceil(distance / step)
