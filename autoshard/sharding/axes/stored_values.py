"""Values that a plan may store in shards: inputs, their aliases, weights computed from them, and gradients."""

from __future__ import annotations

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles


def sources_of(axes: LogicalAxes, roles: Roles) -> dict[int, int]:
    """Return each alias of an input, and each weight computed from a parameter -> that input."""
    return {**axes.parameter_aliases, **roles.computed_weights}


def may_be_stored(axes: LogicalAxes, roles: Roles, value: int) -> bool:
    """Whether a plan may store a value in other shards than it is used in."""
    return (
        value in roles.inputs
        or value in axes.parameter_aliases
        or value in roles.computed_weights
        or value in roles.gradients
    )
