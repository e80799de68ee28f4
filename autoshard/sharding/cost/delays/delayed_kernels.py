"""Products inside opaque operators that XLA:TPU delays to the end of a loop body, and the memory that this takes.

XLA's latency-hiding scheduler builds the schedule of a loop body backward, and places the end of an asynchronous
collective first (https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc). No operator of the
body uses the result of a gradient's reduce-scatter, because it only goes into a stack. So the reduce-scatters of all
layers in the body run last. The products that compute these gradients run beside them, one after another. Their
operands stay in memory until then, while the body computes the gradients of its other layers.

In straight code, an asynchronous reduce-scatter can end after a loop that follows it. So the unsharded gradient of a
head stays in memory during the loop of the backward pass (`delayed_gradients.held_until`).

Compiled with libtpu 0.0.42.1:

    mixtral-8x22b, v5p:4x8x8   The body has four layers. While it computes the expert gradients of one layer, the
                               tokens, hidden units and their gradients of the other three stay in memory: 3.75 GiB per
                               layer.
    gpt-oss-120b, v5p:4x8x8    The body has two layers. The values of one layer stay in memory.
    gpt-oss-20b, v5p:4x8x8     The gradient of the head is computed before the loop of the backward pass and scattered
                               after it. It takes 1.1 GiB.
    v5p:2x2x2, `fsdp:8`        Four unrolled expert layers in a loop over two microbatches. The compiled peak is
                               1.12 GiB, the estimate 1.36 GiB. Without this rule, it would be 0.61 GiB.
    v6e:2x4                    Reduce-scatters are synchronous, so nothing is delayed. The same holds for v5p:2x2x2
                               without reductions on the SparseCores.
"""

from __future__ import annotations

import numpy as np

from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.spmdrules.ir.program import Program, walk


def ends_of_bodies(program: Program) -> np.ndarray:
    """Return the last operator of the loop body that contains each operator, by number; -1 outside of loops."""
    number = {id(op): n for n, op in enumerate(program.ops())}
    found, blocks = np.full(len(number), -1), [program.block]
    while blocks:  # an outer loop before those inside it
        block = blocks.pop()
        if block.loop and block.ops:
            inside = [number[id(op)] for op in walk(block)]
            found[inside[0] : inside[-1] + 1] = inside[-1]
        blocks += [inner for op in block.ops for inner in op.blocks]
    return found


def held_for_kernels(nbytes: float, operators: np.ndarray, ends: np.ndarray) -> LiveBuffers:
    """Return the buffers that stay in memory after operators, until their delayed products have run.

    Args:
        nbytes: the bytes that the delayed products of one operator read.
        operators: the numbers of the operators.
        ends: see `ends_of_bodies`.
    """
    some = operators[ends[operators] > operators]
    return LiveBuffers(nbytes, some + 1, ends[some])
