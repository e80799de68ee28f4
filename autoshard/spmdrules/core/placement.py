"""Where an array is on a mesh, and what it costs to move it from one placement to another.

A *spec* is a tuple with one entry for each dimension: the mesh axes that shard it, major to minor. A *placement* is a
spec and the mesh axes that the array is partial over: along those, each device holds one term of a sum (max, min, ...).
With `n` devices on a mesh axis and `b` bytes on each device before the step, each device sends

    slice                        0                replicated -> sharded: each device keeps its own shard
    reduce-scatter               (n - 1) / n b    partial -> sharded
    all-to-all                   (n - 1) / n b    sharded on one dimension -> sharded on another
    collective-permute           b                the same axes on a dimension in another order
    all-reduce               2 (n - 1) / n b      partial -> replicated
    all-gather                   (n - 1) b        sharded -> replicated

Steps that make an array smaller come first, steps that make it larger last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import PartitionSpec

from autoshard._shown import shown

Spec = tuple[tuple[str, ...], ...]
ReshardKind = Literal["slice", "reduce-scatter", "all-to-all", "collective-permute", "all-reduce", "all-gather"]


@shown
@dataclass(frozen=True)
class Placement:
    """Where an array is: its spec, and `(mesh axis, operation)` for each mesh axis that it is partial over."""

    spec: Spec
    partial: tuple[tuple[str, str], ...] = ()

    @property
    def reduced(self) -> Placement:
        """The same spec, partial over no axis."""
        return Placement(self.spec)


@shown
@dataclass(frozen=True)
class Step:
    """One collective (or free slice) over one mesh axis, and the bytes that each device sends for it."""

    kind: ReshardKind
    axis: str
    nbytes: float


def partial_placement(spec: Spec, partial: tuple[tuple[str, str], ...]) -> Placement:
    """The placement that is partial over these axes, and sharded by `spec` without them."""
    over = {axis for axis, _ in partial}
    return Placement(tuple(tuple(a for a in dim if a not in over) for dim in spec), partial)


def replicated_placement(rank: int) -> Placement:
    """The placement of an array that is replicated on every device."""
    return Placement(((),) * rank)


def axes_of(spec: Spec) -> Iterator[str]:
    """Yields every mesh axis of a spec."""
    for dim in spec:
        yield from dim


def shard_count(spec: Spec, mesh: Mapping[str, int]) -> int:
    """The number of different shards under a spec."""
    return math.prod([mesh[a] for dim in spec for a in dim])


def bytes_of(aval: Any) -> float:
    """Bytes of the unsharded array."""
    dtype = getattr(aval, "dtype", None)
    return float(math.prod(aval.shape) * dtype.itemsize) if dtype is not None else 0.0


def bytes_sent_per_byte(kind: ReshardKind, n: int) -> float:
    """The bytes that each of `n` devices sends in one step, per byte that it holds before the step.

    The module docstring has the table.
    """
    match kind:
        case "slice":
            return 0.0
        case "reduce-scatter" | "all-to-all":
            return (n - 1) / n
        case "collective-permute":
            return 1.0
        case "all-reduce":
            return 2 * (n - 1) / n
        case "all-gather":
            return n - 1.0


def steps(old: Placement, new: Placement, nbytes: float, mesh: Mapping[str, int]) -> list[Step]:
    """The steps that move an array from one placement to another, in order.

    Args:
        old: where it is.
        new: where it goes; partial only over axes that `old` is partial over.
        nbytes: bytes of the unsharded array.
        mesh: mesh axis -> size.
    """
    if old == new:
        return []
    kept_partial = {axis for axis, _ in new.partial}
    before = {a: d for d, axes in enumerate(old.spec) for a in axes}
    after = {a: d for d, axes in enumerate(new.spec) for a in axes}
    reduced_axes = [axis for axis, _ in old.partial if axis not in kept_partial]
    gathered = [a for a in before if a not in after]
    gathered_dims = {before[a] for a in gathered}
    local = nbytes / shard_count(old.spec, mesh)
    found: list[Step] = []

    def step(kind: ReshardKind, axis: str) -> None:
        nonlocal local
        n = mesh[axis]
        if n > 1:
            found.append(Step(kind, axis, bytes_sent_per_byte(kind, n) * local))
            local *= n if kind == "all-gather" else 1 / n if kind in ("slice", "reduce-scatter") else 1

    sliced_last = []
    for a, d in after.items():
        if a in reduced_axes:
            step("reduce-scatter", a)
        elif a not in before:
            if d in gathered_dims:
                sliced_last.append(a)
            else:
                step("slice", a)
    for a, d in after.items():
        if a in before and before[a] != d:
            step("all-to-all", a)
        elif a in before and _majors(old.spec[d], a) != _majors(new.spec[d], a):
            step("collective-permute", a)
    for a in reduced_axes:
        if a not in after:
            step("all-reduce", a)
    for a in gathered:
        step("all-gather", a)
    for a in sliced_last:
        step("slice", a)
    return found


def _majors(axes: Sequence[str], axis: str) -> Sequence[str]:
    return axes[: axes.index(axis)]


def cost(old: Placement, new: Placement, nbytes: float, mesh: Mapping[str, int]) -> float:
    """The bytes that each device sends to move an array from one placement to another."""
    return sum(step.nbytes for step in steps(old, new, nbytes, mesh))


def meet(places: Sequence[Placement], nbytes: float, mesh: Mapping[str, int]) -> Placement:
    """The one of `places` to which all others can be moved with the fewest bytes. The first one wins ties.

    The result is partial only if all of them are partial in the same way.
    """
    same = places[0].partial if len({p.partial for p in places}) == 1 else ()
    options = dict.fromkeys(partial_placement(p.spec, same) for p in places)
    return min(options, key=lambda o: sum(cost(p, o, nbytes, mesh) for p in places))


def extend(old: Spec, requested: Spec, taken: Iterable[str] = ()) -> Spec:
    """Adds the further mesh axes of another spec to a spec, in dimensions where both begin with the same axes.

    Args:
        old: the spec.
        requested: the spec to move towards.
        taken: axes that are not added, because the array is partial over them.
    """
    if old == requested:
        return old
    used = {*axes_of(old), *taken}
    pairs = zip(old, requested, strict=True)
    return tuple([r if r[: len(o)] == o and used.isdisjoint(r[len(o) :]) else o for o, r in pairs])


def to_partition_spec(spec: Spec) -> PartitionSpec:
    """Converts a spec to a `PartitionSpec` without trailing Nones."""
    entries: list[Any] = [dim[0] if len(dim) == 1 else dim or None for dim in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def from_partition_spec(spec: Any, rank: int) -> Spec:
    """Converts a `PartitionSpec` to the spec of an array of `rank` dimensions."""
    entries = [() if e is None or e is PartitionSpec.UNCONSTRAINED else (e,) if isinstance(e, str) else tuple(e)
               for e in getattr(spec, "partitions", spec)]  # fmt: skip
    return tuple([*entries, *[()] * (rank - len(entries))])


def is_spec_entry(entry: Any) -> bool:
    """Whether a value is a valid entry of a `PartitionSpec`: None, UNCONSTRAINED, a name or a tuple of names."""
    names = entry if isinstance(entry, tuple) else (entry,)
    return entry is None or entry is PartitionSpec.UNCONSTRAINED or all(isinstance(name, str) for name in names)


def exchanged_spec(of_layers: Spec, of_stages: Spec) -> Spec:
    """The sharding of a stack whose stages have their layers, while the layers keep their other shards.

    Args:
        of_layers: the sharding of the stack by which each stage has a part of all layers.
        of_stages: the sharding by which each stage has its layers.
    """
    moved = {*axes_of(of_stages)}
    return tuple((*own, *(a for a in part if a not in moved)) for own, part in zip(of_stages, of_layers, strict=True))
