"""Holds the traffic of a compiled program against what the plan says of it.

Every collective that was found is set off against planned ones, byte for byte, in rounds: first on the same mesh axes
at the same line, then at other lines (the compiler combines collectives and gives them the line of one), then on axes
that overlap; in each round first the same kind, then other forms of the same thing (`FORMS`), which few may take at
another line. What a form costs more than what was planned is unplanned, and so is what finds nothing in the plan; what
is left of the plan is missing.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.sharding.hlo.collectives import KINDS

NEGLIGIBLE = 5e-3  # of all bytes: less is no finding
WIDENED = "XLA:CPU sends 16-bit numbers as 32-bit ones"


@shown
@dataclass(frozen=True)
class Found:
    """A collective of the compiled program.

    Attributes:
        kind: what moves.
        axes: the mesh axes that its groups span; empty where they are no mesh axes'.
        payload_bytes: of one run: of an all-gather what it gives, of others what each device puts in.
        wire_bytes: bytes that leave each device in one run.
        trips: runs a step.
        line: the user's, `file.py:12 (function)`.
        overlapped: whether it runs beside computation.
        wire_us: how long all its runs are on the wire.
        exposed_us: how long they are waited for.
        op_name: where in the traced program it comes from.
        devices: the groups, where they are no mesh axes'.
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
        """Bytes that leave each device in a step."""
        return self.wire_bytes * self.trips


@shown
@dataclass(frozen=True)
class Unplanned:
    """Traffic beyond what the plan says: bytes that leave each device in a step, their time on the wire, and why."""

    kind: str
    axes: tuple[str, ...]
    line: str
    bytes: float
    us: float
    cause: str


@shown
@dataclass(frozen=True)
class Missing:
    """Traffic that the plan says and the compiled program does not have."""

    kind: str
    axes: tuple[str, ...]
    line: str
    bytes: float


@dataclass(frozen=True)
class Form:
    """How one kind of collective stands for another.

    Attributes:
        share: bytes of that for each of its own, on n devices.
        loss: what is lost by it.
        far: whether it may stand at another line: the compiler combines sums, and takes them apart.
    """

    share: Callable[[int], float]
    loss: str = ""
    far: bool = False


def _all(n: int) -> float:
    return 1.0


def _half(n: int) -> float:
    return 0.5


# (found, planned) on groups of n devices.
FORMS: Mapping[tuple[str, str], Form] = {
    ("all-reduce", "reduce-scatter"): Form(_half, "reduced in full where a part would do", far=True),
    ("all-reduce", "all-gather"): Form(_half, "gathered by summing with zeros"),
    ("all-gather", "all-to-all"): Form(lambda n: 1 / n, "gathered whole where an exchange of parts would do"),
    ("reduce-scatter", "all-reduce"): Form(_all, far=True),  # the two halves of an all-reduce
    ("all-gather", "all-reduce"): Form(_all),
    ("all-to-all", "all-gather"): Form(_all),
    ("all-to-all", "reduce-scatter"): Form(_all),
    ("ragged-all-to-all", "all-to-all"): Form(_all),
    **{("collective-permute", k): Form(_all) for k in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")},
}
SAME = {(kind, kind): Form(_all, far=True) for kind in KINDS}


@dataclass(eq=False)
class Side:
    """One entry of either side and its bytes that are not set off yet."""

    kind: str
    axes: frozenset[str] | None
    place: str
    line: str
    left: float
    found: Found | None = None


@dataclass(frozen=True)
class Context:
    """What helps to say why something moves.

    Attributes:
        sizes: mesh axis -> size.
        unknown: line -> the operator without a rule that stands there.
        made_whole: names in the traced program at which the partitioner remarks a full rematerialization.
    """

    sizes: Mapping[str, int]
    unknown: Mapping[str, str] = field(default_factory=dict)
    made_whole: Collection[str] = ()


def compare(
    found: Sequence[Found], planned: Iterable[tuple[str, str, float, str]], context: Context
) -> tuple[tuple[Unplanned, ...], tuple[Missing, ...]]:
    """What the compiled program moves beyond the plan, and what it does not move.

    Args:
        found: the program's collectives.
        planned: (kind, mesh axes, bytes a step, line), as in `Plan.traffic`.
        context: what helps to say why.
    """
    ours = [Side(kind, _real(axes.split(), context), place(line), line, size) for kind, axes, size, line in planned]
    theirs = [Side(f.kind, _axes(f, context), place(f.line), f.line, f.step_bytes, f) for f in found]
    total = max(sum(s.left for s in ours), sum(s.left for s in theirs))
    lost: dict[tuple[Side, str], float] = defaultdict(float)
    for side in theirs:
        if side.found and side.found.widened:
            side.left /= 2
            lost[side, WIDENED] += side.left
    for near in ROUNDS:
        for (kind, planned_kind), form in (*SAME.items(), *FORMS.items()):
            wanting = [s for s in ours if s.kind == planned_kind and s.left > 0]
            for their in (s for s in theirs if s.kind == kind):
                for our in wanting:
                    at_hand = form.far or their.place == our.place
                    if their.left > 0 and our.left > 0 and at_hand and near(their, our):
                        _set_off(their, our, form, lost, context)
    for side in theirs:
        if side.left > 0:
            lost[side, _cause(side, ours, context)] += side.left
    return _unplanned(lost, total), tuple(
        Missing(s.kind, tuple(sorted(s.axes or ())), s.line, s.left) for s in ours if s.left > NEGLIGIBLE * total
    )


def _set_off(their: Side, our: Side, form: Form, lost: dict[tuple[Side, str], float], context: Context) -> None:
    """Takes from both sides what they have in common."""
    n = math.prod(context.sizes[a] for a in their.axes) if their.axes else math.prod(context.sizes.values())
    share = form.share(n)
    taken = min(their.left, our.left / share)
    their.left -= taken
    our.left -= taken * share
    if our.left < 1e-6:
        our.left = 0.0
    if form.loss:
        lost[their, form.loss] += taken * (1 - share)


def _overlap(their: Side, our: Side) -> bool:
    return their.axes is None or our.axes is None or bool(their.axes & our.axes)


# What stands in a collective's name where no operator of the program does.
PLACES = {
    "call_exported": "the border of the program",
    "sharding_constraint": "a layout that the plan asks for",
}
ROUNDS: Sequence[Callable[[Side, Side], bool]] = (
    lambda t, o: t.axes == o.axes and t.place == o.place,
    lambda t, o: t.axes == o.axes,
    lambda t, o: _overlap(t, o) and t.place == o.place,
    _overlap,
)


def _unplanned(lost: Mapping[tuple[Side, str], float], total: float) -> tuple[Unplanned, ...]:
    """Findings with the same kind, axes, line and cause together, the largest first."""
    bytes_of: dict[tuple[str, tuple[str, ...], str, str], float] = defaultdict(float)
    us_of: dict[tuple[str, tuple[str, ...], str, str], float] = defaultdict(float)
    for (side, cause), size in lost.items():
        f = side.found
        assert f is not None
        bytes_of[f.kind, f.axes, f.line, cause] += size
        us_of[f.kind, f.axes, f.line, cause] += f.wire_us * size / f.step_bytes
    all_found = (Unplanned(*key[:3], size, us_of[key], key[3]) for key, size in bytes_of.items())
    return tuple(sorted((u for u in all_found if u.bytes > NEGLIGIBLE * total), key=lambda u: -u.bytes))


def _cause(side: Side, ours: Sequence[Side], context: Context) -> str:
    """Why something moves that the plan does not have, as far as can be told."""
    f = side.found
    assert f is not None
    word = re.search(r"([\w.\-]+)\W*$", f.op_name)  # of combined ones the last: `a/b/mul:a/dot_general)`
    what = PLACES.get(word[1], word[1]) if word else "an operator without a name"
    if side.place in context.unknown:
        return f"no rule for '{context.unknown[side.place]}': the partitioner makes its operands whole"
    if f.op_name and f.op_name in context.made_whole:
        return f"involuntary full rematerialization at {what}"
    here = [o for o in ours if o.kind == side.kind and o.axes == side.axes and o.place == side.place]
    if here:
        return f"more than the {side.kind} that is planned on this line, at {what}"
    if not f.axes:
        return f"over devices that are no mesh axis's, at {what}"
    return {
        "all-gather": f"the partitioner makes an array whole at {what}",
        "all-reduce": f"a sum over devices that is not planned, at {what}",
        "reduce-scatter": f"a sum over devices that is not planned, at {what}",
        "all-to-all": f"the partitioner moves a cut from one dimension to another at {what}",
        "collective-permute": f"the partitioner sends pieces to neighbours at {what}",
    }.get(f.kind, f"not planned, at {what}")


def _axes(found: Found, context: Context) -> frozenset[str] | None:
    return _real(found.axes, context) if found.axes else None


def _real(axes: Iterable[str], context: Context) -> frozenset[str]:
    """Mesh axes along which there is more than one device."""
    return frozenset(a for a in axes if context.sizes.get(a, 1) > 1)


def place(line: str) -> str:
    """`file.py:12` of a source line, without column and function; the line itself where it is none."""
    found = re.match(r"(.*?:\d+)(?::\d+)?(?: \(.*\))?$", line)
    return found[1] if found else line
