"""The buffers that slices of stacks in host memory need on a TPU before a loop uses them.

The copy of a slice begins when the iteration that uses it begins. So the slice has a buffer before its first use. A
slice that is fetched ahead (`loops.host_moves`) has two more buffers:

    for the next iteration     during the whole loop
    for the first iteration    from the end of the loop that makes the stack to the beginning of this one. The slice
                               never leaves the device if that loop keeps it; else, XLA:TPU copies it early, so that the
                               loss hides the copy. If the stack is an argument, this buffer is not counted, because
                               nothing says when the copy begins.

If the compiler chooses when a loop moves its slices, it fetches all of them ahead.

Compiled for v6e:2x4 (libtpu 0.0.42), Llama 3.1 8B with four layers, `fsdp:8`, 24 rows of 8192 tokens, and the input,
the projections and the attention's output of each layer in host memory holds five such slices beside the logits, 672
MiB. If the result of attention is there instead of the input, only one slice of 192 MiB is fetched ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autoshard import _compat
from autoshard.sharding.cost.delays.delayed_gradients import last_operator
from autoshard.sharding.loops.host_moves import HostMoves, host_moves
from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.program.host_memory import fetched_slices
from autoshard.spmdrules.ir.program import Op, Program


def fetch_buffers(
    program: Program, chip: Chip, point: Mapping[int, int], birth: Sequence[int], is_written: Callable[[int], bool]
) -> list[tuple[int, int, int]]:
    """Return the buffers as (a value of the same size, the first point of its use, the last point of its use).

    Args:
        program: the program.
        chip: the device.
        point: the `id` of an operator -> its place in the order in which operators run.
        birth: value -> the point at which it is made.
        is_written: whether a value has a buffer.
    """
    found, makers = list[tuple[int, int, int]](), {v: op for op in program.ops() for v in op.results}
    moves = host_moves(program, chip)
    for v, (loop, k) in fetched_slices(program).items():
        if not is_written(v):
            continue
        begin, end = point[id(loop)], point[id(last_operator(loop))]
        found.append((v, begin, birth[v] - 1))
        if k in moves.get(id(loop), HostMoves()).now:
            continue
        found.append((v, begin, end))
        maker = makers.get(_stack(loop, k))
        if maker is not None:
            found.append((v, point[id(last_operator(maker))] + 1, begin - 1))
    return [each for each in found if each[1] <= each[2]]


def _stack(loop: Op, k: int) -> int:
    """Return the value that a scan slices as its `k`th stack."""
    return loop.operands[sum(_compat.scan_arity(loop.eqn.params)) + k]
