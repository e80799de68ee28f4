"""Logical axes whose sizes are not divisible by their mesh axes.

Some operators need shards that consist of whole blocks. For example, splash attention needs blocks of 128 positions.
Such a dimension has two logical axes: one for the number of blocks, and one for the positions in a block. Only the
number of blocks can be padded. Sizes are reported in elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.layout.constants import LARGE_STATE_BYTES
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.spmdrules.core.placement import axes_of

_blocks: WeakKeyDictionary[LogicalAxes, dict[int, int]] = WeakKeyDictionary()


@shown
@dataclass(frozen=True)
class Undivided:
    """A logical axis that mesh axes should shard, but whose size they do not divide.

    Attributes:
        cls: the logical axis.
        over: the mesh axes.
        shards: the number of shards that it has.
        wanted_shards: the number of shards that it should have.
        size: its size in elements.
        block: elements of a block, if the axis counts blocks or a part of them; else 1.
    """

    cls: int
    over: tuple[str, ...]
    shards: int
    wanted_shards: int
    size: int
    block: int = 1

    @property
    def padded(self) -> int:
        """The least size in elements that `wanted_shards` divides."""
        return multiple(self.size // self.block, self.wanted_shards) * self.block


def undivided(layout: Layout) -> list[Undivided]:
    """The logical axes in a layout's table whose sizes are not divisible by their mesh axes.

    A mesh axis does not count for a logical axis if it already shards an earlier logical axis that occurs in all values
    of this one. Axes that are a block are left out.
    """
    found: list[Undivided] = []
    sizes = layout.axes.sizes
    sharded_over: dict[int, tuple[str, ...]] = {}
    for c in dict.fromkeys(c for classes in layout.table.values() for c in classes):
        over = tuple(a for a, classes in layout.table.items() if c in classes)
        taken = {a for d, axes in sharded_over.items() if d in layout.axes.co_occurring.get(c, ()) for a in axes}
        sharded_over[c] = tuple(layout.spec_of(((c,),))[0])
        shards, wanted = layout.shard_count(sharded_over[c]), layout.shard_count([a for a in over if a not in taken])
        if sizes[c] % wanted and shards < wanted and (block := block_elements(layout.axes).get(c, 1)):
            found.append(Undivided(c, over, shards, wanted, sizes[c] * block, block))
    return found


def block_elements(axes: LogicalAxes) -> dict[int, int]:
    """The elements of a block, by the logical axes that count blocks of some operator's dimension.

    If several axes count blocks together, the "block" of each has all elements of the dimension but those that it
    counts. Axes that are a block, which the operator takes whole, map to 0.
    """
    if axes not in _blocks:
        found = _blocks[axes] = {}
        for op, factors in zip(axes.program.ops(), axes.of_op, strict=True):
            if (rule := op.rule) is None:
                continue
            for dim in rule.compound_dims:
                whole = {cls for name in dim if not rule.factor(name).shardable for cls in factors[name]}
                every = [cls for name in dim for cls in factors[name]]
                elements = math.prod(axes.sizes[cls] for cls in every)
                for cls in every if whole else ():
                    block = elements // max(axes.sizes[cls], 1)
                    found[cls] = 0 if cls in whole or found.get(cls) == 0 else max(block, found.get(cls, 1))
    return _blocks[axes]


def undivided_in_storage(layout: Layout) -> list[Undivided]:
    """The logical axes to pad so that the storage axes can shard the large arrays of state.

    An array counts if it leaves some storage axes unused, because they do not divide its dimensions. The axis to pad is
    that of the dimension with the largest shards. Each logical axis occurs once, for the first such array.
    """
    found: dict[int, Undivided] = {}
    for v, role in layout.roles.inputs.items():
        leaves, spec, aval = layout.axes.of_value[v], layout.stored_spec(v), layout.axes.program.avals[v]
        free = [a for a in layout.storage.get(role, ()) if a not in axes_of(spec)]
        able = [d for d, dim in enumerate(leaves) if len(dim) == 1 and dim[0] not in layout.axes.stacked]
        if free and able and v not in layout.fixed and nbytes(aval) >= LARGE_STATE_BYTES:
            d = max(able, key=lambda d: (aval.shape[d] / layout.shard_count(spec[d]), -d))
            (c,), shards = leaves[d], layout.shard_count(spec[d])
            wanted = shards * layout.shard_count(free)
            if aval.shape[d] % wanted and block_elements(layout.axes).get(c) != 0:
                found.setdefault(c, Undivided(c, tuple(free), shards, wanted, aval.shape[d]))
    return list(found.values())


def multiple(size: int, n: int) -> int:
    """The least multiple of `n` that is at least `size`."""
    return -(-size // n) * n
