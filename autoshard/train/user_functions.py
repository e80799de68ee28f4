"""Imports functions of users by name, `package.module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.errors import ConfigError


def is_function(name: str | None) -> bool:
    """Return whether a name has the form package.module:function and is not an existing path."""
    if name is None or ":" not in name or Path(name).exists():
        return False
    module, _, function = name.partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_function(name: str, option: str, known: str = "") -> Callable[..., Any]:
    """Import the function that package.module:function names. Modules in the working folder are found too.

    Args:
        name: The name.
        option: The option that gave it, for messages.
        known: What else the option takes, for messages.

    Raises:
        ConfigError: The name has another form, or the module or function does not exist.
    """
    if not is_function(name):
        raise ConfigError(
            f"{option} {name!r} is unknown: give package.module:function" + (f", or {known}" if known else "")
        )
    module_name, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option} {name}: no module named {error.name!r}. Is its folder on PYTHONPATH?") from error
    if not callable(getattr(module, function, None)):
        raise ConfigError(f"{option} {name}: module {module_name} has no function {function!r}")
    return getattr(module, function)
