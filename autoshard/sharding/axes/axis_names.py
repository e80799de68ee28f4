"""Names of logical axes, from their roles and the paths of inputs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence

from autoshard import _compat
from autoshard.sharding.axes.graph_axes import GraphAxes
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.spmdrules.ir.program import Op, Program

_IN_NORMS = {"mul", "div", "integer_pow", "square"}  # nonlinear operators in the norm of a vector


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
    name_axis(roles.stages, "stages")
    name_axis(roles.replicas, "replicas")
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
    thin = ThinAxes(program, axes, roles)
    for c in thin.adapter_ranks():
        name_axis(c, "lora_rank")
    for c in thin.latents():
        name_axis(c, "latent")
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
    for op in program.ops():
        for v in (*op.results, *op.operands) if op.rule is not None else ():
            dims = axes.of_value[v] if v >= 0 else ()
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


class ThinAxes:
    """The axes of activations that are smaller than what their weights make of them, and what is computed with them.

    Args:
        program: the program.
        axes: its logical axes.
        roles: their roles.
    """

    def __init__(self, program: Program, axes: LogicalAxes, roles: Roles):
        self.roles = roles
        self.weights: Counter[int] = Counter()  # axis -> the number of matrices that have it
        wide: set[int] = set()
        for v in program.inputs:
            own = [c for dim in axes.of_value[v] for c in dim if c not in axes.stacked]
            if roles.inputs.get(v) == "parameter" and len(own) > 1:
                total = math.prod(axes.sizes[c] for c in own)
                self.weights.update(own)
                wide |= {c for c in own if axes.sizes[c] ** 2 >= total}
        thin = self.weights.keys() - wide
        self.nonlinear: dict[int, set[str]] = {c: set() for c in thin}  # axis -> operators that are not linear in it
        self.made: set[int] = set()  # axes that a product with other activations has made
        self.contracted: set[int] = set()  # axes over which a product of the forward pass sums
        self.mixed: set[int] = set()  # axes of values that are combined with other activations
        self.summed: set[int] = set()  # axes that are summed over, as in a norm
        self.added: set[int] = set()  # axes of values that are added, as in a residual stream
        found = {dims: {c for dim in dims for c in dim} for dims in {*axes.of_value}}

        def of_activation(v: int) -> set[int] | None:
            own = found[axes.of_value[v]] if v >= 0 else set()
            return own if v in roles.row or roles.batch in own else None

        for op in program.ops():
            if op.rule is not None:
                self._visit(op, [*map(of_activation, op.operands)], [*map(of_activation, op.results)])

    def adapter_ranks(self) -> list[int]:
        """The axes between the two weights of a product that replaces one larger weight, as in LoRA (arXiv:2106.09685).

        Nothing but these weights is between them: all that is computed with the axis is linear.
        """
        found = [c for c in self.roles.parallel if self.weights[c] > 1 and self.nonlinear.get(c) == set()]
        return [c for c in found if c in self.made & self.contracted and c not in self.mixed | self.summed]

    def latents(self) -> list[int]:
        """The axes of vectors from which queries, or keys and values, are computed (arXiv:2405.04434, section 2.1).

        Such a vector is only normalized before a weight makes it larger. It is no residual stream.
        """
        found = sorted(self.summed & self.contracted - self.added)
        return [c for c in found if self.nonlinear[c] <= _IN_NORMS]

    def _visit(self, op: Op, operands: Sequence[set[int] | None], results: Sequence[set[int] | None]) -> None:
        """Note what an operator computes, given the axes of its operands and results; None of those without rows."""
        assert op.rule is not None
        computed, used = ({*itertools.chain(*filter(None, arrays))} for arrays in (results, operands))
        gives_rows = any(dims is not None for dims in results)
        linear = [{*group} for group in (*op.rule.linear, op.rule.moves)]
        for c in self.nonlinear.keys() & (computed | used):
            group = {n for n, dims in enumerate(operands) if dims is not None and c in dims}
            if op.name != "convert_element_type" and not any(group <= each for each in [*linear, set()]):
                self.nonlinear[c].add(op.name)
            if group and c in computed and any(dims is not None and c not in dims for dims in operands):
                self.mixed.add(c)
            is_lost = c not in computed and gives_rows
            if op.name == "dot_general" and not group:
                self.made.add(c)
            if op.name == "dot_general" and is_lost and not any(map(_compat.is_transposed, (op.eqn, *op.around))):
                self.contracted.add(c)
            if op.name == "reduce_sum" and is_lost:
                self.summed.add(c)
            if op.name == "add" and len(group) > 1:
                self.added.add(c)


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
