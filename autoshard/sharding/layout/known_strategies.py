"""Strategies of operators that were chosen before in this process.

Equal layers have equal operators, and so have the variants of one program. `choose_strategy` reads nothing but its
arguments, so equal arguments have equal strategies, whatever program they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard._caches import drop_older_half
from autoshard.sharding.layout.constants import MOST_KNOWN_STRATEGIES
from autoshard.sharding.layout.operator_strategy import OperandSpecs, OperatorStrategy, choose_strategy
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.core.rule import Rule

_known: dict[Any, tuple[Rule, OperatorStrategy]] = {}


def known_strategy(
    rule: Rule,
    operand_bytes: Sequence[float],
    operand_specs: Sequence[Spec],
    result_bytes: Sequence[float],
    result_specs: Sequence[Spec],
    mesh: Mapping[str, int],
    flops: float,
    prices: LinkPrices,
    forced: Mapping[str, Sequence[str | None]] | None = None,
) -> OperatorStrategy:
    """Return the strategy of an operator; see `choose_strategy`.

    Args:
        rule: its rule. Rules are compared by identity, because the registry keeps one for equal operators.
        operand_bytes: unsharded bytes of its operands.
        operand_specs: the shardings of its operands.
        result_bytes: unsharded bytes of its results.
        result_specs: the wanted shardings of its results.
        mesh: mesh axis -> size.
        flops: FLOPs of the unsharded operator.
        prices: what bytes cost on the links of the machine.
        forced: mesh axis -> the only factors that it may shard.
    """
    sides = (*operand_bytes, *operand_specs, *result_bytes, *result_specs)
    key = (id(rule), prices, flops, *mesh.items(), *sides)
    if forced:
        key = (key, *((axis, *factors) for axis, factors in forced.items()))
    found = _known.get(key)
    if found is None:
        if len(_known) >= MOST_KNOWN_STRATEGIES:
            drop_older_half(_known)
        operands = OperandSpecs(rule.operands, operand_bytes, operand_specs, rule, mesh)
        results = OperandSpecs(rule.results, result_bytes, result_specs, rule, mesh)
        chosen = choose_strategy(rule, operands, results, mesh, flops, prices, forced)
        found = _known[key] = rule, chosen  # keeps the rule, so that no other rule gets its id
    return found[1]
