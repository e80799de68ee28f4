"""Requested plans, by strategy or by table.

Words of a strategy, such as `fsdp:8 tp:4 seq`:

    pp:N      layers over N groups of devices, the stages of a pipeline
    dp:N      batch over N devices, state replicated. Edges and nodes of a graph count as rows of the batch. If the data
              has several batches, each is sharded over the N devices
    zero1:N   dp, and optimizer state over N devices
    fsdp:N    dp, and parameters and optimizer state over N devices (ZeRO-3)
    tp:N      heads, ffn, vocab, ... over N devices
    seq       with tp: tp also shards the sequence, in values where it shards nothing else
    cp:N      sequence over N devices. For attention, one of the next three is chosen
    gather:N  cp: each device gathers keys and values; under a causal mask devices exchange queries, to balance the work
    ulysses:N cp: inside attention, heads over N devices instead; the exchange is an all-to-all
    isp:N     ulysses, and parameters and optimizer state over the same N devices (intra-layer sequence parallelism)
    ring:N    cp: keys and values travel around a ring of N devices, beside the compute of attention
    ep:N      experts over N devices, and the batch where there are no experts. Masks that dispatch tokens of the whole
              batch have experts
    state     parameters and optimizer state over all devices
    A+NAME    mesh axis A also shards the logical axis NAME, or stores NAME (parameter, optimizer)
    A-NAME    mesh axis A does not shard or store NAME

Upper case is accepted too.

A table instead lists the logical axes of each mesh axis: `{"tp": ["heads", "ffn"], "fsdp": ["batch"]}`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autoshard._shown import shown
from autoshard._typed import convert, short_repr
from autoshard.errors import PlanRequestError
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import STATE, Role, Roles
from autoshard.sharding.layout.constants import MOST_KNOWN_REQUESTS
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_edits import Change, axis_parts, changed, usable_devices
from autoshard.sharding.layout.sequence_operators import usable_heads
from autoshard.sharding.layout.sequence_strategy import GATHER, RING, ULYSSES

# Outermost first: tp communicates most, so its devices are nearest. A ring is outside of Ulysses, so that a sequence is
# sharded over the ring first and each of its shards is whole after the all-to-all.
ISP = "isp"
KINDS = ("pp", "dp", "zero1", "fsdp", "cp", "gather", "ring", "ulysses", ISP, "ep", "tp")
CONTEXT = ("cp", "gather", "ring", "ulysses", ISP)  # kinds that shard sequences
OF_BATCH = ("dp", "zero1", "fsdp", "ep")  # kinds that shard the batch
STORING = ("fsdp", ISP)  # kinds that shard parameters and optimizer state
FLAGS = ("seq", "state")
SHARDS = {
    "pp": "the layers",
    **dict.fromkeys(("dp", "zero1", "fsdp"), "the batch"),
    **dict.fromkeys(CONTEXT, "sequences"),
    "ep": "experts",
    "tp": "heads, hidden units and vocabularies",
}
"""What each kind of parallelism shards, in messages."""
_ELSEWHERE = {"zero3": "fsdp", "zero": "fsdp", "ddp": "dp", "mp": "tp", "sp": "seq"}  # names in other libraries


@shown
@dataclass(frozen=True)
class Request:
    """A requested strategy.

    Attributes:
        sizes: mesh axis -> number of devices.
        kinds: mesh axis -> kind of parallelism.
        flags: `seq`, `state`.
        fixed_mesh: whether the mesh axes are given and must not be split.
        changes: changes to the layout that the other words mean, in order.
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
    def taking_heads(self) -> int:
        """The number of devices over which `tp` may shard heads."""
        return math.prod(n for a, n in self.sizes.items() if self.kinds[a] == "tp")

    @property
    def devices(self) -> int:
        """The number of devices that it needs."""
        return math.prod(self.sizes.values())


def request(sizes: Mapping[str, int], *flags: str) -> Request:
    """A request whose mesh axes are named after their kinds of parallelism."""
    return Request(sizes, {k: k for k in sizes}, frozenset(flags))


@lru_cache(maxsize=MOST_KNOWN_REQUESTS)  # a search parses the name of a candidate many times; only the text matters
def parse_request(text: str) -> Request:
    """Parse a strategy such as `"fsdp:8 tp:4 seq"`, or with names for the mesh axes, `"data=fsdp:8 model=tp:4"`.

    Raises:
        PlanRequestError: a word is unknown, a size is missing, or a mesh axis occurs twice.
    """
    if text.lstrip().startswith("{"):
        raise PlanRequestError("plan is the JSON of a plan, as text: pass Plan.from_json(text) instead")
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    flags: set[str] = set()
    changes: list[Change] = []
    words = text.replace(",", " ").split()
    named = [word.rpartition("=")[0] for word in words if "=" in word]
    axes = "|".join([*map(re.escape, named), r"\w+?"])
    change_of = re.compile(rf"((?:{axes})(?:_\d+)?)([+-])(.+)")
    for word in words:
        if word.lower() in FLAGS:
            flags.add(word.lower())
            continue
        if "=" not in word and (found := change_of.fullmatch(word)):
            axis = re.sub(r"_\d+$", "", found[1])
            is_kind = axis not in named and axis.lower() in KINDS
            changes.append(Change(found[1].lower() if is_kind else found[1], found[2] == "+", found[3]))
            continue
        name, equals, rest = word.rpartition("=")
        kind, _, size = rest.partition(":")
        kind = kind.lower()
        axis = name if equals else kind
        if kind not in KINDS:
            similar = difflib.get_close_matches(kind, [*KINDS, *FLAGS], n=1)
            near = [_ELSEWHERE[kind]] if kind in _ELSEWHERE else similar
            hint = f" Did you mean '{near[0]}{f':{size}' if size and near[0] in KINDS else ''}'?" if near else ""
            raise PlanRequestError(
                f"plan '{text}': unknown word '{word}'.{hint} The words are {', '.join(f'{k}:N' for k in KINDS)} "
                f"(for N devices), {', '.join(FLAGS)}"
            )
        if not re.fullmatch(r"[1-9]\d*", size):
            raise PlanRequestError(f"plan '{text}': '{word}' needs a number of devices, such as {kind}:8")
        if axis in sizes:
            raise PlanRequestError(f"plan '{text}': mesh axis '{axis}' occurs twice; give it once")
        sizes[axis], kinds[axis] = int(size), kind
    if {"ring"} < {*kinds.values()} & {"ring", "cp", "gather"}:
        other = next(k for k in kinds.values() if k in ("cp", "gather"))
        raise PlanRequestError(
            f"plan '{text}': 'ring' and '{other}' both say how keys reach all queries; keep one of them, and use "
            "'ulysses' for the other devices"
        )
    if not sizes:
        raise PlanRequestError(f"plan '{text}' names no parallelism; give for example 'fsdp:8' or 'dp:2 tp:4 seq'")
    ordered = (
        sorted(sizes, key=lambda a: KINDS.index(kinds[a])) if all(a == k for a, k in kinds.items()) else list(sizes)
    )
    fixed = any(a != k for a, k in kinds.items())
    return Request({a: sizes[a] for a in ordered}, kinds, frozenset(flags), fixed, tuple(changes))


def is_request(words: str) -> bool:
    """Whether `parse_request` accepts this text."""
    try:
        return bool(parse_request(words))
    except PlanRequestError:
        return False


def moves_keys(words: str) -> bool:
    """Whether a strategy says how attention runs over a sharded sequence.

    >>> moves_keys("fsdp:8 ring:4"), moves_keys("cp:4")
    (True, False)
    """
    return is_request(words) and any(way_of(kind) is not None for kind in parse_request(words).kinds.values())


def way_of(kind: str) -> str | None:
    """How attention runs over a sequence that this kind of parallelism shards; None if the kind does not say it."""
    return ULYSSES if kind == ISP else kind if kind in (GATHER, RING, ULYSSES) else None


def may_be_mesh_axis(axis: str, mesh: Mapping[str, int] | None, words: str | None = None) -> bool:
    """Whether the mesh of a plan may have an axis of this name.

    Args:
        axis: the name.
        mesh: the mesh, if it is given. Otherwise axes are named after kinds of parallelism; parts of one are numbered.
        words: the requested strategy, if any. It may name its axes.
    """
    if mesh is not None:
        return axis in mesh
    named = parse_request(words).sizes if words else {}
    return axis in named or re.sub(r"_[1-9]\d*$", "", axis) in KINDS


def classes_for(kind: str, roles: Roles, flags: frozenset[str]) -> tuple[int, ...]:
    """The logical axes that a kind of parallelism shards, in order of preference."""
    if roles.replicas is not None and kind in kinds_of_replicas(roles):
        return (roles.replicas,)
    if kind in ("dp", "zero1", "fsdp"):
        return () if roles.batch is None else (roles.batch, *roles.dispatched_rows, *roles.other_rows)
    if kind == "pp":
        return _for_stages(roles)
    if kind in CONTEXT:
        return roles.context
    if kind == "ep":
        of_batch = () if roles.batch is None else (*roles.routers, roles.batch, *roles.other_rows)
        return (*roles.experts, *of_batch) if roles.experts else ()
    listed = tuple(c for c in roles.parallel if c not in roles.experts)
    return listed + (roles.sequence if "seq" in flags else ())


def kinds_of_replicas(roles: Roles) -> tuple[str, ...]:
    """The kinds of parallelism that shard the groups of rows whose sums are added after the microbatches.

    Weights that are gathered once a step have their gradients reduced once, too, so that `fsdp` is among them.
    """
    if roles.replicas is None:
        return ()
    return ("dp", "fsdp") if roles.gathers_once else ("dp",)


def _for_stages(roles: Roles) -> tuple[int, ...]:
    """The logical axes that a pipeline shards: its stages, and the classes of the head, which is on no stage.

    Classes that values on stages have, such as the experts of a router, are left out. Otherwise the stages would gather
    values that are computed before them, such as a constant of the router.
    """
    if roles.stages is None:
        return ()
    classes = dict.fromkeys((*roles.output_classes, *roles.vocabulary))
    return (roles.stages, *(c for c in classes if c not in roles.within_stages))


def storage_for(kinds: Mapping[str, str], everything: bool, separate_layers: bool) -> dict[Role, tuple[str, ...]]:
    """Role of state -> the mesh axes that store it.

    Args:
        kinds: mesh axis -> kind of parallelism.
        everything: whether all mesh axes store all state.
        separate_layers: see `Roles`. The stages then store the weights of each layer in shards, and exchange them once
            a step.
    """
    if everything:
        return {role: tuple(kinds) for role in STATE}
    storing = ("pp", *STORING) if separate_layers else STORING
    # The stages come last: shards of ("fsdp", "pp") become those of "fsdp" in an all-to-all over "pp".
    ordered = sorted(kinds.items(), key=lambda item: item[1] == "pp")
    full = tuple(a for a, kind in ordered if kind in storing)
    moments = tuple(a for a, kind in ordered if kind in (*storing, "zero1"))
    stored: dict[Role, tuple[str, ...]] = {"parameter": full, "optimizer": moments}
    return {role: axes for role, axes in stored.items() if axes}


def layout_of(axes: LogicalAxes, roles: Roles, requested: Request) -> Layout:
    """The layout that a request means for a program.

    Unless the mesh is fixed, a mesh axis is split if one of its logical axes is divisible only by a part of it, such as
    two key-value heads over four devices: `tp` becomes `tp` and `tp_1`. It is not split if earlier logical axes occur
    in all values of that axis and use the whole mesh axis, such as eight key-value heads over eight devices. Nor is it
    split for other rows than the batch.

    The parts of `ulysses` are in reverse order. Its last part shards key-value heads and is minor on the sequence. So
    an all-to-all over this part comes first and makes the keys smaller. Then the other parts gather them.

    If the batch has one row, its positions are both the batch and a sequence. Mesh axes of the batch then take part in
    the ring, if the plan has one. Otherwise they run attention as `gather`.
    """
    mesh: dict[str, int] = {}
    kinds: dict[str, str] = {}
    table: dict[str, tuple[int, ...]] = {}
    for axis, size in requested.sizes.items():
        kind = requested.kinds[axis]
        classes = classes_for(kind, roles, requested.flags)
        usable = usable_devices(axes, [c for c in classes if c not in roles.other_rows], size)
        if way_of(kind) == ULYSSES:
            usable += usable_heads(axes, size, requested.taking_heads)
        parts = (
            [size]
            if requested.fixed_mesh or kind == "pp" or kind in kinds_of_replicas(roles)
            else axis_parts(size, usable)
        )
        if way_of(kind) == ULYSSES:
            parts = parts[::-1]
        for i, part in enumerate(parts):
            name = f"{axis}_{i}" if i else axis
            mesh[name], kinds[name], table[name] = part, kind, classes
    sequence = {a: way for a, kind in kinds.items() if (way := way_of(kind)) is not None}
    if sequence and roles.batch in roles.context:
        way = RING if RING in sequence.values() else GATHER
        sequence = {a: way for a, kind in kinds.items() if kind in OF_BATCH and roles.batch in table[a]} | sequence
    stored = storage_for(kinds, "state" in requested.flags, roles.separate_layers)
    layout = Layout(axes, roles, mesh, table, stored, sequence=sequence)
    for change in requested.changes:
        layout = changed(layout, change)
    return layout


@shown
@dataclass(frozen=True)
class Table:
    """A requested table: mesh axis -> names of logical axes, in order of preference."""

    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Mapping[str, str | Sequence[str]]) -> Table:
        """Read a user's table. A single name needs no list.

        Raises:
            PlanRequestError: it is empty, or has entries that are not names.
        """
        read = {k: (v,) if isinstance(v, str) else v for k, v in table.items()}
        columns = convert(read, Mapping[str, tuple[str, ...]], "plan", problems := [])
        if not problems and not (columns and all(columns)):
            problems.append(f"plan is {short_repr(table)}, which has no mesh axis, or one without logical axes")
        if problems:
            raise PlanRequestError(
                f"{'; '.join(problems)}: give the logical axes of each mesh axis, such as "
                "{'tp': ['heads', 'ffn'], 'fsdp': ['batch']}"
            )
        return cls(columns)

    def resolve(self, axes: LogicalAxes, roles: Roles, mesh: Mapping[str, int]) -> Layout:
        """The layout that this table means on a mesh.

        Raises:
            PlanRequestError: it names axes that the mesh or the program does not have.
        """
        by_name: dict[str, list[int]] = {}
        for c, name in axes.names.items():
            by_name.setdefault(name, []).append(c)
            stem, _, number = name.rpartition("_")
            if stem and number.isdigit():
                by_name.setdefault(stem, []).append(c)
        unknown_axes = [a for a in self.columns if a not in mesh]
        unknown_names = sorted({n for names in self.columns.values() for n in names if n not in by_name})
        problems = []
        if unknown_axes:
            problems.append(
                f"the mesh has no axis {', '.join(map(repr, unknown_axes))}, it has {dict(mesh)}: give the table the "
                f"mesh axes as keys, or give mesh= with axes {', '.join(self.columns)}"
            )
        if unknown_names:
            close = difflib.get_close_matches(unknown_names[0], by_name, n=1)
            problems.append(
                f"the program has no logical axis {', '.join(map(repr, unknown_names))}; it has "
                f"{', '.join(sorted(by_name))}" + (f". Did you mean '{close[0]}'?" if close else "")
            )
        if problems:
            raise PlanRequestError(f"plan: {'. '.join(problems)}")
        table = {a: tuple(c for n in self.columns.get(a, ()) for c in by_name[n]) for a in mesh}
        storing = tuple(a for a in mesh if a.startswith(("fsdp", "zero3")))
        return Layout(axes, roles, mesh, table, {role: storing for role in STATE} if storing else {})
