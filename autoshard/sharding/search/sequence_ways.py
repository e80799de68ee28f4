"""Other ways of attention for the best plans that shard a sequence: `ulysses`, `ring` and both, instead of `cp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import strategy_in_layout
from autoshard.sharding.layout.plan_request import is_request, layout_of, parse_request
from autoshard.sharding.layout.sequence_operators import sequence_problems, with_forms
from autoshard.sharding.layout.sequence_words import sequence_variants
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.search.candidate import Candidate
from autoshard.sharding.search.constants import PLANS_WITH_OTHER_ATTENTION
from autoshard.spmdrules.ir.program import Op

_OUTER = ("pp", "dp", "zero1", "fsdp")


def sequence_ways(
    known: Sequence[Candidate],
    price: Callable[[str, Layout], Candidate | None],
    mesh: Mapping[str, int] | None,
    prices: LinkPrices,
    operators: Sequence[Op],
) -> list[Candidate]:
    """Return the best plans that shard a sequence, one for each use of the inner mesh axes, with other attention.

    The best plan whose inner axes shard nothing but the sequence is always one of them. Without a way of attention, the
    last device of a causal sequence has nearly twice the mean work, so that this plan seems slower than with a way.

    Args:
        known: the known plans, best first; those that do not fit come last, the smallest first.
        price: prices a layout; None if it is not possible.
        mesh: mesh axis -> size, if the mesh is given.
        prices: what bytes cost on the links of the target.
        operators: one of each class of equal operators.
    """
    attention = [op for op, _ in with_forms(operators)]
    found, tried = [], set()
    for candidate in known:
        if not is_request(candidate.name) or not candidate.layout.sharded_classes():
            continue
        requested = replace(parse_request(candidate.name), **({"fixed_mesh": True} if mesh is not None else {}))
        inner = frozenset((a, n) for a, n in requested.sizes.items() if requested.kinds[a] not in _OUTER)
        is_wanted = len(tried) < PLANS_WITH_OTHER_ATTENTION or (len(inner) == 1 and 1 not in map(len, tried))
        words = []
        if is_wanted and inner not in tried:
            words = list(sequence_variants(candidate.layout.axes, requested))
        for name in words:
            new = replace(parse_request(name), fixed_mesh=requested.fixed_mesh)
            layout = layout_of(candidate.layout.axes, candidate.layout.roles, new)
            if not sequence_problems(layout, partial(strategy_in_layout, layout, prices=prices), operators=attention):
                priced = price(name, layout)
                found += [priced] if priced is not None else []
        tried |= {inner} if words else set()
    return found
