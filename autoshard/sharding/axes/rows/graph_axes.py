"""The axes of graphs in the data: edges, nodes and graphs. Other data refer to nodes and graphs by number.

A graph network gathers the features of nodes by the numbers that each edge has, and sums messages into nodes by such
numbers. So an axis of nodes is indexed by gathers and scatters whose indices run over the edges. Nodes are summed into
graphs in the same way, but no feature of a graph is gathered first.

Both axes occur in inputs that are not state. So the rows of an embedding do not count as nodes: a trained table is
state, and nothing is scattered into an untrained one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.spmdrules.ir.program import Program


@shown
@dataclass(frozen=True)
class GraphAxes:
    """The axes of graphs in the data of a step; empty if there are none.

    Attributes:
        edges: axes of edges.
        nodes: axes of nodes.
        graphs: axes of graphs, into which nodes are summed.
    """

    edges: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    graphs: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """The axes of edges, nodes and graphs."""
        return (*self.edges, *self.nodes, *self.graphs)

    def beside(self, batch: int | None) -> tuple[int, ...]:
        """The axes of rows other than the batch, if the batch is one of the axes; else none."""
        return tuple(c for c in self.all if c != batch) if batch in self.all else ()

    def features(self, program: Program, axes: LogicalAxes, state: Sequence[int]) -> list[int]:
        """The inputs that are not state and have one of the axes: features of nodes, targets of graphs."""
        own = {*self.all}
        return [v for v in program.inputs if v not in state and own & {c for dim in axes.of_value[v] for c in dim}]


def find_graph_axes(program: Program, axes: LogicalAxes, state: Sequence[int]) -> GraphAxes:
    """Finds the axes of graphs among the axes of inputs that are not state.

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that the program returns updated. Without any, data cannot be told from tables.
    """
    if not state:
        return GraphAxes()
    of_state = {c for v in state for dim in axes.of_value[v] for c in dim}
    of_data = [{c for dim in axes.of_value[v] for c in dim} for v in program.inputs if v not in state]
    own = set[int]().union(*of_data) - of_state
    first_op, summed_into = _indexed(program, axes)
    pairs = [
        (rows, addressed)
        for rows, addressed in summed_into
        if {rows, addressed} <= own and rows != addressed and not any({rows, addressed} <= found for found in of_data)
    ]
    edge_pairs = [pair for pair in pairs if first_op[pair] == "gather"]
    edges = dict.fromkeys(rows for rows, _ in edge_pairs)
    nodes = dict.fromkeys(addressed for _, addressed in edge_pairs if addressed not in edges)
    others = {**edges, **nodes}
    graphs = dict.fromkeys(addressed for rows, addressed in pairs if rows in nodes and addressed not in others)
    return GraphAxes(tuple(edges), tuple(nodes), tuple(graphs))


def _indexed(program: Program, axes: LogicalAxes) -> tuple[Mapping[tuple[int, int], str], Sequence[tuple[int, int]]]:
    """Pairs (axis of the indices, axis that they index): the first operator of each, and the pairs of scatters."""
    first_op: dict[tuple[int, int], str] = {}
    scattered: dict[tuple[int, int], None] = {}
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if op.rule is None or not (op.name == "gather" or op.name.startswith("scatter")) or op.operands[1] < 0:
            continue
        # An axis that the indices share with the indexed array does not count edges. The operator then picks an element
        # of each row, such as the score of the right document for each query.
        indexed = {c for dim in axes.of_value[op.operands[0]] for c in dim}
        rows = [c for dim in axes.of_value[op.operands[1]] for c in dim if c not in indexed]
        for addressed in (c for f in op.rule.factors if f.kind == "index" for c in factors.get(f.name, ())):
            for row in rows:
                first_op.setdefault((row, addressed), op.name)
                if op.name != "gather":
                    scattered[row, addressed] = None
    return first_op, list(scattered)
