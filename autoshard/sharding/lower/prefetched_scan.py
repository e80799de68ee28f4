"""Scans that gather the parameters of their next iteration while they compute, as `gather="prefetch"` asks.

    before    gather the slices of the first iteration
    body      compute with the gathered parameters that the carry holds; gather the slices of the next iteration, and
              return these in the carry

The gathers of the next iteration depend on nothing that the iteration computes, so that they run beside all of its
compute, and the carry needs them at its end. That is a dependence of the data: compilers have to obey it. Whatever
stands before a gather (a cast to a narrower type, rounding to 8 bits) is computed for the next iteration too. The last
iteration gathers its own slices again, to no use. A device holds the gathered parameters of two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard.sharding.layout.loop_gathers import LoopGathers
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.spmdrules.ir.program import Op

if TYPE_CHECKING:
    from autoshard.sharding.lower.lowering import Lowering


def prefetched_scan(
    lowering: Lowering, op: Op, found: LoopGathers, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]
) -> list[Any]:
    """Return the results of a scan that gathers one iteration early.

    Args:
        lowering: lowers the body.
        op: the scan.
        found: what it gathers early.
        consts: the constants of its body.
        init: its initial carry.
        xs: the stacks that it slices.
    """
    block, params = op.blocks[0], op.eqn.params
    length, is_reversed = params["length"], params["reverse"]
    types = [lowering.layout.axes.program.avals[gather.value].dtype for gather in found.early]

    def gathered(index: Any) -> list[Any]:
        env = dict(zip(block.inputs[: len(consts)], consts, strict=True))
        for value, k in found.slices.items():
            one = lax.dynamic_index_in_dim(xs[k], index, keepdims=False, allow_negative_indices=False)
            env[value] = lowering.constrain(one, operand_spec(lowering.layout, value))
        for each in found.chain:
            atoms = zip(each.eqn.invars, each.operands, strict=True)
            args = [atom.val if isinstance(atom, _compat.Literal) else env[v] for atom, v in atoms]
            with _compat.source_of(each.eqn):
                env.update(zip(each.results, lowering.op(each, args), strict=True))
        return [lowering.gathered(env[gather.value], gather) for gather in found.early]

    def body(state: tuple[Any, list[Any], list[Any]], x: list[Any]) -> tuple[Any, list[Any]]:
        index, carry, now = state
        following = jnp.maximum(index - 1, 0) if is_reversed else jnp.minimum(index + 1, length - 1)
        after = gathered(following)
        now = [lowering.constrain(each, gather.spec) for each, gather in zip(now, found.early, strict=True)]
        wide = [each.astype(dtype) for each, dtype in zip(now, types, strict=True)]
        with lowering.holding({**lowering.held, **dict(zip(found.early, wide, strict=True))}):
            out = lowering.function(block)(*consts, *carry, *x)
        return (following, out[: len(init)], after), out[len(init) :]

    first = jnp.asarray(length - 1 if is_reversed else 0, jnp.int32)
    rest = {k: params[k] for k in ("length", "reverse", "unroll")}
    (_, carry, _), ys = lax.scan(body, (first, list(init), gathered(first)), list(xs), **rest)
    return [*carry, *ys]
