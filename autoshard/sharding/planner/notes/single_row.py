"""The note on a batch of one row, whose positions are sharded as the batch and as a sequence."""

from __future__ import annotations

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_request import OF_BATCH, is_request, parse_request
from autoshard.sharding.layout.sequence_strategy import RING


def single_row_notes(layout: Layout, words: str) -> list[str]:
    """Say that mesh axes of the batch shard the sequence, if the batch has one row and attention runs as words say.

    Args:
        layout: the layout.
        words: the strategy that it is made from.
    """
    if layout.roles.batch not in layout.roles.context or not layout.sequence or not is_request(words):
        return []
    requested = parse_request(words)
    sizes = {a: n for a, n in requested.sizes.items() if n > 1 and requested.kinds[a] in OF_BATCH}
    if not sizes:
        return []
    rings = [a for a, way in layout.sequence.items() if way == RING]
    of_ring = f"The ring has {layout.shard_count(rings)} devices"
    attention = of_ring if rings else f"Attention gathers keys over {', '.join(sizes)}"
    return [f"the batch has one row, so {' and '.join(f'{a}:{n}' for a, n in sizes.items())} also "
            f"shard{'s' * (len(sizes) == 1)} the sequence. {attention}"]  # fmt: skip
