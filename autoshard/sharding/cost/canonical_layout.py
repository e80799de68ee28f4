"""Where a layout has the values of groups, in words that other layouts share: by numbers instead of mesh axes.

What an operator costs depends on which dimensions are cut how many ways, not on what mesh axes are called: so what one
layout has paid for need not be priced again for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.equivalence_classes import OperatorClass, value_classes
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import beside_state, is_gradient, operand_spec
from autoshard.spmdrules.core.placement import Spec

Names = Mapping[str, tuple[str, ...]]  # number -> the mesh axes that it stands for
Sizes = Mapping[str, int]
_Ask = Callable[[Layout, int], Spec]


class Values:
    """The values of groups. Of those that no layout tells apart each layout is asked about one.

    Attributes:
        examples: what each layout is asked: how, and about which value.
        of_group: of each group the numbers of its operands, its results, and what its kernel reads and writes.
    """

    def __init__(self, axes: LogicalAxes, roles: Roles, groups: Sequence[OperatorClass]):
        self.examples: list[tuple[_Ask, int]] = []
        self.of_group: list[tuple[int, ...]] = []
        asked = [_asked(g, axes, roles) for g in groups]
        values = dict.fromkeys(v for some in asked for _, v in some if v >= 0)
        found = value_classes(axes, roles, values, apart=roles.inputs)
        kind = dict(zip(values, found.numbers.tolist(), strict=True)) | {-1: -1}
        numbers: dict[tuple[_Ask, int], int] = {}
        for some in asked:
            for ask, v in some:
                if numbers.setdefault((ask, kind[v]), len(numbers)) == len(self.examples):
                    self.examples.append((ask, v))
            self.of_group.append(tuple(numbers[ask, kind[v]] for ask, v in some))


def _asked(g: OperatorClass, axes: LogicalAxes, roles: Roles) -> list[tuple[_Ask, int]]:
    """What a layout is asked about a group."""
    memory = (*g.kernel.reads, *g.kernel.writes) if g.kernel else ()
    operands = [(operand_spec if v >= 0 else _nowhere, v) for v in g.op.operands]
    results = [(beside_state if is_gradient(axes, roles, g.op, v) else Layout.spec, v) for v in g.op.results]
    return [*operands, *results, *((operand_spec, v) for v in memory)]


def _nowhere(layout: Layout, literal: int) -> Spec:
    return ()


class CanonicalLayout:
    """The specs that one layout gives to values."""

    def __init__(self, layout: Layout, values: Values):
        self.mesh = layout.mesh
        numbers: dict[Spec, int] = {}
        self.spec_of = [numbers.setdefault(ask(layout, v), len(numbers)) for ask, v in values.examples]
        self.specs = list(numbers)
        self._known: dict[frozenset[int], tuple[Names, Sizes, Mapping[int, Spec]]] = {}

    def __call__(self, values: Sequence[int]) -> tuple[Names, Sizes, tuple[Spec, ...]]:
        """The specs of some of the values without names.

        Returns:
            number -> the mesh axes that it stands for; number -> size; the specs.
        """
        specs = [self.spec_of[v] for v in values]
        some = frozenset(specs)
        if some not in self._known:
            names, sizes, plain = canonical([self.specs[n] for n in some], self.mesh)
            self._known[some] = names, sizes, dict(zip(some, plain, strict=True))
        names, sizes, plain = self._known[some]
        return names, sizes, tuple([plain[n] for n in specs])


def canonical(specs: Sequence[Spec], mesh: Mapping[str, int]) -> tuple[Names, Sizes, tuple[Spec, ...]]:
    """Specs with mesh axes numbered in mesh order, those that always stand one behind the other as one.

    Returns:
        number -> the axes that it stands for; number -> size; the specs.
    """
    after: dict[str, str | None] = {}
    before: dict[str, str | None] = {}
    for spec in specs:
        for dim in spec:
            previous = None
            for axis in dim:
                if before.setdefault(axis, previous) != previous:
                    before[axis] = None
                if previous is not None and after.setdefault(previous, axis) != axis:
                    after[previous] = None
                previous = axis
            if previous is not None and after.setdefault(previous, None) is not None:
                after[previous] = None
    head: dict[str, str] = {}
    chains: dict[str, list[str]] = {}
    for axis in mesh:  # an axis that follows another in every spec stands later in the mesh, too
        if axis in before:
            leader = before[axis]
            joined = leader in head and after.get(leader) == axis
            head[axis] = head[leader] if joined and leader is not None else axis
            chains.setdefault(head[axis], []).append(axis)
    number = {axis: str(i) for i, axis in enumerate(chains)}
    return (
        {number[axis]: tuple(chain) for axis, chain in chains.items()},
        {number[axis]: math.prod(mesh[a] for a in chain) for axis, chain in chains.items()},
        tuple(tuple(tuple(number[a] for a in dim if a in number) for dim in spec) for spec in specs),
    )
