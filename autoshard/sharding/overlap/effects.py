"""What each entry of `overlap=` changes under a layout, and notes on entries that change nothing."""

from __future__ import annotations

import math
from collections import defaultdict

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import AFTER_UPDATE, operand_spec, state_gathers, strategy_in_layout
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.overlap.constants import MOST_RING_DEVICES, NO_PRODUCT_MIB
from autoshard.sharding.overlap.marks import gathered_axes, marks_of
from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.sharding.plan.overlap_words import GATHER, MATMUL, OFF, ON, REDUCE
from autoshard.sharding.program.operator_kinds import is_decision_point

_WINDOWED = {
    "tpu": ("xla_jf_spmd_threshold_for_windowed_einsum_mib", True),
    "cuda": ("xla_gpu_threshold_for_windowed_einsum_mib", False),
}
"""Platform -> an option, and whether the compiler makes collective matmuls by default. The option is a size in MiB:
larger products become collective matmuls."""
_COMBINED = {GATHER: ("all_gather",), REDUCE: ("reduce_scatter", "all_reduce")}
"""Kind of `overlap=` -> the collectives that XLA:GPU combines, each up to a size that an option gives."""


def effect_notes(
    overlap: ModuleOverlap, layout: Layout, target: Target, *, sequential: bool, updated: tuple[int, ...] = ()
) -> list[str]:
    """Return a note for each entry that changes nothing, or only a part of what it names.

    Args:
        overlap: the words of `overlap=`.
        layout: the layout.
        target: the machine, with the plan's compiler options.
        sequential: whether parameters are gathered one after another.
        updated: the inputs that the program returns updated.
    """
    changed, gathered, reduced = _changes(overlap, layout, target)
    late = {g.value for g in state_gathers(layout, updated) if g.when == AFTER_UPDATE}
    notes = []
    for (pattern, kind), parameters in overlap.named.items():
        word = overlap.table[pattern][kind]
        named = set(parameters)
        entry = f"overlap '{pattern}': {kind}={word}"
        if reason := _reason(kind, word, named, target, sequential, gathered, reduced, changed):
            if not (word == ON and (pattern, kind) in overlap.overriding):
                notes.append(f"{entry} changes nothing: {reason}")
        elif (kind, word) == (MATMUL, ON):
            notes.append(f"{entry}: the estimate does not count how much of the permutes the products hide")
        elif word == OFF and (options := _combining_options(kind, target)):
            wanted = ", ".join(f"{name!r}: '1'" for name in options)
            notes.append(
                f"{entry}: the compiler for {target.name} combines collectives of several parameters, and what it "
                f"combines runs as one. For each module alone, give compiler_options={{{wanted}}}"
            )
        if kind == GATHER and word == OFF and named & late:
            notes.append(f"{entry} does not concern the gathers after the update, which the compiler schedules")
    return notes


def _combining_options(kind: str, target: Target) -> list[str]:
    """The options by which a target's compiler combines collectives of a kind, if it combines them under the plan's."""
    options = [f"xla_gpu_{name}_combine_threshold_bytes" for name in _COMBINED.get(kind, ())]
    if target.platform != "cuda":
        return []
    return [name for name in options if float(target.chip.options.get(name, math.inf)) > 1]


def _changes(
    overlap: ModuleOverlap, layout: Layout, target: Target
) -> tuple[dict[tuple[str, str], set[int]], set[int], dict[int, set[str]]]:
    """Find what entries can change.

    Returns:
        (kind, word) -> the parameters that it changes; the parameters that are gathered; parameter -> the kinds of
        collectives that reduce its gradient.
    """
    changed: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    gathered: set[int] = set()
    reduced: defaultdict[int, set[str]] = defaultdict(set)
    for v in layout.inputs_gathered_before_loops:
        if v in overlap.paths and gathered_axes(layout.stored_spec(v), layout.spec(v)):
            gathered.add(v)
            changed[GATHER, OFF].add(v)
    for op in layout.axes.program.ops():
        if op.blocks or not is_decision_point(op):
            continue
        strategy = strategy_in_layout(layout, op, target.link_prices)
        if not strategy.moves:
            continue
        assert op.rule is not None
        marks = marks_of(overlap, layout, op, strategy)
        for move in strategy.moves:
            if move.array >= 0:
                source, stored = overlap.source(op.operands[move.array]), operand_spec(layout, op.operands[move.array])
                if source in overlap.paths and gathered_axes(stored, strategy.spec(op.rule.operands[move.array])):
                    gathered.add(source)
            else:
                for owner in overlap.owners.get(op.results[-1 - move.array], ()):
                    reduced[owner].add(move.kind)
        changed[GATHER, OFF] |= {overlap.source(op.operands[i]) for i, alone in marks.gathers.items() if alone}
        if marks.alone:
            changed[REDUCE, OFF] |= {p for v in op.results for p in overlap.owners.get(v, ())}
        if marks.ring is not None:
            changed[MATMUL, ON] |= set(overlap.products(op, ON))
        if marks.gathers or marks.reduces:
            changed[MATMUL, OFF] |= set(overlap.products(op, OFF))
    return changed, gathered, reduced


def _reason(
    kind: str,
    word: str,
    named: set[int],
    target: Target,
    sequential: bool,
    gathered: set[int],
    reduced: dict[int, set[str]],
    changed: dict[tuple[str, str], set[int]],
) -> str:
    """Why an entry changes nothing; empty if it changes something."""
    chip, name = target.chip, target.name
    if not named:
        return "later entries, or exact paths, override it for all parameters that it names"
    if kind == GATHER:
        if not named & gathered:
            return "no operator gathers these parameters"
        if "all-gather" not in chip.hides:
            return f"the compiler for {name} runs nothing beside gathers under the plan's options"
        if word == ON:
            return "" if sequential else "without gather='sequential', gathers run beside compute already"
    if kind == REDUCE:
        kinds = {each for p in named for each in reduced.get(p, ())}
        if not kinds:
            return "no operator reduces the gradients of these parameters"
        if not kinds & {*chip.hides}:
            return f"the compiler for {name} runs nothing beside {' or '.join(sorted(kinds))} under the plan's options"
        if word == ON:
            return "reductions run beside compute already"
    if kind == MATMUL and word == OFF and not _makes_collective_matmul(target):
        return f"the compiler for {name} makes no collective matmul under the plan's options"
    if named & changed.get((kind, word), set()) or (kind, word) == (GATHER, ON):
        return ""
    if kind == MATMUL and word == ON:
        return (
            "no product with these parameters has a collective over one mesh axis of 2 to "
            f"{MOST_RING_DEVICES} devices along one dimension"
        )
    return "its collectives are neither plain gathers nor plain sums"


def _makes_collective_matmul(target: Target) -> bool:
    """Whether the partitioner makes collective matmuls of some products under the plan's options."""
    option, default = _WINDOWED.get(target.platform, ("", False))
    given = target.chip.options.get(option)
    return default if given is None else float(given) < NO_PRODUCT_MIB
