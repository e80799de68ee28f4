"""Plans that people ask for by name or table, and the known plans that the search starts from.

Words of a request, `fsdp:8 tp:4 seq`:

    dp:N      the batch over N devices, state whole on each
    zero1:N   dp, the optimizer's state in N parts          fsdp:N   dp, parameters too in N parts (ZeRO-3)
    tp:N      heads, ffn, vocabulary, ... over N devices     seq      with tp: the sequence between them too
    ep:N      experts over N devices                         cp:N     the sequence over N devices

A table names logical axes for each mesh axis instead: `{"tp": ["heads", "ffn"], "fsdp": ["batch"]}`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.errors import AutoshardError
from autoshard.sharding.axes import LogicalAxes
from autoshard.sharding.layout import Layout
from autoshard.sharding.roles import Role, Roles

KINDS = ("dp", "zero1", "fsdp", "cp", "ep", "tp")  # outermost first: tp talks most, so it gets the nearest devices
FLAGS = ("seq",)
STATE: tuple[Role, ...] = ("parameter", "optimizer")


class PlanRequestError(AutoshardError):
    """A plan that was asked for cannot be read or cannot hold."""


@dataclass(frozen=True)
class Request:
    """A plan by its words: how many devices each kind of parallelism takes, and flags."""

    sizes: Mapping[str, int]
    flags: frozenset[str] = frozenset()
    shard_all_state: bool = False  # state in as many parts as there are devices

    def __str__(self) -> str:
        words = [f"{kind}:{n}" for kind, n in self.sizes.items()]
        return " ".join([*words, *sorted(self.flags), *(["+state"] if self.shard_all_state else [])]) or "one device"

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return math.prod(self.sizes.values())


def parse_request(text: str) -> Request:
    """Reads `"fsdp:8 tp:4 seq"`.

    Raises:
        PlanRequestError: a word is unknown or a size is missing.
    """
    sizes: dict[str, int] = {}
    flags: set[str] = set()
    for word in text.replace(",", " ").split():
        kind, colon, size = word.partition(":")
        if kind in FLAGS and not colon:
            flags.add(kind)
            continue
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, [*KINDS, *FLAGS], n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise PlanRequestError(
                f"plan '{text}': unknown word '{word}'; known: {', '.join(f'{k}:N' for k in KINDS)}, seq.{hint}"
            )
        if not re.fullmatch(r"[1-9]\d*", size):
            raise PlanRequestError(f"plan '{text}': '{word}' needs a number of devices, such as {kind}:8")
        if kind in sizes:
            raise PlanRequestError(f"plan '{text}': '{kind}' stands twice")
        sizes[kind] = int(size)
    if not sizes:
        raise PlanRequestError(f"plan '{text}' names no parallelism; such as 'fsdp:8' or 'dp:2 tp:4 seq'")
    return Request({k: sizes[k] for k in KINDS if k in sizes}, frozenset(flags))


def classes_for(kind: str, roles: Roles, flags: frozenset[str]) -> tuple[int, ...]:
    """The logical axes that a kind of parallelism shards, in order of preference."""
    if kind in ("dp", "zero1", "fsdp"):
        return () if roles.batch is None else (roles.batch,)
    if kind == "cp":
        return roles.sequence
    if kind == "ep":
        return roles.experts
    listed = tuple(c for c in roles.parallel if c not in roles.experts)
    return listed + (roles.sequence if "seq" in flags else ())


def storage_for(kinds: Sequence[str], owners: Mapping[str, str], everything: bool) -> dict[Role, tuple[str, ...]]:
    """Which mesh axes store which state; `owners` says which kind each mesh axis belongs to."""
    if everything:
        return {role: tuple(owners) for role in STATE}
    full = tuple(a for a, kind in owners.items() if kind == "fsdp")
    moments = tuple(a for a, kind in owners.items() if kind in ("fsdp", "zero1"))
    return {role: axes for role, axes in (("parameter", full), ("optimizer", moments)) if axes}  # type: ignore[misc]


def lay_out(axes: LogicalAxes, roles: Roles, request: Request) -> Layout:
    """The layout that a request means for a program.

    A kind's mesh axis is split in two where one of its logical axes is divisible only by a part of it (two key-value
    heads over four devices); `split_axes` says which names belong together.
    """
    mesh: dict[str, int] = {}
    owners: dict[str, str] = {}
    table: dict[str, tuple[int, ...]] = {}
    for kind, size in request.sizes.items():
        if size == 1 and len(request.sizes) > 1:
            continue
        classes = classes_for(kind, roles, request.flags)
        for i, part in enumerate(_parts(size, [axes.sizes[c] for c in classes])):
            name = f"{kind}_{i}" if i else kind
            mesh[name], owners[name], table[name] = part, kind, classes
    storage = storage_for(list(request.sizes), owners, request.shard_all_state)
    return Layout(axes, roles, mesh, table, storage)


def _parts(size: int, class_sizes: Sequence[int]) -> list[int]:
    """A mesh axis of `size` in the coarsest factors that let each class use as many of them as divide it."""
    parts = [size]
    for n in class_sizes:
        out: list[int] = []
        for part in parts:
            shared = math.gcd(part, n // math.gcd(n, math.prod(out)) if n else part)
            out += [shared, part // shared] if 1 < shared < part else [part]
        parts = out
    return parts


def seeds(roles: Roles, devices: int) -> Iterator[Request]:
    """The known plans for this many devices, simplest first."""
    tensor = bool([c for c in roles.parallel if c not in roles.experts])
    for tp in _divisors(devices) if tensor else [1]:
        for ep in _divisors(devices // tp) if roles.experts else [1]:
            for cp in _divisors(devices // tp // ep) if roles.sequence else [1]:
                rest = devices // tp // ep // cp
                inner = {k: n for k, n in (("cp", cp), ("ep", ep), ("tp", tp)) if n > 1}
                for sizes in _batch_kinds(rest) if roles.batch is not None or rest == 1 else []:
                    whole = {**sizes, **inner} or {"dp": 1}
                    for flags in [frozenset[str](), frozenset({"seq"})] if tp > 1 and roles.sequence else [frozenset[str]()]:
                        yield Request(whole, flags)
                        if len(whole) > 1 or "fsdp" not in whole:
                            yield Request(whole, flags, shard_all_state=True)


def _batch_kinds(n: int) -> list[dict[str, int]]:
    if n == 1:
        return [{}]
    hybrids = [{"dp": n // k, "fsdp": k} for k in _divisors(n) if 1 < k < n]
    return [{"dp": n}, {"zero1": n}, {"fsdp": n}, *hybrids]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class Table:
    """A plan by its table: mesh axis -> names of logical axes in order; sizes where the mesh gives them."""

    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

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
        if wrong or wrong_names:
            raise PlanRequestError(
                (f"plan: the mesh has no axis {', '.join(map(repr, wrong))}, it has {dict(mesh)}. " if wrong else "")
                + (f"plan: the program has no logical axis {', '.join(map(repr, wrong_names))}; it has "
                   f"{', '.join(sorted(by_name))}" if wrong_names else "")
            )  # fmt: skip
        table = {a: tuple(c for n in self.columns.get(a, ()) for c in by_name[n]) for a in mesh}
        shards_state = tuple(a for a in mesh if a.startswith(("fsdp", "zero3")))
        return Layout(axes, roles, mesh, table, {role: shards_state for role in STATE} if shards_state else {})
