"""Typical inputs of a program: the first and the last of each group of equal inputs."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles

_typical: WeakKeyDictionary[Roles, tuple[int, ...]] = WeakKeyDictionary()


def typical_inputs(axes: LogicalAxes, roles: Roles) -> tuple[int, ...]:
    """Return the first and the last input of each group of equal inputs, in the order of the program.

    Inputs are equal if they have the same role, shape and logical axes, such as one weight of several equal layers. A
    layout stores equal inputs in the same sharding, unless the user has fixed shardings.
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
