"""Values that a plan may store in shards: inputs, their aliases, weights computed from them, and gradients."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.program.array_sizes import nbytes

_small_layers: WeakKeyDictionary[LogicalAxes, dict[float, list[int]]] = WeakKeyDictionary()


def sources_of(axes: LogicalAxes, roles: Roles) -> dict[int, int]:
    """Return each alias of an input, and each weight computed from a parameter -> that input."""
    return {**axes.parameter_aliases, **roles.computed_weights}


def small_layers(axes: LogicalAxes, most_bytes: float) -> list[int]:
    """Return the aliases with the layers of the stages (`layer_dims`) whose layers have at most `most_bytes` each."""
    of_size = _small_layers.setdefault(axes, {})
    if most_bytes not in of_size:
        of_size[most_bytes] = [v for v in axes.layer_dims if _layer_bytes(axes, v) <= most_bytes]
    return of_size[most_bytes]


def is_small_stack(axes: LogicalAxes, value: int, most_bytes: float) -> bool:
    """Return whether a loop runs over the first dimension of a value, in slices of at most `most_bytes`."""
    leaves, aval = axes.of_value[value], axes.program.avals[value]
    return bool(leaves) and not axes.stacked.isdisjoint(leaves[0][:1]) and nbytes(aval) <= most_bytes * aval.shape[0]


def _layer_bytes(axes: LogicalAxes, value: int) -> float:
    aval, layer = axes.program.avals[value], axes.layer_dims[value]
    return nbytes(aval) / math.prod(aval.shape[: aval.ndim - len(layer)])


def may_be_stored(axes: LogicalAxes, roles: Roles, value: int) -> bool:
    """Whether a plan may store a value in other shards than it is used in."""
    return (
        value in roles.inputs
        or value in axes.parameter_aliases
        or value in roles.computed_weights
        or value in roles.gradients
    )
