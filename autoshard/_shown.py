"""Objects that can be printed at any time: in a debugger, in the middle of being built, with parts that cannot be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
SHOWN: list[type] = []  # every class of which this holds


def shown(cls: C) -> C:
    """A class decorator, above `@dataclass`: `repr` and `str` say what is missing instead of raising.

    `format` takes any specification.

    >>> @shown
    ... class Pair:
    ...     def __repr__(self):
    ...         return f"Pair({self.left}, {self.right})"
    >>> half = Pair.__new__(Pair)
    >>> half.left = 1
    >>> half
    <Pair, half-built: left>
    """
    for name in ("__repr__", "__str__"):
        if name in cls.__dict__:
            setattr(cls, name, _guarded(cls.__dict__[name]))
    setattr(cls, "__format__", _format)  # noqa: B010  not a method of `type`'s
    SHOWN.append(cls)
    return cls


def _format(self: Any, spec: str) -> str:
    """The text, laid out as `str`'s own format has it; one that `str` does not have leaves it as it is."""
    try:
        return format(str(self), spec)
    except ValueError:
        return str(self)


def _guarded(original: Callable[[Any], str]) -> Callable[[Any], str]:
    @functools.wraps(original)
    def text(self: Any) -> str:
        try:
            return original(self)
        except Exception:  # a part may be missing or raise anything: a debugger shows what there is of the object
            there = ", ".join(getattr(self, "__dict__", ())) or "nothing yet"
            return f"<{type(self).__name__}, half-built: {there}>"

    return text
