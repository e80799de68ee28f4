"""Which kernels of an opaque operator XLA:TPU runs at the end of a loop's body, and what it holds for them until then.

XLA's latency-hiding scheduler orders a body from the end, and takes the end of an asynchronous collective before
anything else (https://github.com/openxla/xla/blob/main/xla/service/latency_hiding_scheduler.cc). Only the stack of all
iterations takes a gradient that is reduce-scattered. So the reduce-scatters of all layers of a body come last, and the
products that make these gradients run beside them, one after another. What the products read is held until then, also
while the body computes the gradients of its other layers. In straight code, too, an asynchronous reduce-scatter runs
behind the loop that comes before its end, so the whole sum of the gradient of a head is held over the backward pass
(`delayed_gradients.held_until`).

Compiled with libtpu 0.0.42.1:

    mixtral-8x22b on v5p:4x8x8   a body of four layers holds the tokens, the hidden units and their gradients of three
                                 layers, 3.75 GiB each, while it computes the gradients of the experts of the fourth
    gpt-oss-120b on v5p:4x8x8    so does a body of two layers for one
    gpt-oss-20b on v5p:4x8x8     the gradient of the head is computed before the loop of the backward pass and scattered
                                 after it: 1.1 GiB. So is that of mixtral-8x22b.
    v5p:2x2x2, `fsdp:8`          four layers of experts, one after another in a loop over two microbatches: the compiled
                                 peak is 1.12 GiB, the estimate 1.36, and 0.61 without this rule
    v6e:2x4                      reduce-scatters are synchronous. Each product runs where the program has it. So it does
                                 on v5p:2x2x2 without reductions on the SparseCores.
"""

from __future__ import annotations

import numpy as np

from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.spmdrules.ir.program import Program, walk


def ends_of_bodies(program: Program) -> np.ndarray:
    """Return, by the number of each operator, that of the last operator of the loop's body around it; -1 if none is."""
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
    """Return what the delayed kernels of operators hold after these operators.

    Args:
        nbytes: the bytes that the kernels of one operator read.
        operators: the numbers of the operators.
        ends: see `ends_of_bodies`.
    """
    some = operators[ends[operators] > operators]
    return LiveBuffers(nbytes, some + 1, ends[some])
