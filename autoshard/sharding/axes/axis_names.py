"""Names of logical axes, from their roles and the paths of inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.spmdrules.ir.program import Program


def name_axes(program: Program, axes: LogicalAxes, roles: Roles, paths: Sequence[str]) -> dict[int, str]:
    """Names axes by their roles, loop axes by what the loop runs over, and others by the first input that has them.

    Args:
        program: the program.
        axes: its logical axes.
        roles: their roles.
        paths: the path of each program input.

    Returns:
        Axis -> name. Names are unique; repeated ones get a number, `heads_1`.
    """
    names: dict[int, str] = {}
    used: Counter[str] = Counter()

    def name_axis(cls: int | None, name: str) -> None:
        if cls is not None and cls not in names:
            names[cls] = f"{name}_{used[name]}" if used[name] else name
            used[name] += 1

    name_axis(roles.batch, "batch")
    name_axis(roles.residual, "embed")
    for c in roles.experts:
        name_axis(c, "experts")
    for c in roles.vocabulary:
        name_axis(c, "vocab")
    for c in roles.output_classes:
        name_axis(c, "vocab" if roles.vocabulary else "classes")
    for c in roles.heads:
        name_axis(c, "heads")
    for c in roles.sequence:
        name_axis(c, "seq")
    for c in roles.parallel:
        name_axis(c, "ffn")
    data_dims = [dim for v, role in roles.inputs.items() if role == "data" for dim in axes.of_value[v]]
    for c in sorted(axes.stacked):
        neighbours = {other for dim in data_dims if c in dim for other in dim}
        name_axis(c, "layers" if not neighbours else "microbatch" if roles.batch in neighbours else "blocks")
    for v, path in zip(program.inputs, paths, strict=True):
        for d, dim in enumerate(axes.of_value[v]):
            for part, c in enumerate(dim):
                name_axis(c, f"{path}:{d}" + (f".{part}" if len(dim) > 1 else ""))
    return names
