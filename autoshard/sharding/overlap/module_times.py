"""The time of the collectives of each module: how much of it compute hides, and how much is exposed.

A module is a parameter, or the same parameter of all layers (`ModuleOverlap.module`). Its collectives are the gathers
of the parameter, the reductions of its gradient, and those of the activations of its products.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from autoshard._columns import INDENT, columns
from autoshard._units import time_text
from autoshard.sharding.overlap.constants import SHOWN_MODULES
from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.sharding.plan.overlap_words import GATHER, REDUCE
from autoshard.spmdrules.ir.program import Op

ACTIVATIONS = "activations"
ModuleTimes = dict[str, dict[str, tuple[float, float]]]  # module -> kind -> microseconds, exposed ones

_SCOPE = re.compile(r"overlap\[([^\]:]*):(\w+)\]")


def module_of(overlap: ModuleOverlap, op: Op, array: int) -> tuple[str, str] | None:
    """Return the module and the kind of a collective that moves an operand, or a result (`array` -1, -2, ...)."""
    value = op.operands[array] if array >= 0 else op.results[-1 - array]
    if array >= 0 and overlap.source(value) in overlap.paths:
        return overlap.module(overlap.source(value)), GATHER
    if array < 0 and overlap.owners.get(value):
        return overlap.module(min(overlap.owners[value])), REDUCE
    parameters = [overlap.source(v) for v in op.operands if overlap.source(v) in overlap.paths]
    parameters += [p for v in op.results for p in sorted(overlap.owners.get(v, ()))]
    return (overlap.module(parameters[0]), ACTIVATIONS) if parameters else None


def scope_of(overlap: ModuleOverlap, op: Op, array: int) -> str:
    """Return the name of a scope from which `compiled_times` reads the module; empty if there is none."""
    found = module_of(overlap, op, array)
    return f"overlap[{found[0]}:{found[1]}]" if found else ""


def estimated_times(
    overlap: ModuleOverlap,
    ops: list[Op],
    trips: np.ndarray,
    collectives: Iterable[tuple[np.ndarray, int, float, float]],
) -> ModuleTimes:
    """Return the times of each module, by the estimate.

    Args:
        overlap: the words of `overlap=`, resolved.
        ops: the operators of the program.
        trips: for each of them, how often it runs in a step.
        collectives: for each collective its operators' numbers, the array that it moves, its time and the exposed part.
    """
    found: ModuleTimes = {}
    for numbers, array, us, exposed in collectives:
        total = trips[numbers].sum()
        for n in numbers.tolist():
            if total and (module := module_of(overlap, ops[n], array)) is not None:
                _add(found, *module, float(us * trips[n] / total), float(exposed * trips[n] / total))
    return found


def has_scope(name: str) -> bool:
    """Whether the origin of an instruction names a module."""
    return _SCOPE.search(name) is not None


def gather_scope(name: str) -> str:
    """The scope of a gather whose product has an origin that names a module; empty if the origin names none."""
    scopes = _SCOPE.findall(name)
    return f"overlap[{scopes[-1][0]}:{GATHER}]" if scopes else ""


def compiled_times(collectives: Iterable[tuple[str, float, float]]) -> ModuleTimes:
    """Return the times of each module in a compiled program.

    Args:
        collectives: for each collective the name of its origin, its time and the exposed part.
    """
    found: ModuleTimes = {}
    for name, us, exposed in collectives:
        scopes = _SCOPE.findall(name)
        if scopes:
            module, kind = scopes[-1]
            _add(found, module, kind, us, exposed)
    return found


def _add(found: ModuleTimes, module: str, kind: str, us: float, exposed: float) -> None:
    before = found.setdefault(module, {}).get(kind, (0.0, 0.0))
    found[module][kind] = before[0] + us, before[1] + exposed


def module_lines(times: Mapping[str, Mapping[str, tuple[float, float]]], how: str) -> list[str]:
    """The lines of a report: one for each module, those with the most exposed time first.

    Args:
        times: module -> kind -> microseconds of its collectives, and the exposed part.
        how: where the times come from, for the heading.
    """
    if not times:
        return []
    exposed: defaultdict[str, float] = defaultdict(float)
    for module, kinds in times.items():
        exposed[module] += sum(each[1] for each in kinds.values())
    ranked = sorted(times, key=lambda module: (-exposed[module], module))
    kinds = [kind for kind in (GATHER, REDUCE, ACTIVATIONS) if any(kind in each for each in times.values())]
    rows = [(INDENT + how, *(text for kind in kinds for text in (f"{kind}: hidden", "exposed")))]
    for module in ranked[:SHOWN_MODULES]:
        cells = [times[module].get(kind) for kind in kinds]
        texts = [
            (time_text(max(round(each[0] - each[1], 3), 0.0)), time_text(each[1])) if each else ("", "")
            for each in cells
        ]
        rows.append((INDENT + module, *(text for pair in texts for text in pair)))
    lines = ["collectives by module:", *columns(rows, right=range(1, 2 * len(kinds) + 1))]
    return [*lines, f"{INDENT}and {len(ranked) - SHOWN_MODULES} more modules"] if len(ranked) > SHOWN_MODULES else lines
