"""Scale a requested plan to another number of devices: `fsdp:8` becomes `fsdp:4`. The kinds of parallelism stay.

    minimize    the changes of the sizes, those of the innermost mesh axes first
    such that   the sizes multiply to the number of devices,
                a size divides the old one, or with more devices is a multiple of it, unless its axis shards only the
                batch,
                and the axes that shard the batch divide its rows

So `dp` and `fsdp` change before `tp`. Logical axes such as heads, which `tp` shards, have few divisors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoshard.sharding.layout.plan_request import KINDS, Request

_BATCH_ONLY = ("dp", "zero1", "fsdp")
_SHARDS_BATCH = (*_BATCH_ONLY, "ep")
_ORDER = (*(kind for kind in KINDS if kind != "pp"), "pp")  # the last one changes least: stages divide the layers


def scaled_requests(requested: Request, devices: int, rows: int) -> list[Request]:
    """The scalings of a request, the one that changes the least first; empty if there is none.

    Axes of size 1 are left out, and so are the words that need them.

    Args:
        requested: the request.
        devices: the new number of devices.
        rows: the rows of a batch.
    """
    # Of several axes of one kind, the last is the innermost. Sorting is stable, with `reverse` too.
    by_place = list(reversed(list(requested.sizes)))
    innermost_first = sorted(by_place, key=lambda axis: _ORDER.index(requested.kinds[axis]), reverse=True)
    allowed, grows = [], devices > requested.devices
    for sizes in _factorizations(devices, list(requested.sizes)):
        batch_parts = math.prod(n for a, n in sizes.items() if requested.kinds[a] in _SHARDS_BATCH)
        if rows % batch_parts == 0 and all(_may_become(requested, a, n, grows) for a, n in sizes.items()):
            allowed.append(sizes)

    def changes(sizes: Mapping[str, int]) -> list[float]:
        return [abs(math.log(sizes[a] / requested.sizes[a])) for a in innermost_first]

    return [_without_single_devices(replace(requested, sizes=sizes)) for sizes in sorted(allowed, key=changes)]


def scaled_pipelines(requested: Request, devices: int, rows: int, most: int) -> list[Request]:
    """The scalings of a pipeline that keep at least 2 stages, and at most `most`.

    If no word shards the batch, `dp` does. So there is a scaling where the stages are fewer than the devices.

    Args:
        requested: the request, with a word `pp:N`.
        devices: the new number of devices.
        rows: the rows of a microbatch.
        most: the largest number of stages.

    Example:
        >>> from autoshard.sharding.layout.plan_request import parse_request
        >>> [str(each) for each in scaled_pipelines(parse_request("pp:8"), 8, 16, most=6)]
        ['pp:4 dp:2', 'pp:2 dp:4']
    """
    if not requested.fixed_mesh and not {*_SHARDS_BATCH}.intersection(requested.kinds.values()):
        (pp,) = (a for a, kind in requested.kinds.items() if kind == "pp")
        sizes = {pp: requested.sizes[pp], "dp": 1, **requested.sizes}
        requested = replace(requested, sizes=sizes, kinds={**requested.kinds, "dp": "dp"})
    found = scaled_requests(requested, devices, rows)
    return [each for each in found if 2 <= stages_in(each) <= most]


def stages_in(requested: Request) -> int:
    """The number of stages of a request; 1 if it has no pipeline."""
    return math.prod(n for axis, n in requested.sizes.items() if requested.kinds[axis] == "pp")


def scaled_meshes(mesh: Mapping[str, int], devices: int) -> list[dict[str, int]]:
    """The scalings of a mesh whose axes have no known kind. The first axis is the outermost and changes first."""
    kinds = {axis: "tp" if i else "dp" for i, axis in enumerate(mesh)}
    return [dict(each.sizes) for each in scaled_requests(Request(dict(mesh), kinds), devices, rows=0)]


def _factorizations(n: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """All ways to write n as a product of one size for each name."""
    if len(names) == 1:
        yield {names[0]: n}
        return
    for size in (d for d in range(1, n + 1) if n % d == 0):
        yield from ({names[0]: size, **rest} for rest in _factorizations(n // size, names[1:]))


def _may_become(requested: Request, axis: str, size: int, grows: bool) -> bool:
    old = requested.sizes[axis]
    return requested.kinds[axis] in _BATCH_ONLY or old % size == 0 or (grows and size % old == 0)


def _without_single_devices(requested: Request) -> Request:
    kept = {axis: n for axis, n in requested.sizes.items() if n > 1}
    kept = kept or dict(list(requested.sizes.items())[:1])
    kinds = {axis: requested.kinds[axis] for axis in kept}
    flags = requested.flags if "tp" in kinds.values() else requested.flags - {"seq"}
    changes = [c for c in requested.changes if c.axis in kept or re.sub(r"_\d+$", "", c.axis) in kept]
    return replace(requested, sizes=kept, kinds=kinds, flags=flags, changes=tuple(changes))
