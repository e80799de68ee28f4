"""Arrays in the attributes of objects that are not pytrees.

Such an object is a static leaf. Its arrays would be constants of the plan, and a change of them would not be seen. This
concerns objects that are compared by identity. Objects that define `==` are compared by value, and functions and frozen
dataclasses do not change.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import jax
import numpy as np
from flax import linen

from autoshard import _compat
from autoshard.sharding.program.constants import SEARCHED_DEPTH, SEARCHED_ITEMS, SEARCHED_VALUES

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial, type, types.ModuleType,
              jax.custom_jvp, jax.custom_vjp)  # fmt: skip
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None)})  # exact types, which hold nothing


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
    return _first_array(leaf, only_traced)


def _is_compared_by_identity(value: Any) -> bool:
    if isinstance(value, (*_FUNCTIONS, linen.Module)):
        return False
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:  # pyright: ignore
        return False
    return type(value).__hash__ is object.__hash__


def _first_array(leaf: Any, only_traced: bool) -> str | None:
    """Search the leaf level by level. It is fast, because it runs at every call that has static leaves."""
    level, left = [(leaf, "")], SEARCHED_VALUES
    for _ in range(SEARCHED_DEPTH):
        values, level = level, []
        for value, path in values:
            pattern, parts = _parts(value)
            for key, inside in parts:
                if type(inside) in _PLAIN or isinstance(inside, _FUNCTIONS):
                    continue
                if _compat.is_tracer(inside) or (not only_traced and _is_array(inside)):
                    return path + pattern.format(key)
                if left := left - 1:
                    level.append((inside, path + pattern.format(key)))
                else:
                    return None
    return None


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.dtype.kind in "fiucb")


def _parts(value: Any) -> tuple[str, Iterable[tuple[Any, Any]]]:
    """The pattern of keys in a path, and the first items of a container or the attributes of an object."""
    if isinstance(value, Mapping):
        return "[{!r}]", islice(value.items(), SEARCHED_ITEMS)
    if isinstance(value, (list, tuple)):
        return "[{}]", enumerate(value[:SEARCHED_ITEMS])
    if isinstance(value, types.MethodType):
        return ".{}", [("__self__", value.__self__)]
    attributes = getattr(value, "__dict__", {})
    if "__wrapped__" in attributes:  # a function in a wrapper
        return "", ()
    slots = [name for cls in type(value).__mro__ for name in _names(cls.__dict__.get("__slots__", ()))]
    found = {name: getattr(value, name, None) for name in slots if not name.startswith("__")}
    return ".{}", list((found | attributes).items())


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
