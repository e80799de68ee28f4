"""The kernels of a program on a platform."""

from __future__ import annotations

from dataclasses import replace

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.fusion import Fusion, fuse
from autoshard.sharding.cost.gathers.rounded_operands import rounded_operands
from autoshard.sharding.cost.reused_buffers import views


def program_kernels(axes: LogicalAxes, roles: Roles, platform: str) -> Fusion:
    """Group the operators of a program into the kernels of a platform.

    Args:
        axes: the logical axes of the program.
        roles: their roles.
        platform: `tpu`, `cuda` or `cpu`.
    """
    fusion = fuse(axes.program, platform == "tpu", platform == "cuda", views(axes), roles.gradients)
    return replace(fusion, rounded=rounded_operands(axes, roles, platform))
