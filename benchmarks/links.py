"""The time for which a collective occupies a machine's links.

Units: bytes, seconds, bytes per second. Bandwidth is one way, and is the target's figure times `LINK_SHARE`, the part
of it that large messages reach.

On a torus (TPU). A group spans a dimension if its chips differ in that coordinate. In each spanned dimension it has
    ways    2 if its chips are spaced evenly around a ring (both directions carry), 1 if they are on a line
    shared  the largest number of groups of the same collective that use one link
    width   ways / shared, links
All its dimensions work at once, on different parts of the data: links = sum of widths. The device with the fewest links
(the corner of a mesh without wrap-around) can receive at that rate, and rings in every order of the dimensions reach
it. A group whose chips do not form a box in the torus counts as one line through its bounding box: links = 1 / the
number of groups whose boxes overlap it. The slowest group counts.
    all-gather, reduce-scatter     (n - 1) / n x payload / (links x bandwidth)
    all-reduce                     2 (n - 1) / n x payload / (links x bandwidth)
    all-to-all                     the larger of (n - 1) / n x payload / (links x bandwidth) and, for each dimension
                                   spanned with m chips, its middle: floor(m/2) ceil(m/2) / m x payload / (width x bw)
    collective-permute             payload x the largest number of messages over one directed link / bandwidth; messages
                                   travel one dimension after the other, the shorter way around
Each takes at least HOP_SECONDS for each hop: half a ring or a whole line in each dimension, twice that for an
all-reduce, the longest path of a permute. n counts chips: two devices of a chip exchange data through its memory.

On hosts with switches (GPU). A group has g devices on each of its h hosts.
    all-gather, reduce-scatter, all-reduce   the larger of wire bytes / NVLink and, if h > 1,
                                             (h - 1) / h x payload (twice for all-reduce) / (g x network)
    all-to-all                               the larger of (g - 1) / n x payload / NVLink and
                                             (n - g) / n x payload / network
    collective-permute                       payload / network if one message leaves its host, else payload / NVLink
Each takes at least SWITCH_SECONDS within a host and NETWORK_SECONDS between hosts, about NCCL's time for a small
message. network is one device's share of its host's bandwidth.

Between slices of a TPU, each device sends its wire bytes over its own share of the data center network:
    all-gather, reduce-scatter, all-to-all   (n - 1) / n x payload / network
    all-reduce                               2 (n - 1) / n x payload / network
    collective-permute                       payload / network
Each takes at least NETWORK_SECONDS. Within a slice the torus carries the rest, as collectives of their own.

Collectives that occupy the same links take turns. A torus collective occupies all links along its dimensions, and a
permute those on its paths. A collective on GPUs occupies NVLink or the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from math import prod

from hlo_collectives import SLICE

# All chosen, not measured: the part of a link's bandwidth that large messages reach, and the latency of a hop on a
# torus, of a collective within a host and of one between hosts.
LINK_SHARE = 0.9
HOP_SECONDS = 1e-6
SWITCH_SECONDS, NETWORK_SECONDS = 10e-6, 25e-6
Place = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]
ROUNDS = {"all-reduce": 2.0}


@dataclass(frozen=True)
class Chip:
    """The rates of one chip, per second: clock (0: the compiler gives no cycles), operations at 16 bits, bytes.

    `link` is one link, one way; a GPU's is all its NVLinks together. `network` is its share of the network of its host
    (GPU) or between slices (TPU).
    `torus` is the number of dimensions of a TPU's torus. A dimension is a ring if its size is a multiple of `wraps_at`;
    with `all_wrap`, only if all sizes are. `cores` is the number of tensor cores of a TPU's device.
    """

    clock: float
    flops: float
    hbm: float
    memory_bytes: float
    link: float
    host: float
    torus: int = 0
    wraps_at: int = 0
    all_wrap: bool = False
    network: float = 0.0
    cores: int = 1


@dataclass(frozen=True)
class Target:
    """A machine: its name, its chip, and its shape: chips in each dimension, or (hosts, devices of a host).

    `slices` is the number of slices of a TPU, each of this shape.
    """

    name: str
    chip: Chip
    shape: Place
    slices: int = 1

    @property
    def gpu(self) -> bool:
        """Whether switches connect the devices."""
        return not self.chip.torus

    @cached_property
    def rings(self) -> tuple[bool, ...]:
        """Which dimensions of the torus are rings."""
        closes = [size > 2 and size % self.chip.wraps_at == 0 for size in self.shape]
        sized = [close for close, size in zip(closes, self.shape, strict=True) if size > 1]
        return tuple(close and (all(sized) or not self.chip.all_wrap) for close in closes)

    def places(self) -> list[Place]:
        """Return the coordinates of a slice's devices. On GPUs the last dimension runs fastest, on TPUs the first."""
        if self.gpu:
            return [(0, *place) for place in product(*map(range, self.shape))]
        return [(*reversed(place), 0) for place in product(*map(range, reversed(self.shape)))]


@dataclass(frozen=True)
class Wire:
    """The seconds of a collective if no other one uses its links, the links, and their description."""

    seconds: float
    links: frozenset = frozenset()
    over: str = ""


@dataclass(frozen=True)
class Span:
    """A dimension that a collective's groups span: its index, a group's chips in it, links, hops from end to end."""

    dim: int
    chips: int
    width: float
    hops: int


def wire(target: Target, kind: str, groups: Groups, payload: float, places: Sequence[Place]) -> Wire:
    """Return the time of a collective on a target.

    `places` has the coordinates of each partition; on several slices, of each partition of one slice.
    """
    if max(map(len, groups), default=1) == 1:
        return Wire(0.0)
    if target.slices > 1 and max(map(max, groups)) >= SLICE:
        return _between_slices(target, kind, max(map(len, groups)), payload)
    placed = tuple(tuple(tuple(places[partition]) for partition in group) for group in groups)
    if target.gpu:
        return _switched(target, kind, placed, payload)
    chips = tuple(tuple(place[: len(target.shape)] for place in group) for group in placed)
    if kind == "collective-permute":
        return _permute(target, chips, payload)
    return _rings(target, kind, tuple(tuple(sorted(set(group))) for group in chips), payload)


def _between_slices(target: Target, kind: str, size: int, payload: float) -> Wire:
    part = 1.0 if kind == "collective-permute" else ROUNDS.get(kind, 1.0) * (size - 1) / size
    seconds = part * payload / (LINK_SHARE * target.chip.network)
    return Wire(max(seconds, NETWORK_SECONDS), frozenset({"network"}), "network")


def _rings(target: Target, kind: str, groups: tuple[tuple[Place, ...], ...], payload: float) -> Wire:
    chips = max(len(group) for group in groups)
    if chips == 1:
        return Wire(payload / target.chip.hbm, over="chip")
    bandwidth, spans = LINK_SHARE * target.chip.link, spans_of(target, groups)
    rounds = ROUNDS.get(kind, 1.0)
    links = sum(span.width for span in spans)
    part = 1.0 if kind == "collective-broadcast" else rounds * (chips - 1) / chips
    seconds = part * payload / (links * bandwidth)
    if kind.endswith("all-to-all"):
        middles = [(span.chips // 2) * ((span.chips + 1) // 2) / span.chips / span.width for span in spans]
        seconds = max(seconds, max(middles) * payload / bandwidth)
    hops = rounds * sum(span.hops for span in spans)
    over = " ".join(f"{'xyz'[span.dim]}{span.chips}:{span.width:g}" for span in spans)
    used = frozenset(link for span in spans for link in _links(target, span.dim))
    return Wire(max(seconds, hops * HOP_SECONDS), used, over)


@lru_cache(maxsize=1024)
def spans_of(target: Target, groups: tuple[tuple[Place, ...], ...]) -> tuple[Span, ...]:
    """Return the dimensions that groups of chips span, with the links of each."""
    if not all(_is_box(group) for group in groups):
        boxes = [[(min(axis), max(axis)) for axis in zip(*group, strict=True)] for group in groups]
        shared = max(sum(_overlap(box, other) for other in boxes) for box in boxes)
        wide = max(range(len(target.shape)), key=lambda dim: target.shape[dim])
        length = max(sum(high - low for low, high in box) for box in boxes)
        return (Span(wide, max(map(len, groups)), 1 / shared, length),)
    found = (_span(target, groups, dim) for dim in range(len(target.shape)))
    return tuple(span for span in found if span)


def _span(target: Target, groups: Sequence[tuple[Place, ...]], dim: int) -> Span | None:
    """Return the span along one dimension of groups that are boxes. The slowest line of chips counts."""
    size, ring = target.shape[dim], target.rings[dim]
    lines: dict[Place, list[list[int]]] = {}
    for group in groups:
        rows: dict[Place, list[int]] = {}
        for place in group:
            rows.setdefault(place[:dim] + place[dim + 1 :], []).append(place[dim])
        for row, at in rows.items():
            if len(at) > 1:
                lines.setdefault(row, []).append(sorted(at))
    if not lines:
        return None
    worst = min(
        (Span(dim, len(at), width, hops) for line in lines.values() for at, width, hops in _widths(line, size, ring)),
        key=lambda span: (span.width, -span.chips),
    )
    return Span(dim, max(len(at) for line in lines.values() for at in line), worst.width, worst.hops)


def _widths(line: list[list[int]], size: int, ring: bool) -> Iterator[tuple[list[int], float, int]]:
    """Yield, for each group on one line of chips, its coordinates, its links, and the hops between its ends."""
    around = [ring and size % len(at) == 0 and all(b - a == size // len(at) for a, b in pairwise(at)) for at in line]
    segments = [range(size) if whole else range(at[0], at[-1]) for at, whole in zip(line, around, strict=True)]
    load = [sum(at in covered for covered in segments) for at in range(size)]
    for at, covered, whole in zip(line, segments, around, strict=True):
        shared = max(load[segment] for segment in covered)
        yield at, (2 if whole else 1) / shared, size // 2 if whole else len(covered)


def _permute(target: Target, pairs: Sequence[Sequence[Place]], payload: float) -> Wire:
    paths = [list(_path(target, start, end)) for start, end in pairs if start != end]
    load: dict[tuple, int] = {}
    for link in (link for path in paths for link in path):
        load[link] = load.get(link, 0) + 1
    bandwidth, most = LINK_SHARE * target.chip.link, max(load.values(), default=0)
    hops = max(map(len, paths), default=0)
    over = f"{hops} hop{'s' * (hops != 1)}, {most} on a link"
    return Wire(max(payload * most / bandwidth, hops * HOP_SECONDS), frozenset(load), over)


def _path(target: Target, start: Place, end: Place) -> Iterator[tuple[Place, int, int]]:
    """Yield the directed links from one chip to another: (chip, dimension, +1 or -1)."""
    at = list(start)
    for dim, size in enumerate(target.shape):
        distance = end[dim] - at[dim]
        if target.rings[dim] and abs(distance) > size / 2:
            distance -= size if distance > 0 else -size
        for _ in range(abs(distance)):
            step = 1 if distance > 0 else -1
            yield tuple(at), dim, step
            at[dim] = (at[dim] + step) % size


@lru_cache(maxsize=64)
def _links(target: Target, dim: int) -> tuple[tuple[Place, int, int], ...]:
    return tuple((place, dim, step) for place in product(*map(range, target.shape)) for step in (1, -1))


def _switched(target: Target, kind: str, groups: Sequence[Sequence[Place]], payload: float) -> Wire:
    nvlink, network = LINK_SHARE * target.chip.link, LINK_SHARE * target.chip.network
    if kind == "collective-permute":
        if any(start[:-1] != end[:-1] for start, end in groups):
            return Wire(max(payload / network, NETWORK_SECONDS), frozenset({"network"}), "network")
        return Wire(max(payload / nvlink, SWITCH_SECONDS), frozenset({"nvlink"}), "nvlink")
    return max((_hosts(kind, group, payload, nvlink, network) for group in groups), key=lambda found: found.seconds)


def _hosts(kind: str, group: Sequence[Place], payload: float, nvlink: float, network: float) -> Wire:
    counts = Counter(place[:-1] for place in group)
    hosts, near, size = len(counts), min(counts.values()), len(group)
    rounds = ROUNDS.get(kind, 1.0)
    if kind.endswith("all-to-all"):
        inside, outside = (near - 1) / size * payload / nvlink, (size - near) / size * payload / network
    else:
        inside = rounds * (size - 1) / size * payload / nvlink
        outside = rounds * (hosts - 1) / hosts * payload / (near * network)
    used = {name for name, takes in (("nvlink", near > 1), ("network", hosts > 1)) if takes}
    least = NETWORK_SECONDS if hosts > 1 else SWITCH_SECONDS
    return Wire(max(inside, outside, least), frozenset(used), f"{hosts} x {near}")


def _is_box(group: Sequence[Place]) -> bool:
    return prod(len(set(axis)) for axis in zip(*group, strict=True)) == len(group)


def _overlap(box: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    return all(low <= high_b and low_b <= high for (low, high), (low_b, high_b) in zip(box, other, strict=True))
