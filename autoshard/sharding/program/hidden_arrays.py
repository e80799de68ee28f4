"""Arrays in the attributes of objects that are not pytrees.

Such an object is a static leaf. Its arrays would be constants of the plan, and a change of them would not be seen. This
concerns objects that are compared by identity. Objects that define `==` are compared by value, and functions and frozen
dataclasses do not change.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen

from autoshard import _compat
from autoshard.sharding.program.constants import SEARCHED_DEPTH

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial, type, types.ModuleType)


def array_inside(leaf: Any, *, only_traced: bool = False) -> str | None:
    """Return where a static leaf holds an array that can change unseen, `.model.w`; None if it holds none.

    Args:
        leaf: the leaf.
        only_traced: look for values under trace only, which a result must not hold.
    """
    if isinstance(leaf, types.MethodType):
        inside = array_inside(leaf.__self__, only_traced=only_traced)
        return inside and f".__self__{inside}"
    if not _is_compared_by_identity(leaf):
        return None
    return next(_arrays(leaf, "", SEARCHED_DEPTH, only_traced), None)


def _is_compared_by_identity(value: Any) -> bool:
    if isinstance(value, (*_FUNCTIONS, linen.Module)):
        return False
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:  # pyright: ignore
        return False
    return type(value).__hash__ is object.__hash__


def _arrays(value: Any, path: str, depth: int, only_traced: bool) -> Iterator[str]:
    if _compat.is_tracer(value) or (not only_traced and _is_array(value)):
        yield path
    elif depth and not isinstance(value, _FUNCTIONS):
        for key, inside in _parts(value):
            yield from _arrays(inside, path + key, depth - 1, only_traced)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.dtype.kind in "fiucb")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, or the attributes of an object, with their text in a path."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inside) for key, inside in list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", inside) for i, inside in enumerate(value))
    else:
        slots = [name for cls in type(value).__mro__ for name in _names(getattr(cls, "__slots__", ()))]
        found = {name: getattr(value, name, None) for name in slots if not name.startswith("__")}
        found |= getattr(value, "__dict__", {})
        yield from ((f".{name}", inside) for name, inside in found.items())


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
