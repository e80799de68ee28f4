"""Joins the dimensions of a program's values that its rules shard alike: union-find over (value, dimension).

A node is a dimension or a factor of one. Where a reshape splits a dimension of size 128 into (8, 16), its node gets two
children, and so do all nodes joined to it. Nodes without children are leaves: the dimension of a value is a sequence of
leaves, major to minor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autoshard import _compat
from autoshard._shown import shown
from autoshard.spmdrules.core.layer_stacks import layer_stacks
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.core.rule_builder import GROUPS
from autoshard.spmdrules.ir.program import Program

_SIZE_ONE = 0  # the node of every dimension of size 1; it joins nothing


@shown
@dataclass(frozen=True)
class DimensionClasses:
    """The nodes of a program.

    Attributes:
        nodes: the union-find structure.
        dims: for each value, the node of each dimension.
        factors: for each operator (in the order of `program.ops()`), the node of each factor of its rule.
        stacked: nodes of the dimensions that count loop iterations. Those of a stack of layers that a loop over the
            layers does not slice are among them: see `_whole_stacks`.
    """

    nodes: Nodes
    dims: list[tuple[int, ...]]
    factors: list[dict[str, int]]
    stacked: list[int]


def unify(program: Program) -> DimensionClasses:
    """Joins the dimensions that the rules of `program` shard in the same way."""
    nodes = Nodes()
    dims: list[tuple[int, ...]] = [tuple(nodes.new(s) for s in a.shape) for a in program.avals]
    factors: list[dict[str, int]] = []
    stacked: list[int] = []
    constants: list[tuple[int, int]] = []  # of loops: leading dimension, and the dimension of the loop's iterations
    groups_of: dict[int, int] = {}  # an array of group sizes -> the node of the groups
    for op in program.ops():
        factors.append(join_factors(nodes, dims, op))
        if op.name == "ragged_dot_general" and GROUPS in factors[-1]:
            groups = factors[-1][GROUPS]
            nodes.join(groups_of.setdefault(op.operands[2], groups), groups)
        steps: int | None = None
        for edge in op.edges:
            outer = dims[edge.outer]
            if edge.stacked:
                steps = outer[0] if steps is None else steps
                nodes.join(steps, outer[0])
                stacked.append(outer[0])
                outer = outer[1:]
            for a, b in zip(outer, dims[edge.inner], strict=True):
                nodes.join(a, b)
        if steps is not None and op.name == "scan":
            fixed = (dims[v] for v in op.operands[: _compat.scan_arity(op.eqn.params)[0]] if v >= 0)
            constants += [(outer[0], steps) for outer in fixed if len(outer) > 1]
    for node, steps in _whole_stacks(program, nodes, factors, constants):
        nodes.join(node, steps)
        stacked.append(node)
    return DimensionClasses(nodes, dims, factors, stacked)


def _whole_stacks(
    program: Program, nodes: Nodes, factors: list[dict[str, int]], constants: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Returns those `constants` that are stacks of layers (`layer_stacks`) with an element for each iteration."""
    stacks = [
        nodes.find(made[found.factor])
        for op, made in zip(program.ops(), factors, strict=True)
        if (found := layer_stacks(op.eqn.params.get("fn"))) is not None and found.factor in made
    ]  # fmt: skip
    return [(n, steps) for n, steps in constants if nodes.find(n) in stacks and nodes.size[n] == nodes.size[steps] > 1]


class Application(Protocol):
    """One application of an operator: its rule, and the numbers of its operands and results; -1 for literals."""

    @property
    def rule(self) -> Rule | None: ...  # noqa: D102
    @property
    def operands(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def results(self) -> tuple[int, ...]: ...  # noqa: D102


def join_factors(nodes: Nodes, dims: list[tuple[int, ...]], op: Application) -> dict[str, int]:
    """Joins each dimension of an operator's operands and results to its factors; returns the node of each factor."""
    node_of: dict[str, int] = {}
    if op.rule is None:
        return node_of
    arrays = [
        *zip(op.operands, op.rule.operands, strict=True),
        *zip(op.results, op.rule.results, strict=True),
    ]
    for value, array in arrays:
        if value < 0:
            continue
        for node, dim in zip(dims[value], array, strict=True):
            if len(dim) == 1:
                if (known := node_of.setdefault(dim[0], node)) != node:
                    nodes.join(known, node)
            elif dim:
                for f in dim:
                    if f not in node_of:
                        node_of[f] = nodes.new(op.rule.by_name[f].size or 1)
                nodes.join_all([node], [node_of[f] for f in dim])
    return node_of


class Nodes:
    """Union-find whose nodes can be split into children; node 0 is that of every dimension of size 1."""

    def __init__(self):
        self.parent = [0]
        self.size = [1]
        self.children: list[tuple[int, ...]] = [()]

    def new(self, size: int) -> int:
        """Adds a node of this many elements."""
        if size == 1:
            return _SIZE_ONE
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.children.append(())
        return len(self.parent) - 1

    def find(self, node: int) -> int:
        """Returns the representative of all nodes joined to `node`."""
        parent = self.parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(self, a: int, b: int) -> None:
        """Joins two nodes if they have the same size."""
        a, b = self.find(a), self.find(b)
        if a == b or self.size[a] != self.size[b]:
            return
        a, b = min(a, b), max(a, b)
        left, right = self.children[a], self.children[b]
        self.parent[b] = a
        self.children[a] = left or right
        if left and right:
            self.join_all(left, right)

    def leaves(self, node: int) -> list[int]:
        """Returns the leaves that a node is made of, major to minor."""
        node = self.find(node)
        if children := self.children[node]:
            return [leaf for child in children for leaf in self.leaves(child)]
        return [] if node == _SIZE_ONE else [node]

    def join_all(self, left: tuple[int, ...] | list[int], right: tuple[int, ...] | list[int]) -> None:
        """Joins two factorizations of one dimension. Splits a node where the other factorization has a boundary."""
        a = [leaf for node in left for leaf in self.leaves(node)]
        b = [leaf for node in right for leaf in self.leaves(node)]
        while a and b:
            x, y = self.find(a[0]), self.find(b[0])
            if self.children[x] or self.children[y]:  # split by an earlier iteration of this loop
                a[:1], b[:1] = self.leaves(x), self.leaves(y)
                continue
            small = min(self.size[x], self.size[y])
            if self.size[x] == self.size[y]:
                self.join(x, y)
                del a[0], b[0]
            elif max(self.size[x], self.size[y]) % max(small, 1) or small == 0:
                return  # the boundaries do not nest: the remaining factors are not joined
            else:
                big = x if self.size[x] > small else y
                self.children[big] = (self.new(small), self.new(self.size[big] // small))
