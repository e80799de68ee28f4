"""A decorator for classes whose objects can always be printed: in a debugger, half-built, or with bad attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
SHOWN: list[type] = []  # every class that `shown` decorates


def shown(cls: C) -> C:
    """Class decorator, above `@dataclass`: `repr` and `str` never raise.

    If the class's method raises, its own or an inherited one, they name the attributes that the object has. `format`
    accepts any specification.

    >>> @shown
    ... class Pair:
    ...     def __repr__(self):
    ...         return f"Pair({self.left}, {self.right})"
    >>> half = Pair.__new__(Pair)
    >>> half.left = 1
    >>> half
    <Pair, half-built: left>
    """
    for name, plain in (("__repr__", object.__repr__), ("__str__", object.__str__)):
        if (method := getattr(cls, name)) is not plain:
            setattr(cls, name, _guarded(method))
    setattr(cls, "__format__", _format)  # noqa: B010  a plain assignment fails type checking
    SHOWN.append(cls)
    return cls


def _format(self: Any, spec: str) -> str:
    """Formats the text as `str` would; ignores a specification that `str` does not support."""
    try:
        return format(str(self), spec)
    except ValueError:
        return str(self)


def _guarded(original: Callable[[Any], str]) -> Callable[[Any], str]:
    @functools.wraps(original)
    def text(self: Any) -> str:
        try:
            return original(self)
        except Exception:  # an attribute may be missing, or its `repr` may raise anything
            present = ", ".join(getattr(self, "__dict__", ())) or "nothing yet"
            return f"<{type(self).__name__}, half-built: {present}>"

    return text
