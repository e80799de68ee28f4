"""Compiler options that a user requests: names of option sets, and single options.

    options of a plan = default options of the chip + the parts of the request, in order

A set replaces the options of the sets that it excludes, and a single option replaces one of the same name. Thus what is
requested takes precedence over the defaults. An option for which wrong numbers were reported is on if it is requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.sharding.machines.chips import ALIASES, CHIPS
from autoshard.sharding.machines.options.asynchronous import (
    asynchronous_kinds,
    keeps_gathers,
    keeps_reduce_scatters,
)
from autoshard.sharding.machines.options.choice import UnknownSetError, named_set, with_set
from autoshard.sharding.machines.options.option_sets import ProgramFacts
from autoshard.sharding.machines.options.option_table import Options
from autoshard.sharding.machines.targets import Target

Value = str | bool | int | float
Part = str | Options  # the name of an option set, or single options
OptionRequest = str | Options | Sequence[Part]
"""Options for XLA: a mapping, the name of an option set, or a list of these."""

_FORM = (
    "give the name of an option set such as 'scoped-vmem', a mapping {name of an XLA option: value}, a list of both, "
    "or text such as 'scoped-vmem+xla_tpu_host_transfer_overlap_limit=24'"
)


def read_request(given: OptionRequest | None) -> tuple[Part, ...]:
    """Return the parts of a request.

    Args:
        given: the name of a set, a mapping of options, a list of both, or text in which `+` joins names and
            `option=value`.

    Raises:
        PlanError: it has another form.

    >>> read_request("scoped-vmem+xla_tpu_host_transfer_overlap_limit=24")
    ('scoped-vmem', {'xla_tpu_host_transfer_overlap_limit': '24'})
    """
    if given is None:
        return ()
    parts: list[Part] = []
    for part in [given] if isinstance(given, str | Mapping) else _listed(given):
        if isinstance(part, str):
            parts += map(_word, part.split("+") if part else [])
            continue
        if problems := [problem for item in part.items() if (problem := _problem(*item))]:
            raise PlanError("; ".join(problems))
        parts.append(dict(part))
    return tuple(parts)


def _listed(given: Any) -> Sequence[Any]:
    if not isinstance(given, list | tuple):
        raise PlanError(f"compiler_options is {_value_text(given)}; {_FORM}")
    for n, part in enumerate(given):
        if not isinstance(part, str | Mapping):
            raise PlanError(f"compiler_options[{n}] is {_value_text(part)}; {_FORM}")
    return given


def _problem(name: Any, value: Any) -> str:
    """What is wrong with one option; "" if nothing is."""
    if not isinstance(name, str) or not name:
        what = "without a name" if name == "" else f"whose name is {_value_text(name)}"
        return f"compiler_options has an option {what}; names are text, such as 'xla_tpu_scoped_vmem_limit_kib'"
    if isinstance(value, str | bool | int | float):
        return ""
    ways = "leave the option out, which keeps its default" if value is None else "give one of these"
    if getattr(value, "shape", None) == ():  # of an array or of a number of NumPy
        ways = "give one of these, such as the result of its .item()"
    return (
        f"compiler_options[{name!r}] is {_value_text(value)}; the value of an option is text, True or False, or a "
        f"number: {ways}"
    )


def _value_text(value: Any) -> str:
    """A value, and its type unless it is obvious."""
    return "None" if value is None else f"{short_repr(value)}, of type {type(value).__name__}"


def _word(text: str) -> Part:
    name, equals, value = (each.strip() for each in text.partition("="))
    if not name or (equals and not value):
        raise PlanError(f"compiler_options has {text!r}; {_FORM}")
    return {name: value} if equals else name


def requested(request: Sequence[Part], target: Target, layer_bytes: int = 0) -> tuple[Options, Options]:
    """Return all options of a plan for a target, and those of them that were requested.

    Args:
        request: the parts of the request.
        target: the machine, with the default options of its chip.
        layer_bytes: bytes of the weights of one layer, which some sets depend on; 0 if unknown.

    Raises:
        PlanError: the target's chip has no set of a requested name. The message lists its sets.
    """
    chip = chip_word(target)
    facts = ProgramFacts(chip, layer_bytes=layer_bytes)
    options, own = dict(target.chip.options), {}
    for part in request:
        if isinstance(part, str):
            try:
                chosen = named_set(part, chip)
            except UnknownSetError as error:
                raise PlanError(f"compiler_options: {error}") from error
            options = dict(with_set(options, chosen, facts))
            own = dict(with_set(own, chosen, facts))
        else:
            given = {name: _in_form_of(target.platform, value) for name, value in part.items()}
            options |= given
            own |= given
    return options, own


def under_request(target: Target, request: Sequence[Part]) -> Target:
    """Return a target whose chip has the requested options and hides what its compiler hides under them.

    Raises:
        PlanError: as `requested`.
    """
    return with_options(target, requested(request, target)[0]) if request else target


def with_options(target: Target, options: Options) -> Target:
    """Return a target whose chip has these options, and whose compiler hides and keeps what it does under them."""
    chip, topology, name = target.chip, target.topology, chip_word(target)
    if chip.platform == "tpu" and name in CHIPS:
        keeps: dict[str, Any] = {
            "keeps_gathers": keeps_gathers(name, options),
            "keeps_reduce_scatters": keeps_reduce_scatters(name, options),
        }
        chip = replace(chip, hides=asynchronous_kinds(name, options), **keeps)
        topology = replace(topology, **keeps)
    return replace(target, chip=replace(chip, options=options), topology=topology)


def chip_word(target: Target) -> str:
    """The name of a target's chip; for a machine from a file, the file."""
    if target.name.endswith(".toml"):
        return target.name
    word = target.name.strip().lower().partition(":")[0]
    return ALIASES.get(word, word)


def _in_form_of(platform: str, value: Value) -> Value:
    """A value as the platform's compiler takes it: text on TPU, else numbers and truth values."""
    if platform == "tpu":
        return str(value).lower() if isinstance(value, bool) else str(value)
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.lstrip("-").isdigit() else value
