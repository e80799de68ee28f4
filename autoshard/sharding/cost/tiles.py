"""How well the shards of a product fill the tiles of a matrix unit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.spmdrules.core.rule import Rule


def filled_tile_fraction(rule: Rule, strategy: OperatorStrategy, mesh: Mapping[str, int], tile: int) -> float:
    """Return the fraction of the matrix unit's tiles that one shard of a contraction fills.

    A product has three sizes: rows, columns, and the contracted one. The largest is streamed; the others fill tiles.
    """
    if tile <= 1:
        return 1.0
    ways: dict[str, int] = {}
    for axis, factor in strategy.factors.items():
        if factor is not None:
            ways[factor] = ways.get(factor, 1) * mesh[axis]
    left, right = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    out = {f for dim in rule.results[0] for f in dim}
    sides = {"rows": (left & out) - right, "columns": (right & out) - left, "contracted": (left & right) - out}
    sizes = sorted(
        math.prod(max((rule.factor(f).size or 1) // ways.get(f, 1), 1) for f in side) for side in sides.values()
    )
    return math.prod(n / (-(-n // tile) * tile) for n in sizes[:2])
