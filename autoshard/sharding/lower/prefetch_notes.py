"""What `gather="prefetch"` does to each loop of a program, for the notes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from autoshard import _compat
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.loop_gathers import loop_gathers
from autoshard.sharding.layout.unrolled_layers import stages_of
from autoshard.sharding.lower.prefetched_scan import early_gathers
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.spmdrules.ir.program import Op

HIDDEN = "its products hide these gathers"


def prefetch_notes(
    layout: Layout, prices: LinkPrices, values: frozenset[int], path_of: Callable[[int], str]
) -> Iterator[str]:
    """Yield a sentence for each scan that gathers parameters, and one if nothing is gathered early.

    Args:
        layout: the layout.
        prices: what bytes on the links of the target cost.
        values: the parameters that scans gather early (`StepCost.early`).
        path_of: the path of an input of the program.
    """
    any_early = any(stage.is_layer for stage in stages_of(layout.axes, layout.roles))
    for scan in (op for op in layout.axes.program.ops() if op.name == "scan"):
        found = early_gathers(layout, scan, prices, values)
        late = {gather.value: reason for gather, reason in found.late.items()}
        own = [g.value for g in loop_gathers(layout, scan, prices) if g.value in found.chains]
        late |= {v: HIDDEN for v in own if v not in values}
        any_early |= bool(found.gathers)
        if not found.gathers and not late:
            continue
        text = f"{_place(scan)} gathers {_paths(layout, (g.value for g in found.gathers), path_of)} one iteration early"
        for reason in dict.fromkeys(late.values()):
            which = _paths(layout, (v for v, each in late.items() if each == reason), path_of)
            text += f"; {which} in the iteration that uses them, because {reason}"
        yield text
    if not any_early:
        yield "gather='prefetch' changes nothing: no scan gathers parameters early, and no written-out layers repeat"


def _place(scan: Op) -> str:
    line = _compat.program_line(scan.eqn)
    which = "backward scan" if _compat.is_transposed(scan.eqn) else "scan"
    return f"the {which} over {scan.eqn.params['length']} iterations{f' at {line}' if line else ''}"


def _paths(layout: Layout, values: Iterable[int], path_of: Callable[[int], str]) -> str:
    return ", ".join(dict.fromkeys(path_of(layout.aliased_inputs.get(v, v)) for v in values)) or "nothing"
