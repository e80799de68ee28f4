"""The inputs of a program of which equal ones are left out, such as those of equal layers."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles

_typical: WeakKeyDictionary[Roles, tuple[int, ...]] = WeakKeyDictionary()


def typical_inputs(axes: LogicalAxes, roles: Roles) -> tuple[int, ...]:
    """The first and the last of all program inputs that have the same role, shape and logical axes, in order.

    If nothing is fixed, a layout stores equal inputs alike, such as those of equal layers.
    """
    if roles not in _typical:
        first: dict[Any, int] = {}
        last: dict[Any, int] = {}
        for v, role in roles.inputs.items():
            key = axes.of_value[v], axes.program.avals[v].shape, role
            first.setdefault(key, v)
            last[key] = v
        kept = {*first.values(), *last.values()}
        _typical[roles] = tuple(v for v in roles.inputs if v in kept)
    return _typical[roles]
