"""The kind of a plan: what it shards besides the batch and the state.

`dp` shards only the batch and, with `zero1`, the optimizer state. `fsdp` also shards parameters. `tp` shards hidden
units and heads, `cp` sequences, `ep` experts, and `pp` layers. A `hybrid` combines two or more of these four.
"""

from __future__ import annotations

from autoshard.sharding.layout.plan_request import CONTEXT, STORING, is_request, parse_request

INNER = ("tp", "cp", "ep", "pp")
KINDS = ("dp", "fsdp", *INNER, "hybrid")


def kind_of(strategy: str) -> str:
    """Return the kind of a strategy; empty for other texts, such as that of a table.

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
