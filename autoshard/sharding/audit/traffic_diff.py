"""Compares the traffic of a compiled program with the traffic of its plan.

Compiled collectives are matched with planned ones, byte for byte, in rounds (`ROUNDS`): first on the same mesh axes at
the same line, then at other lines (the compiler combines collectives and gives them the line of one of them), then on
mesh axes that overlap. Each round matches collectives of the same kind first, then those of other kinds that do the
same (`SUBSTITUTES`); only some of these match across lines. Compiled bytes without a match, and the bytes by which a
substitute exceeds the planned ones, are unplanned. Planned bytes without a match are missing.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.sharding.audit.constants import NEGLIGIBLE_SHARE, ROUNDING_BYTES
from autoshard.sharding.hlo.collectives import KINDS

WIDENED = "XLA:CPU sends 16-bit numbers as 32-bit numbers"


@shown
@dataclass(frozen=True)
class CompiledCollective:
    """A collective of the compiled program.

    Attributes:
        kind: the kind, such as `all-gather`.
        axes: the mesh axes that its groups span; empty if the groups are not those of mesh axes.
        payload_bytes: bytes of one run: of the result of an all-gather, else of each device's operands.
        wire_bytes: bytes that each device sends in one run.
        trips: number of runs per step.
        line: the user's source line, `file.py:12 (function)`.
        overlapped: whether compute hides a part of it.
        wire_us: microseconds of all its runs.
        exposed_us: the part of `wire_us` that compute does not hide.
        op_name: its origin in the traced program.
        devices: the groups of devices, if they are not those of mesh axes.
        widened: whether it sends 16-bit numbers as 32-bit numbers.
    """

    kind: str
    axes: tuple[str, ...]
    payload_bytes: float
    wire_bytes: float
    trips: float
    line: str
    overlapped: bool
    wire_us: float
    exposed_us: float
    op_name: str = ""
    devices: str = ""
    widened: bool = field(default=False, repr=False)

    @property
    def step_bytes(self) -> float:
        """Bytes that each device sends per step."""
        return self.wire_bytes * self.trips


@shown
@dataclass(frozen=True)
class Unplanned:
    """Traffic that exceeds the plan's: bytes that each device sends per step, their microseconds, and the cause."""

    kind: str
    axes: tuple[str, ...]
    line: str
    bytes: float
    us: float
    cause: str


@shown
@dataclass(frozen=True)
class Missing:
    """Planned traffic that the compiled program does not have, in bytes that each device sends per step."""

    kind: str
    axes: tuple[str, ...]
    line: str
    bytes: float


@shown
@dataclass(frozen=True)
class Substitute:
    """How a compiled collective of one kind replaces a planned one of another kind.

    Attributes:
        share: bytes of the planned collective per byte of the compiled one, in groups of n devices.
        loss: why it sends more bytes; empty if it does not.
        any_line: whether they match across lines. The compiler combines and splits reductions.
    """

    share: Callable[[int], float]
    loss: str = ""
    any_line: bool = False


def _all(n: int) -> float:
    return 1.0


def _half(n: int) -> float:
    return 0.5


# (compiled kind, planned kind) -> how the first replaces the second.
SUBSTITUTES: Mapping[tuple[str, str], Substitute] = {
    ("all-reduce", "reduce-scatter"): Substitute(_half, "an all-reduce instead of a reduce-scatter", any_line=True),
    ("all-reduce", "all-gather"): Substitute(_half, "gathered by a sum with zeros"),
    ("all-gather", "all-to-all"): Substitute(lambda n: 1 / n, "an all-gather instead of an all-to-all"),
    ("reduce-scatter", "all-reduce"): Substitute(_all, any_line=True),  # the two halves of an all-reduce
    ("all-gather", "all-reduce"): Substitute(_all),
    ("all-to-all", "all-gather"): Substitute(_all),
    ("all-to-all", "reduce-scatter"): Substitute(_all),
    ("ragged-all-to-all", "all-to-all"): Substitute(_all),
    **{
        ("collective-permute", kind): Substitute(_all)
        for kind in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")
    },
}
SAME = {(kind, kind): Substitute(_all, any_line=True) for kind in KINDS}


@shown
@dataclass(eq=False)
class Traffic:
    """A compiled or planned collective, and its bytes that are not matched yet."""

    kind: str
    axes: frozenset[str] | None
    place: str
    line: str
    left: float
    compiled: CompiledCollective | None = None


@shown
@dataclass(frozen=True)
class Context:
    """What the causes of unplanned traffic are derived from.

    Attributes:
        sizes: mesh axis -> size.
        unknown: `place` of a line -> the operator without a rule on that line.
        rematerialized: names of operators in the traced program that the partitioner fully rematerializes.
    """

    sizes: Mapping[str, int]
    unknown: Mapping[str, str] = field(default_factory=dict)
    rematerialized: Collection[str] = ()


def compare(
    compiled: Sequence[CompiledCollective], planned: Iterable[tuple[str, str, float, str]], context: Context
) -> tuple[tuple[Unplanned, ...], tuple[Missing, ...]]:
    """Return the unplanned and the missing traffic of a compiled program.

    Args:
        compiled: the program's collectives.
        planned: (kind, mesh axes, bytes per step, line), as in `ShardingPlan.traffic`.
        context: what the causes are derived from.
    """
    planned_traffic = [
        Traffic(kind, _real(axes.split(), context), file_and_line(line), line, size)
        for kind, axes, size, line in planned
    ]
    compiled_traffic = [
        Traffic(c.kind, _axes(c, context), file_and_line(c.line), c.line, c.step_bytes, c) for c in compiled
    ]
    total = max(sum(t.left for t in planned_traffic), sum(t.left for t in compiled_traffic))
    excess: dict[tuple[Traffic, str], float] = defaultdict(float)
    for actual in compiled_traffic:
        if actual.compiled and actual.compiled.widened:
            actual.left /= 2
            excess[actual, WIDENED] += actual.left
    for matches in ROUNDS:
        for (kind, planned_kind), substitute in (*SAME.items(), *SUBSTITUTES.items()):
            candidates = [t for t in planned_traffic if t.kind == planned_kind and t.left > 0]
            for actual in (t for t in compiled_traffic if t.kind == kind):
                for expected in candidates:
                    allowed = substitute.any_line or actual.place == expected.place
                    if actual.left > 0 and expected.left > 0 and allowed and matches(actual, expected):
                        _match(actual, expected, substitute, excess, context)
    for actual in compiled_traffic:
        if actual.left > 0:
            excess[actual, _cause(actual, planned_traffic, context)] += actual.left
    return _unplanned(excess, total), tuple(
        Missing(t.kind, tuple(sorted(t.axes or ())), t.line, t.left)
        for t in planned_traffic
        if t.left > NEGLIGIBLE_SHARE * total
    )


def _match(
    actual: Traffic,
    expected: Traffic,
    substitute: Substitute,
    excess: dict[tuple[Traffic, str], float],
    context: Context,
) -> None:
    """Subtract the matching bytes from both, and record the bytes by which a substitute exceeds the planned ones."""
    n = math.prod(context.sizes[a] for a in actual.axes) if actual.axes else math.prod(context.sizes.values())
    share = substitute.share(n)
    matched = min(actual.left, expected.left / share)
    actual.left -= matched
    expected.left -= matched * share
    if expected.left < ROUNDING_BYTES:
        expected.left = 0.0
    if substitute.loss:
        excess[actual, substitute.loss] += matched * (1 - share)


def _overlap(actual: Traffic, expected: Traffic) -> bool:
    return actual.axes is None or expected.axes is None or bool(actual.axes & expected.axes)


# Descriptions of the names that collectives have if they come from no operator of the program.
PLACES = {
    "call_exported": "the boundary of the program",
    "sharding_constraint": "a sharding constraint of the plan",
}
ROUNDS: Sequence[Callable[[Traffic, Traffic], bool]] = (
    lambda actual, expected: actual.axes == expected.axes and actual.place == expected.place,
    lambda actual, expected: actual.axes == expected.axes,
    lambda actual, expected: _overlap(actual, expected) and actual.place == expected.place,
    _overlap,
)


def _unplanned(excess: Mapping[tuple[Traffic, str], float], total: float) -> tuple[Unplanned, ...]:
    """Combine excess traffic of the same kind, axes, line and cause, in descending order of bytes."""
    bytes_of: dict[tuple[str, tuple[str, ...], str, str], float] = defaultdict(float)
    us_of: dict[tuple[str, tuple[str, ...], str, str], float] = defaultdict(float)
    for (traffic, cause), size in excess.items():
        c = traffic.compiled
        assert c is not None
        bytes_of[c.kind, c.axes, c.line, cause] += size
        us_of[c.kind, c.axes, c.line, cause] += c.wire_us * size / c.step_bytes
    combined = (Unplanned(*key[:3], size, us_of[key], key[3]) for key, size in bytes_of.items())
    return tuple(sorted((u for u in combined if u.bytes > NEGLIGIBLE_SHARE * total), key=lambda u: -u.bytes))


def _cause(traffic: Traffic, planned_traffic: Sequence[Traffic], context: Context) -> str:
    """Describe why the program has traffic that the plan does not have, as far as it can be determined."""
    c = traffic.compiled
    assert c is not None
    word = re.search(r"([\w.\-]+)\W*$", c.op_name)  # the last name of combined ones: `a/b/mul:a/dot_general)`
    what = PLACES.get(word[1], word[1]) if word else "an operator without a name"
    if traffic.place in context.unknown:
        return f"no rule for '{context.unknown[traffic.place]}': the partitioner replicates its operands"
    if c.op_name and c.op_name in context.rematerialized:
        return f"involuntary full rematerialization at {what}"
    if any((t.kind, t.axes, t.place) == (traffic.kind, traffic.axes, traffic.place) for t in planned_traffic):
        return f"more than the planned {traffic.kind} on this line, at {what}"
    if not c.axes:
        return f"groups of devices that are not those of mesh axes, at {what}"
    return {
        "all-gather": f"the partitioner replicates an array at {what}",
        "all-reduce": f"a reduction over devices that is not planned, at {what}",
        "reduce-scatter": f"a reduction over devices that is not planned, at {what}",
        "all-to-all": f"the partitioner moves a sharding from one dimension to another at {what}",
        "collective-permute": f"the partitioner sends shards to other devices at {what}",
    }.get(c.kind, f"not planned, at {what}")


def _axes(collective: CompiledCollective, context: Context) -> frozenset[str] | None:
    return _real(collective.axes, context) if collective.axes else None


def _real(axes: Iterable[str], context: Context) -> frozenset[str]:
    """The mesh axes that have more than one device."""
    return frozenset(a for a in axes if context.sizes.get(a, 1) > 1)


def file_and_line(line: str) -> str:
    """`file.py:12` of a source line, without column and function; other texts unchanged."""
    match = re.match(r"(.*?:\d+)(?::\d+)?(?: \(.*\))?$", line)
    return match[1] if match else line
