"""The strategy of attention over a sequence that mesh axes shard: gathered keys, all-to-alls over heads, or a ring.

    gather   the mesh axis shards the queries, and keys are gathered, as the operator's rule says. Under a causal mask
             devices exchange queries first, so that all have the same work
    ulysses  inside the operator, the mesh axis shards key-value heads. If there are too few, it also shards the query
             heads of each
    ring     keys travel around the devices of the mesh axis, see `kernels.sequence`

Sources: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses); Liu et al. 2023, arXiv:2310.01889 (ring).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoshard.sharding.layout.operator_strategy import Move, OperatorStrategy, SequencePlan, shard_types
from autoshard.sharding.plan.sharding_plan import SEQUENCE_WAYS
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.custom_ops.sequence_forms import SequenceForm, SequenceForms, rule_of_form
from autoshard.spmdrules.ir.program import Op

GATHER, ULYSSES, RING = SEQUENCE_WAYS

Choose = Callable[[Rule, Mapping[str, Sequence[str]]], OperatorStrategy]


def over_sequence(
    op: Op, forms: SequenceForms, mesh: Mapping[str, int], sequence: Mapping[str, str], choose: Choose
) -> OperatorStrategy:
    """The strategy of attention.

    Args:
        op: the operator.
        forms: its forms.
        mesh: mesh axis -> size.
        sequence: see `Layout`.
        choose: returns the strategy by a rule, in which some mesh axes may shard only some factors.
    """
    assert op.rule is not None
    forced = {a: forms.heads for a in mesh if sequence.get(a) == ULYSSES}
    rings = [a for a in mesh if sequence.get(a) == RING and mesh[a] > 1]
    form = forms.ring if rings else forms.gathered
    if form is None:
        return choose(op.rule, forced)
    rule = rule_of_form(form, [v.aval for v in op.eqn.invars]) if rings else op.rule
    chosen = choose(rule, {**forced, **{a: (forms.sequence,) for a in rings}})
    axes = tuple(a for a, f in chosen.factors.items() if f == forms.sequence and mesh[a] > 1)
    if not axes or (not rings and not _balances(op, forms, mesh, sequence, axes)):
        return chosen
    return _on_shards(op, forms, form, rule, mesh, chosen, axes)


def _balances(
    op: Op, forms: SequenceForms, mesh: Mapping[str, int], sequence: Mapping[str, str], axes: Sequence[str]
) -> bool:
    """Whether devices exchange queries: all mesh axes of the sequence have the word, and shards have two halves."""
    assert op.rule is not None
    blocks = (op.rule.by_name[forms.sequence].size or 1) // math.prod(mesh[a] for a in axes)
    return blocks % 2 == 0 and all(sequence.get(a) == GATHER for a in axes)


def _on_shards(
    op: Op,
    forms: SequenceForms,
    form: SequenceForm,
    rule: Rule,
    mesh: Mapping[str, int],
    chosen: OperatorStrategy,
    axes: tuple[str, ...],
) -> OperatorStrategy:
    devices = math.prod(mesh[a] for a in axes)
    cost = form.cost(devices, *shard_types(op, rule, chosen, mesh))
    moves = list(chosen.moves)
    if cost.hops:
        moves.append(
            Move("collective-permute", axes, forms.keys[0], cost.hop_bytes, cost.hops * cost.hop_bytes, cost.hops)
        )
    if cost.exchange_bytes:
        moves.append(Move("collective-permute", axes, -1, cost.exchange_bytes, cost.exchange_bytes))
    return replace(chosen, moves=tuple(moves), form=SequencePlan(form, rule, axes, cost))
