"""What `gather="prefetch"` does to each loop of a program, for the notes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from autoshard import _compat
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.loop_gathers import loop_gathers
from autoshard.sharding.lower.gathers.prefetched_scan import early_gathers
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.spmdrules.ir.program import Op

NOTHING = (
    "gather='prefetch' gathers nothing early: no scanned or rematerialized layer waits for a gather, or the compiler "
    "for this machine runs no gather beside compute"
)
HIDDEN = "its products hide these gathers"


def prefetch_notes(
    layout: Layout, prices: LinkPrices, early: frozenset[tuple[int, int]], path_of: Callable[[int], str]
) -> Iterator[str]:
    """Yield a sentence for each scan that gathers, and one for all written-out layers; or only `NOTHING`.

    Args:
        layout: the layout.
        prices: what bytes on the links of the target cost.
        early: the parameters that are gathered early (`StepCost.early`).
        path_of: the path of an input of the program.
    """
    if not early:
        yield NOTHING
        return
    if in_layers := [v for number, v in sorted(early, reverse=True) if number < 0]:
        yield f"written-out layers gather {_paths(layout, in_layers, path_of)} one layer early"
    values = frozenset(v for number, v in early if number >= 0)
    for scan in (op for op in layout.axes.program.ops() if op.name == "scan"):
        found = early_gathers(layout, scan, prices, values)
        late = {gather.value: reason for gather, reason in found.late.items()}
        own = [g.value for g in loop_gathers(layout, scan, prices) if g.value in found.chains]
        late |= {v: HIDDEN for v in own if v not in values}
        if not found.gathers and not late:
            continue
        text = f"{_place(scan)} gathers {_paths(layout, (g.value for g in found.gathers), path_of)} one iteration early"
        for reason in dict.fromkeys(late.values()):
            which = _paths(layout, (v for v, each in late.items() if each == reason), path_of)
            text += f"; {which} in the iteration that uses them, because {reason}"
        yield text


def _place(scan: Op) -> str:
    line = _compat.program_line(scan.eqn)
    which = "backward scan" if _compat.is_transposed(scan.eqn) else "scan"
    return f"the {which} over {scan.eqn.params['length']} iterations{f' at {line}' if line else ''}"


def _paths(layout: Layout, values: Iterable[int], path_of: Callable[[int], str]) -> str:
    return ", ".join(dict.fromkeys(path_of(layout.aliased_inputs.get(v, v)) for v in values)) or "nothing"
