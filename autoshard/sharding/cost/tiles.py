"""Tiles of a TPU. Products fill tiles of the matrix unit, and arrays fill tiles of memory; this says how well."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autoshard.sharding.cost.constants import TPU_LANES
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.program.operator_kinds import is_declared
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.ir.program import Block, Program

# Operators whose result has the elements of their operand in the same order.
_COPIES = ("name", "copy", "reduce_precision")


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
    sizes = [math.prod([max((rule.by_name[f].size or 1) // ways.get(f, 1), 1) for f in side]) for side in _sides(rule)]
    return math.prod([n / (-(-n // tile) * tile) for n in sorted(sizes)[:2]])


def is_row_product(rule: Rule) -> bool:
    """Say whether a contraction multiplies rows with rows: neither operand has a dimension that the other lacks.

    XLA compiles it as elementwise products and sums, which do not use the matrix unit (libtpu 0.0.42.1, v5e).
    """
    rows, columns, _ = _sides(rule)
    return all((rule.factor(f).size or 1) == 1 for f in rows | columns)


def _sides(rule: Rule) -> tuple[set[str], set[str], set[str]]:
    """Return the factors of a product's rows, of its columns, and those that it contracts."""
    left, right = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    out = {f for dim in rule.results[0] for f in dim}
    return (left & out) - right, (right & out) - left, (left & right) - out


def row_major_values(program: Program) -> frozenset[int]:
    """Return the values that are stored row by row: the results of declared operators, and stacks of them.

    XLA chooses the order of dimensions in which other values are stored. Compiled for v5e (libtpu 0.0.42), a stack of
    results of splash attention with heads of 64 elements takes twice its bytes.
    """
    found: set[int] = set()

    def visit(block: Block) -> None:
        for op in block.ops:
            if is_declared(op):
                found.update(op.results)
            elif op.name in _COPIES and op.operands[0] in found:
                found.update(op.results)
            for inner in op.blocks:
                visit(inner)
            found.update(tie.outer for tie in op.edges if tie.inner in found and tie.outer in op.results)

    visit(program.block)
    return frozenset(found)


def row_padding(size: int) -> float:
    """Return the factor by which rows of this many elements grow, as they are stored in whole tiles.

    >>> row_padding(64), row_padding(128), row_padding(192)
    (2.0, 1.0, 1.3333333333333333)
    """
    return -(-size // TPU_LANES) * TPU_LANES / size if size else 1.0
