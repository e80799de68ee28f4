"""The exchange of layers between the stages of a pipeline, where each stage stores a part of every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard import _compat
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.spmdrules.core.placement import Spec, exchanged_spec
from autoshard.spmdrules.families.stages import LAYER_STACKS, TO_STAGES
from autoshard.spmdrules.ir.program import Op


def exchanged_layers(
    layout: Layout,
    op: Op,
    chosen: OperatorStrategy,
    args: Sequence[Any],
    wants: Sequence[Spec],
    constrain: Callable[[Any, Spec], Any],
) -> list[Any] | None:
    """Return the results of an operator that gives layers to the stages or takes them back; None for any other one.

    The stages exchange shards, in an all-to-all. What else shards a layer is gathered afterwards, or taken before. In
    one step, XLA's partitioner would gather the layers of all stages.

    Args:
        layout: the layout.
        op: the operator.
        chosen: its strategy.
        args: its operands.
        wants: the wanted shardings of its results.
        constrain: returns an array with a sharding.
    """
    if op.name not in LAYER_STACKS:
        return None
    assert (rule := op.rule) is not None
    if op.name in TO_STAGES:
        layers = [constrain(x, chosen.spec(dims)) for x, dims in zip(args, rule.operands, strict=True)]
        (stack,) = _compat.bind(op.eqn, op.eqn.params, *layers)
        computed = chosen.spec(rule.results[0])
        for spec in (computed, exchanged_spec(computed, wants[0]), wants[0]):
            stack = constrain(stack, spec)
        return [stack]
    stack, computed = args[0], chosen.spec(rule.operands[0])
    for spec in (exchanged_spec(computed, operand_spec(layout, op.operands[0])), computed):
        stack = constrain(stack, spec)
    return [constrain(x, w) for x, w in zip(_compat.bind(op.eqn, op.eqn.params, stack), wants, strict=True)]
