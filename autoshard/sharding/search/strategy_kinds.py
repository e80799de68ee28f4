"""Kinds of plans: what a plan shards besides the batch and the state.

`dp` shards the batch alone (and optimizer state, with `zero1`), `fsdp` also parameters. `tp`, `cp`, `ep` and `pp` shard
hidden units and heads, sequences, experts, and layers. A `hybrid` has two or more of these four.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.sharding.layout.plan_request import CONTEXT, STORING, is_request, parse_request

INNER = ("tp", "cp", "ep", "pp")
KINDS = ("dp", "fsdp", *INNER, "hybrid")

Priced = tuple[str, float, float]  # strategy, step time in microseconds, peak bytes of a device


def kind_of(strategy: str) -> str:
    """Return the kind of a strategy; empty if the text is no strategy, such as that of a table.

    >>> kind_of("dp:2 fsdp:8"), kind_of("fsdp:4 ring:2"), kind_of("ep:4 tp:2 seq"), kind_of("zero1:8")
    ('fsdp', 'cp', 'hybrid', 'dp')
    """
    if not is_request(strategy):
        return ""
    found = parse_request(strategy)
    used = {"cp" if kind in CONTEXT else kind for axis, kind in found.kinds.items() if found.sizes[axis] > 1}
    inner = [kind for kind in INNER if kind in used]
    if inner:
        return inner[0] if len(inner) == 1 else "hybrid"
    return "fsdp" if used.intersection(STORING) or "state" in found.flags else "dp"


def fastest_of_kinds(priced: Iterable[Priced], limit: float) -> dict[str, Priced]:
    """Return the fastest plan of each kind that fits the memory limit, in bytes of one device; the fastest kind first.

    >>> fastest_of_kinds([("fsdp:8", 9.0, 1.0), ("tp:8", 8.0, 9.0), ("dp:4 fsdp:2", 8.5, 1.0)], 4.0)
    {'fsdp': ('dp:4 fsdp:2', 8.5, 1.0)}
    """
    found: dict[str, Priced] = {}
    for each in sorted(priced, key=lambda each: each[1]):
        if each[2] <= limit and (kind := kind_of(each[0])):
            found.setdefault(kind, each)
    return found
