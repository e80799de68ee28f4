"""The ways in which a plan with `cp` can run attention, as plans with other words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.layout.plan_request import KINDS, Request
from autoshard.sharding.layout.sequence_operators import sequence_operators, usable_heads
from autoshard.sharding.layout.sequence_strategy import GATHER, RING, ULYSSES


def sequence_variants(axes: LogicalAxes, requested: Request) -> Iterator[str]:
    """Yield variants of a plan with `cp`: `gather`, `ulysses` and `ring` in its place; none if there is no attention.

    On a given mesh the axis has one word. Otherwise `ulysses` also takes a part of the devices, as many as divide the
    heads, and `ring` the others.
    """
    axis = next((a for a, kind in requested.kinds.items() if kind == "cp"), None)
    if axis is None or not sequence_operators(axes.program):
        return
    size = requested.sizes[axis]
    if requested.fixed_mesh:
        for way in (GATHER, ULYSSES, RING):
            yield str(replace(requested, kinds={**requested.kinds, axis: way}))
        return
    heads = min(usable_heads(axes, size, requested.taking_heads), default=1)
    splits: list[Mapping[str, int]] = [{GATHER: size}, {ULYSSES: size}, {RING: size}]
    splits += [{RING: size // n, ULYSSES: n} for n in range(heads, 1, -1) if heads % n == 0 and n < size]
    for split in splits:
        if any(word in requested.sizes for word in split):
            continue
        sizes = {k: n for a, n in requested.sizes.items() for k, n in (split.items() if a == axis else [(a, n)])}
        sizes = dict(sorted(sizes.items(), key=lambda item: KINDS.index(item[0])))
        assert math.prod(sizes.values()) == requested.devices
        changes = tuple(c for c in requested.changes if c.axis != axis)
        yield str(replace(requested, sizes=sizes, kinds={k: k for k in sizes}, changes=changes))
