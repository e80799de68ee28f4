"""Accept the old names of renamed settings, keywords and options, with a warning.

Old Python keywords and attributes give a `DeprecationWarning`, which is meant for developers. Old options and keys of
config files give a `FutureWarning`, which is meant for users and is shown by default.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from autoshard.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

CURRENT_NAMES: Mapping[str, str] = {"accumulation": "microbatches"}  # removed in 0.3
"""Current name of each setting that still has an old one."""

_NOTE = "the old name is removed in 0.3"


def accepts_old_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that callers may use old keywords.

    Raises:
        TypeError: A call gives both names of a keyword.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for old in CURRENT_NAMES.keys() & kwargs:
            if CURRENT_NAMES[old] in kwargs:
                raise TypeError(f"{function.__name__}() got both {CURRENT_NAMES[old]!r} and its old name {old!r}")
        return function(*args, **_current_keywords(function.__name__, kwargs))  # pyright: ignore[reportCallIssue]

    return call


def accepts_old_fields(cls: C) -> C:
    """Decorate a dataclass, above `@dataclass`, so that it may be made with the old names of its fields.

    If both names are given, the old one takes precedence, because `dataclasses.replace(config, old=value)` also passes
    the current field. Subclasses that are dataclasses themselves do not inherit the decorator.
    """
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **_current_keywords(cls.__name__, kwargs))

    cls.__init__ = init
    return cls


def _current_keywords(owner: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call by their current names. A value given by the old name takes precedence."""
    found = dict(keywords)
    for old in CURRENT_NAMES.keys() & found.keys():
        current = CURRENT_NAMES[old]
        message = f"{owner}({old}=...) is now {owner}({current}=...); {_NOTE}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        found[current] = found.pop(old)
    return found


def current_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of a file by their current names.

    Args:
        settings: Setting to value.
        where: Names the file, for messages.

    Raises:
        ConfigError: The file has both names of a setting.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        current = CURRENT_NAMES.get(name, name)
        if current != name:
            if current in settings:
                raise ConfigError(f"{where}: {name!r} is the old name of {current!r}; give {current!r} alone")
            warnings.warn(f"{where}: setting {name!r} is now {current!r}; {_NOTE}", FutureWarning, stacklevel=2)
        found[current] = value
    return found


def current_options(arguments: Sequence[str]) -> list[str]:
    """Replace old option names in command-line arguments by the current ones. Arguments after `--` stay as they are.

    Raises:
        ConfigError: Both names of an option are given.
    """
    options = set(_option_names(arguments))
    found = list(arguments)
    for position, name in enumerate(_option_names(arguments)):
        current = CURRENT_NAMES.get(name)
        if current is None:
            continue
        if current in options:
            raise ConfigError(f"--{name} is the old name of --{current}; give --{current} alone")
        warnings.warn(f"--{name} is now --{current}; {_NOTE}", FutureWarning, stacklevel=2)
        _, equals, value = arguments[position].partition("=")
        found[position] = f"--{current}{equals}{value}"
    return found


def _option_names(arguments: Sequence[str]) -> Iterator[str]:
    """Yield, for each argument before `--`, its option's name as a setting, or "" for a value."""
    for argument in arguments:
        if argument == "--":
            return
        yield argument.partition("=")[0].removeprefix("--").replace("-", "_") if argument.startswith("--") else ""
