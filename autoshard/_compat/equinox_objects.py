"""Equinox's conventions: its modules and its `filter_jit` trace arrays only, so Python numbers are static there.

`filter_jit(donate=...)` donates all arguments, or all but the first.

Equinox is not a dependency. If the program has not imported it, there are no such objects.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any


def equinox_module() -> type | None:
    """Returns `equinox.Module`, or None if Equinox is not imported."""
    return getattr(sys.modules.get("equinox"), "Module", None)


@dataclasses.dataclass(frozen=True, repr=False)
class FilterJit:
    """How an `equinox.filter_jit(...)` treats its arguments, besides that Python numbers are static.

    Attributes:
        donate_from: it donates the positional arguments from this one on, and keyword arguments; None for none.
        hides_warnings: whether it hides JAX's warnings about donated buffers that no result can use.
    """

    donate_from: int | None
    hides_warnings: bool


def filter_jit_of(fn: Any) -> FilterJit | None:
    """Returns how `fn` treats its arguments if it is an `equinox.filter_jit(...)`, or a partial of one; else None."""
    partials = (functools.partial, getattr(sys.modules.get("equinox"), "Partial", functools.partial))
    given = 0  # arguments of the partials
    while isinstance(fn, partials):
        fn, given = fn.func, given + len(fn.args)
    wrapper = getattr(sys.modules.get("equinox._jit"), "_JitWrapper", None)
    if wrapper is None or not isinstance(fn, wrapper):
        return None
    skipped = 0 if fn.donate_first else 1
    return FilterJit(max(skipped - given, 0) if fn.donate_rest else None, fn.filter_warning)
