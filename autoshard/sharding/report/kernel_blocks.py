"""The block sizes of a plan's kernels, in words."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.sharding.machines.kernel_rules import read_blocks, read_shape
from autoshard.sharding.plan.sharding_plan import ShardingPlan


def kernel_texts(plan: ShardingPlan) -> Sequence[str]:
    """One text for each shape of a call of splash attention; often none."""
    texts = []
    for text, sizes in plan.kernel_blocks.items():
        queries, keys, features, *_ = read_shape(text)
        blocks = read_blocks(sizes)
        parts = [
            f"{name} {' x '.join(map(str, size[:2]))}"
            for name, size in (("forward", blocks.forward), ("keys and values", blocks.dkv), ("queries", blocks.dq))
        ]
        texts.append(
            f"splash attention, {queries} queries x {keys} keys of {features} features: queries x keys: "
            f"{', '.join(parts)}"
        )
    return texts
