"""Plans that people ask for by name or table, and the known plans that the search starts from.

Words of a request, `fsdp:8 tp:4 seq`:

    dp:N      the batch over N devices, state whole on each
    zero1:N   dp, the optimizer's state in N parts          fsdp:N   dp, parameters too in N parts (ZeRO-3)
    tp:N      heads, ffn, vocabulary, ... over N devices     seq      with tp: the sequence between them too
    ep:N      experts over N devices, elsewhere the batch    cp:N     the sequence over N devices
    state     parameters and optimizer in as many parts as there are devices, whatever the words say
    A+NAME    the mesh axis A cuts the logical axis NAME, too, or stores NAME = parameter, optimizer; A-NAME: not

A table names logical axes for each mesh axis instead: `{"tp": ["heads", "ffn"], "fsdp": ["batch"]}`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard._typed import fit, shortly
from autoshard.errors import PlanRequestError
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import STATE, Role, Roles
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_edits import Change, changed, state_parts, uses_of

KINDS = (
    "dp",
    "zero1",
    "fsdp",
    "cp",
    "ep",
    "tp",
)  # outermost first: tp talks most, so it gets the nearest devices
FLAGS = ("seq", "state")


@dataclass(frozen=True)
class Request:
    """A plan by its words: the mesh axes, what each is for, and flags.

    Attributes:
        sizes: mesh axis -> devices.
        kinds: mesh axis -> the kind of parallelism it serves.
        flags: `seq`, `state` (state in as many parts as there are devices).
        changes: made to what the other words mean, in order.
        fixed_mesh: the axes are given and must not be split.
    """

    sizes: Mapping[str, int]
    kinds: Mapping[str, str]
    flags: frozenset[str] = frozenset()
    fixed_mesh: bool = False
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        words = [f"{k}:{n}" if a == (k := self.kinds[a]) else f"{a}={k}:{n}" for a, n in self.sizes.items()]
        return " ".join([*words, *sorted(self.flags), *map(str, self.changes)])

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return math.prod(self.sizes.values())


def request(sizes: Mapping[str, int], *flags: str) -> Request:
    """A request whose mesh axes are called after what they are for."""
    return Request(sizes, {k: k for k in sizes}, frozenset(flags))


def parse_request(text: str) -> Request:
    """Reads `"fsdp:8 tp:4 seq"`; with other names for the mesh axes, `"data=fsdp:8 model=tp:4"`.

    Raises:
        PlanRequestError: a word is unknown or a size is missing.
    """
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    flags: set[str] = set()
    changes: list[Change] = []
    words = text.replace(",", " ").split()
    named = "|".join([*(re.escape(word.rpartition("=")[0]) for word in words if "=" in word), r"\w+?"])
    change_of = re.compile(rf"((?:{named})(?:_\d+)?)([+-])(.+)")
    for word in words:
        if word in FLAGS:
            flags.add(word)
            continue
        if "=" not in word and (found := change_of.fullmatch(word)):
            changes.append(Change(found[1], found[2] == "+", found[3]))
            continue
        name, equals, rest = word.rpartition("=")
        kind, _, size = rest.partition(":")
        axis = name if equals else kind
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, [*KINDS, *FLAGS], n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise PlanRequestError(
                f"plan '{text}': unknown word '{word}'; known: {', '.join(f'{k}:N' for k in KINDS)}, "
                f"{', '.join(FLAGS)}.{hint}"
            )
        if not re.fullmatch(r"[1-9]\d*", size):
            raise PlanRequestError(f"plan '{text}': '{word}' needs a number of devices, such as {kind}:8")
        if axis in sizes:
            raise PlanRequestError(f"plan '{text}': '{axis}' stands twice")
        sizes[axis], kinds[axis] = int(size), kind
    if not sizes:
        raise PlanRequestError(f"plan '{text}' names no parallelism; such as 'fsdp:8' or 'dp:2 tp:4 seq'")
    ordered = (
        sorted(sizes, key=lambda a: KINDS.index(kinds[a])) if all(a == k for a, k in kinds.items()) else list(sizes)
    )
    fixed = any(a != k for a, k in kinds.items())
    return Request({a: sizes[a] for a in ordered}, kinds, frozenset(flags), fixed, tuple(changes))


def is_request(words: str) -> bool:
    """Whether these are words that `parse_request` reads."""
    try:
        return bool(parse_request(words))
    except PlanRequestError:
        return False


def may_name(axis: str, mesh: Mapping[str, int] | None, words: str | None = None) -> bool:
    """Whether the mesh of a plan may have an axis of this name.

    Args:
        axis: the name.
        mesh: the mesh if it is given; else axes are called after what they are for, and parts of one are numbered.
        words: the plan that is asked for, which may name its axes itself.
    """
    if mesh is not None:
        return axis in mesh
    named = parse_request(words).sizes if words else {}
    return axis in named or re.sub(r"_[1-9]\d*$", "", axis) in KINDS


def classes_for(kind: str, roles: Roles, flags: frozenset[str]) -> tuple[int, ...]:
    """The logical axes that a kind of parallelism shards, in order of preference."""
    if kind in ("dp", "zero1", "fsdp"):
        return () if roles.batch is None else (roles.batch,)
    if kind == "cp":
        return roles.context
    if kind == "ep":
        return (*roles.experts, roles.batch) if roles.experts and roles.batch is not None else roles.experts
    listed = tuple(c for c in roles.parallel if c not in roles.experts)
    return listed + (roles.sequence if "seq" in flags else ())


def storage_for(owners: Mapping[str, str], everything: bool) -> dict[Role, tuple[str, ...]]:
    """Which mesh axes store which state; `owners` says which kind of parallelism each mesh axis serves."""
    if everything:
        return {role: tuple(owners) for role in STATE}
    full = tuple(a for a, kind in owners.items() if kind == "fsdp")
    moments = tuple(a for a, kind in owners.items() if kind in ("fsdp", "zero1"))
    stored: dict[Role, tuple[str, ...]] = {"parameter": full, "optimizer": moments}
    return {role: axes for role, axes in stored.items() if axes}


def layout_of(axes: LogicalAxes, roles: Roles, asked: Request) -> Layout:
    """The layout that a request means for a program.

    Unless the mesh is fixed, a mesh axis is split where one of its logical axes is divisible only by a part of it (two
    key-value heads over four devices): `tp` becomes `tp` and `tp_1`. Not where others that are cut first stand beside
    it in every value and leave nothing of the mesh axis to it (eight key-value heads over eight devices).
    """
    mesh: dict[str, int] = {}
    owners: dict[str, str] = {}
    table: dict[str, tuple[int, ...]] = {}
    for axis, size in asked.sizes.items():
        kind = asked.kinds[axis]
        classes = classes_for(kind, roles, asked.flags)
        parts = [size] if asked.fixed_mesh else state_parts(size, uses_of(axes, classes, size))
        for i, part in enumerate(parts):
            name = f"{axis}_{i}" if i else axis
            mesh[name], owners[name], table[name] = part, kind, classes
    layout = Layout(axes, roles, mesh, table, storage_for(owners, "state" in asked.flags))
    for change in asked.changes:
        layout = changed(layout, change)
    return layout


@shown
@dataclass(frozen=True)
class Table:
    """A plan by its table: mesh axis -> names of logical axes in order; sizes where the mesh gives them."""

    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, asked: Mapping[str, str | Sequence[str]]) -> Table:
        """The table that a user wrote, in which one name may stand alone.

        Raises:
            PlanRequestError: it is empty, or something in it is no name.
        """
        read = {k: (v,) if isinstance(v, str) else v for k, v in asked.items()}
        columns = fit(read, Mapping[str, tuple[str, ...]], "plan", problems := [])
        if not problems and not (columns and all(columns)):
            problems.append(f"plan is {shortly(asked)}, it must name mesh axes")
        if problems:
            raise PlanRequestError(
                f"{'; '.join(problems)}: give the logical axes of each mesh axis, such as "
                "{'tp': ['heads', 'ffn'], 'fsdp': ['batch']}"
            )
        return cls(columns)

    def resolve(self, axes: LogicalAxes, roles: Roles, mesh: Mapping[str, int]) -> Layout:
        """The layout that this table means on a mesh.

        Raises:
            PlanRequestError: it names an axis that the mesh or the program does not have.
        """
        by_name: dict[str, list[int]] = {}
        for c, name in axes.names.items():
            by_name.setdefault(name, []).append(c)
            stem, _, number = name.rpartition("_")
            if stem and number.isdigit():
                by_name.setdefault(stem, []).append(c)
        wrong = [a for a in self.columns if a not in mesh]
        wrong_names = sorted({n for names in self.columns.values() for n in names if n not in by_name})
        complaints = []
        if wrong:
            complaints.append(
                f"the mesh has no axis {', '.join(map(repr, wrong))}, it has {dict(mesh)}: name the table's columns "
                f"after the mesh's axes, or give mesh= with axes {', '.join(self.columns)}"
            )
        if wrong_names:
            complaints.append(
                f"the program has no logical axis {', '.join(map(repr, wrong_names))}; it has "
                f"{', '.join(sorted(by_name))}"
            )
        if complaints:
            raise PlanRequestError(f"plan: {'. '.join(complaints)}")
        table = {a: tuple(c for n in self.columns.get(a, ()) for c in by_name[n]) for a in mesh}
        shards_state = tuple(a for a in mesh if a.startswith(("fsdp", "zero3")))
        return Layout(axes, roles, mesh, table, {role: shards_state for role in STATE} if shards_state else {})
