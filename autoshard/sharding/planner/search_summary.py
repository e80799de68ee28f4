"""The record of a search that a plan keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.sharding.plan.search_record import PricedPlan, SearchRecord
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.search.candidate import Candidate, SearchCounts


def search_record(priced: Sequence[Candidate], counts: SearchCounts) -> SearchRecord:
    """The record of one search.

    Args:
        priced: the candidates, the fastest first.
        counts: the counts of the search.
    """
    changed = {id(c.layout) for c in counts.changed}
    kept = {id(c.layout) for c in priced}  # of the changed plans only the best is a candidate
    rows = [*priced, *(c for c in counts.changed if id(c.layout) not in kept)]
    tried = sorted((_priced_plan(c, id(c.layout) in changed) for c in rows), key=lambda t: t.step_time_us)
    return SearchRecord({}, counts.proposed or len(priced), counts.duplicates, counts.idle, counts.slow, tuple(tried))


def _priced_plan(candidate: Candidate, changed: bool) -> PricedPlan:
    cost, by_kind = candidate.cost, defaultdict(float)
    for c in cost.collectives:
        by_kind[c.kind] += c.exposed_us
    kind = max(sorted(by_kind), key=lambda k: by_kind[k], default="")
    return PricedPlan(candidate.name, cost.step_time_us, candidate.peak_bytes, cost.compute_us,
                 kind if by_kind[kind] else "", by_kind[kind], changed)  # fmt: skip


def variant_records(made: Sequence[tuple[Mapping[str, Any], ShardingPlan]]) -> tuple[SearchRecord, ...]:
    """The search records of all variants, each with the keywords of its variant."""
    return tuple(replace(each, variant=dict(variant)) for variant, plan in made for each in plan.history)
