"""Public names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def on_first_use(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        package: the name of the package, such as `autoshard.train`.
        modules: public name -> its module, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        path = f"{package}.{modules[name]}"
        try:
            module = importlib.import_module(path)
        except AttributeError as error:  # Python would say that the package has no such name
            hint = "Do the versions of JAX and its libraries fit together?"
            raise ImportError(f"{path} cannot be imported: {error}. {hint}") from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sys.modules[package].__all__)
