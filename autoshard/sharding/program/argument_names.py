"""Names of arguments: paths that begin with the name of the function's parameter instead of its number.

Paths in plans begin with the position of the argument, `0/layers/wq`. Reports show the name of the parameter instead,
`state/layers/wq`. Both forms are accepted where a path is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Value = TypeVar("Value")


def argument_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters, without `*args`; empty if it has no signature."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in kinds)


def without_parameters(fn: Callable[..., Any], numbers: Sequence[int]) -> inspect.Signature | None:
    """The signature of a function without some positional parameters; None if it has no signature."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    return signature.replace(parameters=[p for i, p in enumerate(signature.parameters.values()) if i not in numbers])


def named_path(path: str, names: Sequence[str]) -> str:
    """A path with the name of the parameter in place of its number.

    >>> named_path("0/layers/wq", ("state", "batch"))
    'state/layers/wq'
    """
    head, separator, rest = path.partition("/")
    return f"{names[int(head)]}{separator}{rest}" if head.isdecimal() and int(head) < len(names) else path


def arguments_text(leaves: Mapping[str, Any], limit: int = 3, arguments: int = 6) -> str:
    """The first leaves of the first arguments with their shapes, for messages.

    Args:
        leaves: named path -> array, shape or number, in the order of the arguments.
        limit: how many leaves of an argument are named.
        arguments: how many arguments are named.

    >>> arguments_text({"state/w": np.ones((8, 4)), "state/count": np.int32(0), "batch": np.ones(16)}, limit=1)
    'state/w float64[8,4] and 1 more; batch float64[16]'
    >>> arguments_text({"x": np.ones(2), "rate": 0.1, "scale": 2}, arguments=2)
    'x float64[2]; rate float; and 1 more argument'
    """
    found: dict[str, list[str]] = {}
    for path, leaf in leaves.items():
        dtype, shape = getattr(leaf, "dtype", None), ",".join(map(str, np.shape(leaf)))
        kind = type(leaf).__name__ if dtype is None else f"{dtype}[{shape}]"
        found.setdefault(path.partition("/")[0], []).append(f"{' '.join(path.split()):.80} {kind}")
    texts = [
        ", ".join(each[:limit]) + (f" and {len(each) - limit} more" if len(each) > limit else "")
        for each in found.values()
    ]
    if (more := len(texts) - arguments) > 0:
        texts = [*texts[:arguments], f"and {more} more argument{'s' * (more > 1)}"]
    return "; ".join(texts)


class ByPath(dict[str, Value]):
    """Values by path, as reports show paths. A path with the position of the argument finds the same value.

    Args:
        values: path as in the plan -> value.
        names: the names of the function's parameters.

    Example:
        >>> axes = ByPath({"0/up": ("embed", "ffn")}, ("params", "batch"))
        >>> axes
        {'params/up': ('embed', 'ffn')}
        >>> axes["0/up"]
        ('embed', 'ffn')
    """

    def __init__(self, values: Mapping[str, Value], names: Sequence[str]):
        super().__init__({named_path(path, names): value for path, value in values.items()})
        self._names = tuple(names)

    def __missing__(self, path: str) -> Value:
        named = named_path(path, self._names)
        if not super().__contains__(named):
            raise KeyError(path)
        return self[named]

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and super().__contains__(named_path(path, self._names))

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value of a path, or `default`."""
        return self[path] if path in self else default


def path_forms(path: str, names: Sequence[str]) -> tuple[str, ...]:
    """The forms of a path that users can give: as in the plan, and with the name of the parameter."""
    named = named_path(path, names)
    return (path,) if named == path else (path, named)
