"""The size of the heap in which XLA:TPU places buffers.

XLA:TPU goes through the scheduled program. Each buffer gets the lowest free place that is large enough, from the
operator that makes it to the last one that takes it. A hole between buffers that is smaller than the next ones stays
empty, so the heap is larger than the buffers that are live at once. A value that is written over another one stays in
its place.

Placed in this way, the compiled buffers of 31 training steps for v5e, v5p and v6e (libtpu 0.0.42.1) give the size of
the heap in the compiler's report within 2 % for 29 of them, and 7 % less and 4 % more for the other two. The live
buffers alone are up to 23 % smaller.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush

from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.fusion import Fusion
from autoshard.spmdrules.ir.program import Op, Program, inlined

ALIGNMENT = 512  # bytes; all offsets in these programs are multiples of it


def heap_bytes(first: Sequence[int], last: Sequence[int], sizes: Sequence[float], divided: Sequence[bool] = ()) -> int:
    """Return the size of the heap.

    Args:
        first: for each buffer, the point at which it is made. Buffers of the same point are placed in their order.
        last: the point at which it is taken last.
        sizes: its bytes.
        divided: whether it consists of small arrays that fill any holes, as the memory of an opaque operator. It has a
            single point, and comes after the others of that point.

    The last buffer fits where the first one was, or it does not:

    >>> heap_bytes([0, 1, 2], [1, 3, 3], [2048, 1024, 2048]), heap_bytes([0, 1, 2], [1, 3, 3], [2048, 1024, 4096])
    (3072, 7168)

    Small arrays fill the hole:

    >>> heap_bytes([0, 1, 2], [1, 3, 2], [2048, 1024, 4096], [False, False, True])
    5120
    """
    begins, ends = [0], [1 << 62]  # of the holes
    live: list[tuple[int, int, int]] = []  # last, begin, end
    top = 0
    for n in sorted(range(len(first)), key=first.__getitem__):
        size, at = -(-int(sizes[n]) // ALIGNMENT) * ALIGNMENT, first[n]
        if size <= 0 or last[n] < at:
            continue
        while live and live[0][0] < at:
            _free(begins, ends, *heappop(live)[1:])
        if divided and divided[n]:
            top = max(top, _filled(begins, ends, size))
            continue
        hole = next(k for k, begin in enumerate(begins) if ends[k] - begin >= size)
        begin = begins[hole]
        end = begin + size
        heappush(live, (last[n], begin, end))
        if end < ends[hole]:
            begins[hole] = end
        else:
            del begins[hole], ends[hole]
        top = max(top, end)
    return top


def first_stacks(program: Program, roles: Roles, fusion: Fusion) -> tuple[list[int], Op | None]:
    """Return the stacks that the first loop fills, and the first kernel that takes parameters."""
    loop = next((op for op in inlined(program.block) if op.name == "scan"), None)
    if loop is None:
        return [], None
    stacks = [tie.outer for tie in loop.edges if tie.stacked and tie.outer in loop.results]
    for op in program.ops():
        takes = id(op) in fusion.kernels and any(roles.inputs.get(v) == "parameter" for v in op.operands)
        if op is loop or takes:
            return stacks, op
    return stacks, loop


def _filled(begins: Sequence[int], ends: Sequence[int], size: int) -> int:
    """Return how far arrays of `size` bytes in total reach, if they fill the lowest holes."""
    for begin, end in zip(begins, ends, strict=True):
        if end - begin >= size:
            return begin + size
        size -= end - begin
    return 0


def _free(begins: list[int], ends: list[int], begin: int, end: int) -> None:
    """Add a hole, and join it with those next to it."""
    before, after = bisect_left(ends, begin), bisect_right(begins, end) - 1
    if after >= 0 and begins[after] == end:
        end = ends[after]
        del begins[after], ends[after]
    if before < len(ends) and ends[before] == begin:
        ends[before] = end
    else:
        begins.insert(before, begin)
        ends.insert(before, end)
