"""Names of logical axes, from their roles and the paths of inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoshard.sharding.axes.graph_axes import GraphAxes
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.spmdrules.ir.program import Program


def name_axes(
    program: Program, axes: LogicalAxes, roles: Roles, paths: Sequence[str], graph: GraphAxes | None = None
) -> dict[int, str]:
    """Names axes by their roles, loop axes by what the loop runs over, and others by the first input that has them.

    Args:
        program: the program.
        axes: its logical axes.
        roles: their roles.
        paths: the path of each program input.
        graph: the axes of graphs in the data.

    Returns:
        Axis -> name. Names are unique; repeated ones get a number, `heads_1`. The words of random keys get none.
    """
    names: dict[int, str] = {}
    used: Counter[str] = Counter()

    def name_axis(cls: int | None, name: str) -> None:
        if cls is not None and cls not in names:
            names[cls] = f"{name}_{used[name]}" if used[name] else name
            used[name] += 1

    graph = graph or GraphAxes()
    for c in graph.edges:
        name_axis(c, "edges")
    for c in graph.nodes:
        name_axis(c, "nodes")
    for c in graph.graphs:
        name_axis(c, "graphs")
    name_axis(roles.batch, "batch")
    name_axis(roles.residual, "embed")
    for c in roles.experts:
        name_axis(c, "experts")
    tables = [c for c in roles.vocabulary if c not in names]
    for c in tables:
        name_axis(c, "vocab")
    for c in roles.output_classes:
        name_axis(c, "vocab" if tables else "classes")
    for c in roles.heads:
        name_axis(c, "heads")
    for c in roles.sequence:
        name_axis(c, "features" if _only_beside(program, axes, c, graph.all) else "seq")
    for c in roles.head_dims:
        name_axis(c, "head_dim")
    data_dims = [dim for v, role in roles.inputs.items() if role == "data" for dim in axes.of_value[v]]
    for c in roles.parallel:
        name_axis(c, "features" if any(c in dim for dim in data_dims) else "ffn")
    for c in sorted(axes.stacked):
        neighbours = {other for dim in data_dims if c in dim for other in dim}
        name_axis(c, "layers" if not neighbours else "microbatch" if roles.batch in neighbours else "blocks")
    for v, path in zip(program.inputs, paths, strict=True):
        for d, dim in enumerate(axes.of_value[v]):
            for part, c in enumerate(dim):
                if c not in axes.key_words:
                    name_axis(c, f"{path}:{d}" + (f".{part}" if len(dim) > 1 else ""))
    return names


def _only_beside(program: Program, axes: LogicalAxes, cls: int, rows: Sequence[int]) -> bool:
    """Whether every input that has an axis has it after one of `rows`, as the features of nodes and edges."""
    found = [axes.of_value[v] for v in program.inputs if any(cls in dim for dim in axes.of_value[v])]
    return all(len(dims) > 1 and dims[-1] == (cls,) and len(dims[0]) == 1 and dims[0][0] in rows for dims in found)
