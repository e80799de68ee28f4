"""Equinox's conventions: its modules and its `filter_jit` trace arrays only, so Python numbers are static there.

Equinox is not a dependency. If the program has not imported it, there are no such objects.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def equinox_module() -> type | None:
    """Returns `equinox.Module`, or None if Equinox is not imported."""
    return getattr(sys.modules.get("equinox"), "Module", None)


def is_filter_jit(fn: Any) -> bool:
    """Returns whether a function is `equinox.filter_jit(...)`, or a `functools.partial` of one."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    wrapper = getattr(sys.modules.get("equinox._jit"), "_JitWrapper", None)
    return wrapper is not None and isinstance(fn, wrapper)
