"""Pairs the forward and backward scans of a program, lists what crosses between them, and checks that it is sound.

residual   a result that the body of the forward scan stacks, and of which the backward scan takes slices
group      equations that a frame repeats, such as the layers of an unrolled model
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.errors import PlanError
from autoshard.sharding.rewrite.values import Frame, Graph, Value, graph_of


@shown
@dataclass(frozen=True, eq=False)
class Residual:
    """A value that crosses: number `made` of the stacked results, number `taken` of the stacked operands."""

    value: Value
    made: int
    taken: int


@shown
@dataclass(frozen=True, eq=False)
class ScanPair:
    """A forward scan, the backward scan that takes its residuals, and the residuals."""

    forward: Frame
    backward: Frame
    residuals: tuple[Residual, ...]


def scan_of(frame: Frame) -> Any:
    """Return the equation of a scan's body."""
    assert frame.parent is not None
    return frame.parent.jaxpr.eqns[frame.path[-1]]


def scan_pairs(graph: Graph) -> Iterator[ScanPair]:
    """Yield the pairs of scans of a program."""
    for frame in graph.root.walk():
        scans = [child for child in frame.children.values() if child.kind == "scan"]
        for n, backward in enumerate(scans):
            for forward in scans[:n]:
                if not forward.is_backward and (found := _residuals(forward, backward)):
                    yield ScanPair(forward, backward, tuple(found))


def _residuals(forward: Frame, backward: Frame) -> list[Residual]:
    made, taken = scan_of(forward), scan_of(backward)
    n_carry = _compat.scan_arity(made.params)[1]
    first = sum(_compat.scan_arity(taken.params))
    stacked = {var: k for k, var in enumerate(made.outvars[n_carry:])}
    return [
        Residual(backward.values[backward.jaxpr.invars[first + k]], stacked[atom], k)
        for k, atom in enumerate(taken.invars[first:])
        if not isinstance(atom, _compat.Literal) and atom in stacked
    ]


def equal_groups(frame: Frame) -> list[tuple[int, int, int]]:
    """Return (first equation, equations of a group, groups) where a frame repeats at least two equations."""
    kinds = [(e.primitive.name, *(str(v.aval) for v in e.outvars)) for e in frame.jaxpr.eqns]
    found, start = [], 0
    while start < len(kinds):
        best = (0, 0)
        for size in range(2, (len(kinds) - start) // 2 + 1):
            count = 1
            group = kinds[start : start + size]
            while kinds[start + count * size : start + (count + 1) * size] == group:
                count += 1
            if count > 1 and count * size > best[0] * best[1]:
                best = (size, count)
        if best[0]:
            found.append((start, *best))
        start += max(best[0] * best[1], 1)
    return found


def check_program(closed: Any) -> None:
    """Check a program: types, that each variable is made once and before its use, and the pairing of residuals.

    Raises:
        PlanError: the program is not well formed.
    """
    try:
        _compat.check_jaxpr(closed)
    except Exception as error:  # JAX's checker documents no error type; each one means that our rewrite is wrong
        raise PlanError(f"the rewritten program is not well formed: {error}") from error
    for pair in scan_pairs(graph_of(closed)):
        made, taken = scan_of(pair.forward), scan_of(pair.backward)
        body = pair.forward.jaxpr.outvars[_compat.scan_arity(made.params)[1] :]
        for residual in pair.residuals:
            one = pair.forward.values.get(body[residual.made])
            if made.params["length"] != taken.params["length"] or (one is not None and one is not residual.value):
                raise PlanError(
                    f"the rewritten program is not well formed: result {residual.made} of the forward scan is not what "
                    f"the backward scan takes as operand {residual.taken}"
                )
