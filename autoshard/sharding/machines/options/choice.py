"""Selects option sets for a program, and merges them.

A new set replaces options: those of the sets that it excludes are removed from the plan's options, then its own are
added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.errors import AutoshardError
from autoshard.sharding.machines.options.asynchronous import on_by_default
from autoshard.sharding.machines.options.option_sets import LAYER_BYTES, SETS, OptionSet, ProgramFacts
from autoshard.sharding.machines.options.option_table import OPTIONS, Options

_ON = ("true", "1")


class UnknownSetError(AutoshardError):
    """A set of options that does not exist, or does not exist for a chip."""


def default_options(chip: str) -> Options:
    """The options that every plan for a chip has."""
    merged: dict[str, str | bool | int | float] = {}
    for each in SETS.values():
        if chip in each.default:
            merged |= each.options[chip]
    return merged


def set_names(chip: str) -> list[str]:
    """The names of the sets of a chip."""
    return [name for name, each in SETS.items() if chip in each.options]


def named_set(name: str, chip: str) -> OptionSet:
    """Return a set of a chip.

    Raises:
        UnknownSetError: the chip has no set of this name. The message lists its sets.
    """
    if name in SETS and chip in SETS[name].options:
        return SETS[name]
    known = set_names(chip)
    listed = f"the sets of {chip} are {', '.join(known)}" if known else f"{chip} has no sets; pass a mapping"
    reason = f"there is no option set '{name}'" if name not in SETS else f"option set '{name}' is not for {chip}"
    raise UnknownSetError(f"{reason}; {listed}; a single option is written NAME=VALUE")


def machine_code_options() -> frozenset[str]:
    """Return the options that change only machine code, so that schedules do not show their effect."""
    return frozenset(
        name for each in SETS.values() if each.changes_code for options in each.options.values() for name in options
    )


def applicable_sets(facts: ProgramFacts, options: Options) -> list[OptionSet]:
    """Return the sets that may pay for a program and that change its options, in the order in which to try them.

    Sets for which wrong numbers were reported on this chip are left out.
    """
    return [
        each
        for each in SETS.values()
        if facts.chip in each.options
        and facts.chip not in each.numerics
        and each.applies(facts)
        and with_set(options, each, facts) != options
    ]


def with_set(options: Options, chosen: OptionSet, facts: ProgramFacts) -> Options:
    """Return `options` with a set, without the options of the sets that it excludes."""
    own = {
        name: str(facts.layer_bytes) if value == LAYER_BYTES else value
        for name, value in chosen.options[facts.chip].items()
    }
    excluded = {name for other in chosen.excludes for name in SETS[other].options.get(facts.chip, {})}
    return {name: value for name, value in options.items() if name not in excluded} | own


def sets_in(chip: str, options: Options) -> tuple[list[str], list[str]]:
    """Return the names of the sets that `options` contain, and the names of options in none of these."""
    found = [each for each in SETS.values() if chip in each.options and _contains(options, each.options[chip])]
    # Leave out a set that is a part of another set in `options`.
    found = [each for each in found if not any(_is_part(chip, each, other) for other in found)]
    rest = [name for name in options if not any(name in each.options[chip] for each in found)]
    return [each.name for each in found], rest


def reported_numerics(chip: str, options: Options) -> list[tuple[str, str]]:
    """Sets with a report of wrong numbers on this chip, of which at least one option is on; set -> report.

    An option is on if `options` turns it on, or leaves it out and the compiler turns it on by default. It does not
    count if a set without such a report turns it on, too.
    """
    found = []
    for each in SETS.values():
        if chip in each.numerics and _reported_and_on(each, chip, options):
            found.append((each.name, each.numerics[chip]))
    return found


def without_reported(chip: str, options: Options) -> Options:
    """Return `options` in which the options that `reported_numerics` counts are turned off by name."""
    off = {name for each in SETS.values() if chip in each.numerics for name in _reported_and_on(each, chip, options)}
    return {**options, **{name: False if isinstance(options.get(name), bool) else "false" for name in sorted(off)}}


def off_by_numerics(chip: str, options: Options) -> list[tuple[str, str]]:
    """Sets that are off on this chip because wrong numbers were reported, with the report."""
    on = {name for name, _ in reported_numerics(chip, options)}
    return [(each.name, each.numerics[chip]) for each in SETS.values() if chip in each.numerics and each.name not in on]


def with_needed(options: Options) -> tuple[Options, Sequence[str]]:
    """Add the options that others need, and describe each: `a=true, which b needs`."""
    completed, added = dict(options), []
    pending = list(options)
    while pending:
        name = pending.pop(0)
        if name not in OPTIONS or not _is_on(completed[name]):
            continue
        for other, value in OPTIONS[name].needs.items():
            if other not in completed:
                completed[other] = value
                pending.append(other)
                added.append(f"{other}={value}, which {name} needs")
    return completed, added


def conflicts(options: Options) -> Iterator[tuple[str, str]]:
    """Pairs of options that are on and exclude each other."""
    on = [name for name, value in options.items() if _is_on(value)]
    for n, name in enumerate(on):
        for other in on[n + 1 :]:
            if any(b in OPTIONS[a].excludes for a, b in ((name, other), (other, name)) if a in OPTIONS):
                yield name, other


def _contains(options: Options, some: Options) -> bool:
    return all(value == LAYER_BYTES or str(options.get(name)) == str(value) for name, value in some.items()) and (
        some.keys() <= options.keys()
    )


def _is_part(chip: str, one: OptionSet, other: OptionSet) -> bool:
    return one.options[chip].keys() < other.options[chip].keys()


def _reported_and_on(chosen: OptionSet, chip: str, options: Options) -> set[str]:
    """The options of a set with a report that are on, see `reported_numerics`."""
    harmless = {name for each in SETS.values() if chip not in each.numerics for name in _turned_on(each, chip)}
    default = on_by_default(chip)
    return {
        name
        for name in _turned_on(chosen, chip) - harmless
        if _is_on(options.get(name, "true" if name in default else ""))
    }


def _turned_on(chosen: OptionSet, chip: str) -> set[str]:
    return {name for name, value in chosen.options.get(chip, {}).items() if _is_on(value)}


def _is_on(value: object) -> bool:
    return str(value).lower() in _ON
