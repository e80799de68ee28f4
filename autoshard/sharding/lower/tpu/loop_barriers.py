"""Loops that wait for the gradients of the code before them, on TPUs.

Where XLA:TPU emits all-reduces instead of reduce-scatters, it computes the gradient of a model's head after the
backward loop, and holds the logits until then. An optimization barrier joins such gradients with the carry of the next
loop, so that the loop starts after them.

Compiled for tpu7x:2x2x1 (libtpu 0.0.42.1), Llama 3.1 8B with four layers under `fsdp:8` and the default options
(`benchmarks/gradient_barriers.py head`):

    remat                        peak with, without the barrier   estimate    roofline with, without
    full                         12.0, 15.4 GiB                   12.0 GiB    331.6, 331.3 ms
    keep:qkv+context+out_proj    14.6, 17.4 GiB                   14.6 GiB    311.1, 311.1 ms
    host:residual+qkv+out_proj   11.9, 14.5 GiB                   11.9 GiB    385.4, 385.4 ms

The next loop waits, whatever it computes. Where XLA emits reduce-scatters, the barrier changes nothing (v6e:2x4,
v5e:2x4) or costs memory (v5p:2x2x2: 1.2 GiB more), so there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax import lax

from autoshard import _compat
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.loops.host_moves import can_wait
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Block, Op

_LOOPS = ("scan", "while")


class LoopBarriers:
    """The barriers before the loops of a program.

    Args:
        block: the outermost block of the program.
        roles: the roles of its values.
    """

    def __init__(self, block: Block, roles: Roles):
        # `id` of a scan -> the variables of the gradients that are computed after the scan before it.
        self._gradients: dict[int, list[Any]] = {}
        for each in _blocks(block):
            gradients: list[Any] = []
            for op in each.ops:
                if op.name == "scan":
                    self._gradients[id(op)], gradients = gradients, []
                elif _has_product(op):
                    made = zip(op.results, op.eqn.outvars, strict=True)
                    gradients += [variable for value, variable in made if value in roles.gradients]

    def before(self, op: Op, env: dict[Any, Any]) -> None:
        """Join the carry of a scan with the gradients that it waits for.

        Args:
            op: the operator that is lowered next.
            env: variable of the jaxpr -> value. Values that wait are replaced by results of the barrier.
        """
        if not (gradients := self._gradients.get(id(op))):
            return
        constants, carries = _compat.scan_arity(op.eqn.params)
        carry = [v for v in op.eqn.invars[constants : constants + carries] if not isinstance(v, _compat.Literal)]
        waiting = list(dict.fromkeys([*gradients, *(v for v in carry if can_wait(env[v]))]))
        if len(waiting) > len(gradients):
            values = lax.optimization_barrier([env[v] for v in waiting])
            env.update(zip(waiting, values, strict=True))


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for op in block.ops:
        for inner in op.blocks:
            yield from _blocks(inner)


def _has_product(op: Op) -> bool:
    """Whether an operator is a product, or calls a function that has one. A loop has finished its own gradients."""
    inner = [each for block in op.blocks for each in block.ops]
    return op.name in CONTRACTIONS or (op.name not in _LOOPS and any(map(_has_product, inner)))
