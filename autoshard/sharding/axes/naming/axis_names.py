"""Names of logical axes, from their roles and the paths of inputs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.naming.convolution_axes import convolution_axes
from autoshard.sharding.axes.naming.thin_axes import ThinAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.axes.rows.graph_axes import GraphAxes
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
    if roles.batch not in roles.sequence:
        name_axis(roles.batch, "batch")
    for c in roles.other_rows:
        name_axis(c, "batch")
    name_axis(roles.stages, "stages")
    name_axis(roles.replicas, "replicas")
    for c in sorted(roles.counts):
        name_axis(c, "microbatch")
    name_axis(roles.residual, "embed")
    for c in roles.experts:
        name_axis(c, "experts")
    for c in roles.routers:
        name_axis(c, "router")
    spatial, channels = convolution_axes(program, axes)
    tables = [c for c in roles.vocabulary if c not in names]
    for c in tables:
        name_axis(c, "vocab")
    for c in roles.output_classes:
        name_axis(c, channels.get(c) or ("vocab" if tables else "classes"))
    for c in roles.heads:
        name_axis(c, "heads")
    for c in roles.sequence:
        name_axis(c, "features" if _only_beside(program, axes, c, graph.all) else spatial.get(c, "seq"))
    for c in roles.head_dims:
        name_axis(c, "head_dim")
    thin = ThinAxes(program, axes, roles)
    for c in thin.adapter_ranks():
        name_axis(c, "lora_rank")
    for c in thin.latents():
        name_axis(c, "latent")
    data_dims = [dim for v, role in roles.inputs.items() if role == "data" for dim in axes.of_value[v]]
    for c in roles.parallel:
        name_axis(c, channels.get(c) or ("features" if any(c in dim for dim in data_dims) else "ffn"))
    for c, name in (spatial | channels).items():
        name_axis(c, name)
    for c in sorted(axes.stacked):
        neighbours = {other for dim in data_dims if c in dim for other in dim}
        name_axis(c, "layers" if not neighbours else "microbatch" if roles.batch in neighbours else "blocks")
    for v, path in zip(program.inputs, paths, strict=True):
        for d, dim in enumerate(axes.of_value[v]):
            for part, c in enumerate(dim):
                if c not in axes.key_words:
                    name_axis(c, _dimension_name(path, d, part, dim))
    return names


def name_computed_axes(program: Program, axes: LogicalAxes, roles: Roles) -> dict[int, str]:
    """Names axes that no input has by the first operator that computes a value with them: `concatenate:3`.

    An axis with the size of a head in the dimension after the heads is named `head_dim`, as after a rotary embedding.

    Args:
        program: the program.
        axes: its logical axes, of which those of the inputs have names.
        roles: their roles.

    Returns:
        Axis -> name. Names are unique, also among those of the inputs.
    """
    names: dict[int, str] = {}
    used = {*axes.names.values()}
    head_sizes = {axes.sizes[c] for c in roles.head_dims}
    unnamed = {dims for dims in {*axes.of_value} if any(c not in axes.names for dim in dims for c in dim)}
    values = {v for v, dims in enumerate(axes.of_value) if dims in unnamed}
    for op in program.ops() if values else ():
        for v in (*op.results, *op.operands) if op.rule is not None else ():
            dims = axes.of_value[v] if v in values else ()
            for d, dim in enumerate(dims):
                for part, c in enumerate(dim):
                    if c in names or c in axes.names or c in axes.key_words:
                        continue
                    after_heads = (
                        d == len(dims) - 1 and part == 0 and dims[d - 1][-1:] and dims[d - 1][-1] in roles.heads
                    )
                    is_head = after_heads and axes.sizes[c] in head_sizes
                    names[c] = _unused("head_dim" if is_head else _dimension_name(op.name, d, part, dim), used)
                    used.add(names[c])
    return names


def _dimension_name(value: str, d: int, part: int, dim: Sequence[int]) -> str:
    """The name of a dimension of a value, or of one of the axes that it is made of: `w:1`, `w:1.0`."""
    return f"{value}:{d}" + (f".{part}" if len(dim) > 1 else "")


def _unused(name: str, used: Collection[str]) -> str:
    """The name, with a number if it is used."""
    return next(one for n in itertools.count() if (one := f"{name}_{n}" if n else name) not in used)


def _only_beside(program: Program, axes: LogicalAxes, cls: int, rows: Sequence[int]) -> bool:
    """Whether every input with an axis has it last, and one of `rows` first, as the features of nodes and edges."""
    found = [axes.of_value[v] for v in program.inputs if any(cls in dim for dim in axes.of_value[v])]
    return all(len(dims) > 1 and dims[-1] == (cls,) and len(dims[0]) == 1 and dims[0][0] in rows for dims in found)
