"""Keyword arguments are passed by position where the function allows it, so that both calls have one plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def keyword_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters; empty for those that take no keyword."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(p.name if p.kind is named else "" for p in parameters if p.kind <= named)


def by_position(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass keyword arguments by position, up to the first parameter that the call leaves to its default.

    >>> by_position((1,), {"c": 3, "b": 2, "scale": 4}, ("a", "b", "c"))
    ((1, 2, 3), {'scale': 4})
    """
    moved = []
    for name in names[len(args) :]:
        if name not in kwargs:
            break
        moved.append(name)
    rest = {name: x for name, x in kwargs.items() if name not in moved}
    return (*args, *(kwargs[name] for name in moved)), rest
