"""Scans that gather the parameters of their next iteration while they compute, as `gather="prefetch"` asks.

    before    gather the slices of the first iteration
    body      compute with the gathered parameters that the carry holds; gather the slices of the next iteration, and
              return these in the carry

The gathers of the next iteration depend on nothing that the current one computes, so they run beside all of its
compute. The carry needs them at its end. This is a data dependence, which compilers have to obey. Operators before a
gather (a cast to a narrower type, rounding to 8 bits) run for the next iteration, too. The last iteration gathers its
own slices again, without a use. A device holds the gathered parameters of two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.loop_gathers import Gather, loop_gathers, loop_operands
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.sharding.lower.activation_spread import with_planned_rows
from autoshard.sharding.lower.body_lowering import BodyLowering
from autoshard.sharding.lower.tpu.host_stacks import scan_with_host_stacks
from autoshard.sharding.lower.tpu.stack_layouts import pinned_slices
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.spmdrules.ir.program import Op


@shown
@dataclass(frozen=True, eq=False)
class EarlyGathers:
    """What a scan gathers one iteration early.

    Attributes:
        gathers: the gathers.
        chain: the operators that compute what is gathered, in order.
        slices: slice of an operand -> the number of the operand among those that the scan slices.
        late: what the scan cannot gather early -> the reason.
        chains: every value that it can gather early.
    """

    gathers: tuple[Gather, ...]
    chain: tuple[Op, ...]
    slices: dict[int, int]
    late: dict[Gather, str]
    chains: frozenset[int]


def early_gathers(layout: Layout, scan: Op, prices: LinkPrices, values: frozenset[int]) -> EarlyGathers:
    """Return what a scan gathers one iteration early under a layout.

    Args:
        layout: the layout.
        scan: the operator.
        prices: what bytes on the links of the target cost.
        values: the parameters that it gathers early (`StepCost.early`).
    """
    operands = loop_operands(layout.axes, layout.roles, scan)
    every = loop_gathers(layout, scan, prices)
    early = tuple(gather for gather in every if gather.value in operands.chains and gather.value in values)
    chain = dict.fromkeys(op for gather in early for op in operands.chains[gather.value])
    late = {gather: operands.late[gather.value] for gather in every if gather.value in operands.late}
    return EarlyGathers(early, tuple(chain), operands.slices, late, frozenset(operands.chains))


def prefetched_scan(
    lowering: BodyLowering, op: Op, found: EarlyGathers, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]
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
    types = [lowering.layout.axes.program.avals[gather.value].dtype for gather in found.gathers]

    def gathered(index: Any) -> list[Any]:
        env = dict(zip(block.inputs[: len(consts)], consts, strict=True))
        for value, k in found.slices.items():
            one = lax.dynamic_index_in_dim(xs[k], index, keepdims=False, allow_negative_indices=False)
            env[value] = lowering.constrain(one, operand_spec(lowering.layout, value))
        env = lowering.computed(found.chain, env)
        return [lowering.gathered(env[gather.value], gather) for gather in found.gathers]

    def body(state: tuple[Any, list[Any], list[Any]], x: list[Any]) -> tuple[Any, list[Any]]:
        index, carry, now = state
        following = jnp.maximum(index - 1, 0) if is_reversed else jnp.minimum(index + 1, length - 1)
        after = gathered(following)
        x = pinned_slices(lowering, op, len(consts) + len(init), x)
        carry = with_planned_rows(lowering.layout, op.operands[len(consts) :], carry, lowering.constrain)
        now = [lowering.constrain(each, gather.spec) for each, gather in zip(now, found.gathers, strict=True)]
        wide = [each.astype(dtype) for each, dtype in zip(now, types, strict=True)]
        with lowering.holding({**lowering.held, **dict(zip(found.gathers, wide, strict=True))}):
            out = lowering.function(block)(*consts, *carry, *x)
        return (following, out[: len(init)], after), out[len(init) :]

    first = jnp.asarray(length - 1 if is_reversed else 0, jnp.int32)
    (_, carry, _), ys = scan_with_host_stacks(lowering, op, body, (first, list(init), gathered(first)), list(xs))
    return [*carry, *ys]
