"""Configs with some settings replaced, and the differences between two configs."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from autoshard._typed import convert
from autoshard.errors import ConfigError
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.old_names import current_settings


def merge(config: Any, changes: Mapping[str, Any], where: str) -> Any:
    """Return a config with some settings replaced, nested tables included.

    Args:
        config: A config dataclass.
        changes: Setting to value, as read from TOML or JSON. Old names of settings are accepted.
        where: Names the source of the changes, for messages.

    Raises:
        ConfigError: A setting is unknown, or a value does not fit its type.
    """
    known = [entry.name for entry in dataclasses.fields(config)]
    types = get_type_hints(type(config))
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in (current_settings(changes, where) if isinstance(config, TrainConfig) else changes).items():
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {name!r}{suggestion(name, known)}")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {name} is {value!r}, but it is a table of settings: write [{name}]")
            values[name] = merge(current, value, f"{where}: [{name}]")
        else:
            values[name] = convert(value, types[name], name, problems)
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return replaced(config, where, **values)


def replaced(config: Any, where: str, /, **values: Any) -> Any:
    """`dataclasses.replace` with errors that name the source of the values."""
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def suggestion(name: str, known: Iterable[str]) -> str:
    """End of a message about an unknown name: the similar known names, or all of them if none is similar."""
    known = list(known)
    close = similar(name, known)
    return f": did you mean {' or '.join(close)}?" if close else f": known are {', '.join(known)}"


def similar(name: str, known: Iterable[str]) -> list[str]:
    """The known names that are similar to an unknown one, at most three, the most similar first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.75)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """List the settings in which two configs differ: name, value before, value now. A nested one is `gpt.layers`."""
    found: list[tuple[str, Any, Any]] = []
    for name in sorted({*before, *now}):
        a, b = before.get(name), now.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += changed_settings(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append((f"{prefix}{name}", a, b))
    return found
