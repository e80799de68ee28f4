"""Tiles of a TPU. Products fill tiles of the matrix unit, and arrays fill tiles of memory; this says how well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set

from autoshard.sharding.cost.kernels.absorbed_reductions import dims_before
from autoshard.sharding.cost.kernels.kernel_kinds import is_kernel
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.machines.constants import TPU_LANES, TPU_SUBLANES
from autoshard.sharding.program.operator_kinds import is_declared
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.ir.program import Block, Op, Program

# Operators whose result has the elements of their operand in the same order.
_COPIES = ("name", "copy", "reduce_precision")
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")


def filled_tile_fraction(
    rule: Rule, strategy: OperatorStrategy, mesh: Mapping[str, int], tile: int, is_convolution: bool = False
) -> float:
    """Return how full the tiles of the matrix unit are for one shard of a product, as a fraction of 1.

    A product has three sizes: rows, columns, and the contracted one. The largest is streamed; the others fill tiles.

    A convolution has two more sizes: the positions in its result, and those in its kernel. The result's positions are
    rows, and the kernel's are contracted. The smaller of the two sizes shares tiles with the channels, as far as it
    fits. It does not if the channels are grouped. In the gradient of a kernel, the result has fewer positions.

    Compiled for v5e (libtpu 0.0.42.1, `benchmarks/convolutions.py`), four convolutions take 1.6, 2.2, 4.5 and 9.9 times
    as long as their operations: 3 x 3 kernels with 192, 96 and 64 channels, and a 7 x 7 kernel from 3 channels to 192.
    This function gives 1 / 1.8, 1 / 1.8, 1 / 4 and 1 / 8.1.

    Args:
        rule: the product's rule.
        strategy: which mesh axes shard its factors.
        mesh: mesh axis -> size.
        tile: elements along one side of a tile.
        is_convolution: whether the product is a convolution.
    """
    if tile <= 1:
        return 1.0
    ways: dict[str, int] = {}
    for axis, factor in strategy.factors.items():
        if factor is not None:
            ways[factor] = ways.get(factor, 1) * mesh[axis]

    def size(factors: Iterable[str]) -> int:
        return math.prod([max(_size(rule, f) // ways.get(f, 1), 1) for f in factors])

    rows, columns, contracted = map(size, _sides(rule))
    positions, taps = _windows(rule) if is_convolution else (set[str](), set[str]())
    fills = sorted(size([f]) for f in min(positions, taps, key=size)) if size(_groups(rule)) == 1 else []
    if size(positions) >= size(taps):
        sizes = rows * size(positions), columns, _filled(contracted, fills, tile)
    else:
        sizes = _filled(rows, fills, tile), columns, contracted * size(taps)
    return math.prod([n / (-(-n // tile) * tile) for n in sorted(sizes)[:2]])


def is_vector_product(rule: Rule) -> bool:
    """Say whether a contraction is a product with vectors: it has no rows, no columns, or no contracted dimension.

    XLA compiles such contractions as elementwise products and sums, without the matrix unit. Examples are
    `bk,bkn->bn`, `bk,bk->b` and `bm,bn->bmn` (libtpu 0.0.42.1, v5e and v6e). Two rows are enough for the matrix unit.
    """
    return any(all(_size(rule, f) == 1 for f in side) for side in _sides(rule))


def is_depthwise(rule: Rule) -> bool:
    """Say whether a convolution has a kernel for each channel, or computes the gradient of such a kernel.

    XLA computes it on the vector units.
    """
    rows, columns, contracted = _sides(rule)
    return any(all(_size(rule, f) == 1 for f in sides) for sides in (columns | contracted, columns | rows))


def _size(rule: Rule, factor: str) -> int:
    return rule.factor(factor).size or 1


def _filled(size: int, more: Iterable[int], tile: int) -> int:
    """Multiply a size by further sizes, in their order, while the product fits a tile."""
    for each in more:
        if size * each > tile:
            break
        size *= each
    return size


def _factors(rule: Rule) -> tuple[set[str], set[str], set[str]]:
    """Return the factors of the two operands and of the result."""
    left, right = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    return left, right, {f for dim in rule.results[0] for f in dim}


def _sides(rule: Rule) -> tuple[set[str], set[str], set[str]]:
    """Return the factors of a product's rows, of its columns, and those that it contracts."""
    left, right, out = _factors(rule)
    return (left & out) - right, (right & out) - left, (left & right) - out


def _groups(rule: Rule) -> set[str]:
    """Return the factors that both operands and the result have."""
    left, right, out = _factors(rule)
    return left & right & out


def _windows(rule: Rule) -> tuple[set[str], set[str]]:
    """Return the factors of a convolution's positions: those in the result, and those in the kernel."""
    left, right, out = _factors(rule)
    return out - left - right, right - left - out


def row_major_values(program: Program) -> frozenset[int]:
    """Return the values that are stored row by row: operands and results of declared operators, and stacks of them.

    XLA chooses the order of dimensions in which other values are stored. It stores an operand's source in the same
    order, if the operand is computed from it elementwise, as from a product before its bias, or is a transpose of it
    that keeps the last dimension. Compiled for
    v5e (libtpu 0.0.42), stacks of the queries, keys, values and results of splash attention with heads of 64 elements
    take twice their bytes. The queries are stored before they are scaled.
    """
    found: set[int] = set()

    def visit(block: Block) -> None:
        for op in reversed(block.ops):
            if is_declared(op):
                found.update(v for v in op.operands if v >= 0)
            elif op.results and op.results[0] in found:
                found.update(_sources_of_rows(op))
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


def padded_rows(program: Program) -> dict[int, float]:
    """Return the results of declared operators, also moved or cast ones, and the factor by which rows are padded.

    A gathered copy is stored in the same order of dimensions, and so has the same padding. Compiled for v5e and v6e
    (libtpu 0.0.42.1), `tp:8`, GPT 1.3B gathers the results and gradients of splash attention with heads of 64 elements.
    The gathered arrays take twice their bytes.
    """
    found: dict[int, float] = {}
    for op in program.ops():
        takes = not found.keys().isdisjoint(op.operands)
        if is_declared(op) or (takes and any(v in found for v in _sources_of_rows(op))):
            shapes = ((v, program.avals[v].shape) for v in op.results)
            found |= {v: row_padding(shape[-1]) for v, shape in shapes if shape and shape[-1] % TPU_LANES}
    return found


def _sources_of_rows(op: Op) -> list[int]:
    """Return the arrays from which an operator computes its result row by row, such as a product before its bias."""
    arrays = [n for n, v in enumerate(op.operands) if v >= 0 and op.eqn.invars[n].aval.shape]
    if not arrays or len(op.results) != 1 or op.rule is None:
        return []
    after = op.eqn.outvars[0].aval.shape
    if not is_kernel(op) and op.name not in ("transpose", "rev", *_RESHAPES):  # elementwise
        return [op.operands[n] for n in arrays if op.eqn.invars[n].aval.shape == after]
    if len(arrays) != 1:
        return []
    before = op.eqn.invars[arrays[0]].aval.shape
    if op.name == "transpose":
        keeps = op.eqn.params["permutation"][-1] == len(before) - 1
    elif op.name in _RESHAPES:
        keeps = before[-1:] == after[-1:] and [n for n in before if n > 1] == [n for n in after if n > 1]
    else:
        keeps = op.name in _COPIES
    return [op.operands[arrays[0]]] if keeps else []


def batches_of_products(program: Program, written: Set[int]) -> dict[int, frozenset[int]]:
    """Return the batch dimensions of the operands of products. XLA:TPU stores these operands without tiles along them.

    The matrix unit multiplies two dimensions of each operand, so all elements of a tile have the same batch index.
    Compiled for v5e (libtpu 0.0.42.1), queries, keys and scores of 24, 49, 72 or 196 positions with 128 or 512 rows on
    a device have tiles along the positions and the features of a head, never along the rows. The stored result of
    attention has tiles along the rows, because the product that reads it has no batch.

    Args:
        program: the program.
        written: the values that are stored in memory.

    Returns:
        Stored value -> those of its dimensions. Stacks of such values are values, too.
    """
    maker = {v: op for op in program.ops() for v in op.results}
    found: dict[int, frozenset[int]] = {}
    todo: list[tuple[int, frozenset[int]]] = []
    for op in program.ops():
        if op.name == "dot_general" and op.rule is not None and not is_vector_product(op.rule):
            _, batch = op.eqn.params["dimension_numbers"]
            todo += [(v, frozenset(dims)) for v, dims in zip(op.operands, batch, strict=True) if v >= 0 and dims]
    seen = {*todo}
    while todo:
        v, dims = todo.pop()
        if v in written or v not in maker:
            found[v] = found.get(v, frozenset()) | dims
            continue
        size, op = program.avals[v].size, maker[v]
        sources = [(u, dims_before(op, n, dims)) for n, u in enumerate(op.operands) if u >= 0 and not is_kernel(op)]
        more = {(u, own) for u, own in sources if own and program.avals[u].size >= size} - seen
        seen |= more
        todo += more
    for op in reversed([*program.ops()]):  # inner loops first
        found |= {
            tie.outer: frozenset(d + 1 for d in found[tie.inner])
            for tie in op.edges if tie.stacked and tie.inner in found
        }  # fmt: skip
    return found


def row_padding(size: int) -> float:
    """Return the factor by which rows of this many elements grow, as they are stored in whole tiles.

    >>> row_padding(64), row_padding(128), row_padding(192)
    (2.0, 1.0, 1.3333333333333333)
    """
    return -(-size // TPU_LANES) * TPU_LANES / size if size else 1.0


def tile_padding(sizes: Sequence[int]) -> float:
    """Return the factor by which an array grows that is stored in tiles along two of its dimensions.

    XLA chooses the two dimensions with the least padding.

    Args:
        sizes: elements along each dimension that can have tiles. A single one has the lanes.

    >>> tile_padding([196, 64]), tile_padding([256, 12]), tile_padding([1, 128])
    (1.3061224489795917, 1.3333333333333333, 1.0)
    """
    sizes = [n for n in sizes if n]
    columns = [min((_column_padding(other) for m, other in enumerate(sizes) if m != n), default=1.0)
               for n in range(len(sizes))]  # fmt: skip
    return min((row_padding(n) * column for n, column in zip(sizes, columns, strict=True)), default=1.0)


def _column_padding(size: int) -> float:
    tile = min(TPU_SUBLANES, 1 << (size - 1).bit_length())
    return -(-size // tile) * tile / size
