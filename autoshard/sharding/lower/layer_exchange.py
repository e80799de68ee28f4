"""The exchange of layers between the stages of a pipeline, where each stage stores a part of every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from autoshard import _compat
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.spmdrules.core.placement import Spec, axes_of, exchanged_spec
from autoshard.spmdrules.core.reshard_path import reshard_path
from autoshard.spmdrules.families.stacked import EXCHANGES, SPREADS
from autoshard.spmdrules.families.stacked.matrices import MATRIX_STACKS
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
    if op.name not in EXCHANGES:
        return None
    assert (rule := op.rule) is not None
    if op.name in SPREADS:
        layers = [constrain(x, chosen.spec(dims)) for x, dims in zip(args, rule.operands, strict=True)]
        (stack,) = _compat.bind(op.eqn, op.eqn.params, *layers)
        computed = chosen.spec(rule.results[0])
        return [reduce(constrain, (computed, *_path(op, computed, wants[0])), stack)]
    stack, computed = args[0], chosen.spec(rule.operands[0])
    back = _path(op, computed, operand_spec(layout, op.operands[0]))[-2::-1]
    stack = reduce(constrain, (*back, computed), stack)
    return [constrain(x, w) for x, w in zip(_compat.bind(op.eqn, op.eqn.params, stack), wants, strict=True)]


def _path(op: Op, of_layers: Spec, of_stages: Spec) -> list[Spec]:
    """Return the shardings through which a stack goes from shards of all layers to whole layers.

    For matrices, the mesh axes that do not shard a matrix shard the stack first. Then the other mesh axes exchange
    shards, one after the other.

    Args:
        op: the operator.
        of_layers: the sharding in which each device has a shard of every layer.
        of_stages: the sharding in which each stage, or each device, has whole layers.
    """
    if op.name not in MATRIX_STACKS:
        return [exchanged_spec(of_layers, of_stages), of_stages]
    used = {*axes_of(of_layers)}
    first = tuple(a for a in of_stages[0] if a not in used)
    between = (first, *of_layers[1:])
    return [between, *reshard_path(between, of_stages)]
