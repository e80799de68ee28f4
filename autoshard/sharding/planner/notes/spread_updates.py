"""A note on updates for which each device has whole matrices."""

from __future__ import annotations

import math

from autoshard import _compat
from autoshard._units import line_text
from autoshard.sharding.layout.layout import Layout
from autoshard.spmdrules.families.stacked.matrices import spread_p


def spread_update_notes(layout: Layout) -> list[str]:
    """Return a note for each source line with such updates.

    Args:
        layout: the layout of the plan.
    """
    counts: dict[str, int] = {}
    most: dict[str, int] = {}
    for op in layout.axes.program.ops():
        if op.name == spread_p.name:
            line, params = line_text(_compat.program_line(op.eqn)), op.eqn.params
            shards = layout.shard_count(layout.spec(op.results[0])[0])
            number = sum(x.aval.shape[0] if params["stacked"] else 1 for x in op.eqn.invars)
            counts[line] = counts.get(line, 0) + number
            most[line] = most.get(line, 0) + math.ceil(params["places"] / shards)
    return [
        f"at {line}, each device updates whole matrices, at most {most[line]} of {count}; devices exchange shards "
        "before and after"
        for line, count in counts.items()
    ]
