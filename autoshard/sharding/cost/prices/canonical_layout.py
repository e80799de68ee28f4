"""The specs that a layout gives to the values of operator classes, in a canonical form: numbers for mesh axes.

The cost of an operator depends on how many ways each dimension is sharded, not on the names of mesh axes. So prices are
reused across layouts.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.equivalence_classes import OperatorClass, value_classes
from autoshard.sharding.cost.prices.price import Price
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import spec_function, wanted_spec_of
from autoshard.sharding.program.operator_kinds import is_declared
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.custom_ops.sequence_forms import sequence_forms_of
from autoshard.spmdrules.ir.program import Op

Names = Mapping[str, tuple[str, ...]]  # number -> the mesh axes that it stands for
Sizes = Mapping[str, int]
Renamed = tuple[Names, Mapping[str, str], tuple[Spec, ...]]  # see `canonical`
_SpecOf = Callable[[Layout, int], Spec]


class SpecQueries:
    """Queries for the specs that the prices of operator classes depend on. Values of one class share a query.

    Attributes:
        queries: pairs (function, value). `function(layout, value)` is a spec.
        numbers: the specs that layouts gave so far, numbered.
        specs: the same as a list.
        renamed: the mesh axes and the ways of attention of a layout -> numbers of specs -> their canonical form, and
            the number of this form.
        known: the mesh and the ways of attention of a layout -> whether a class has ways -> numbers of specs -> their
            canonical form. Nothing else of a layout matters to it.
        forms: the canonical forms so far, with their numbers. A number is hashed faster than nested tuples.
        keys: number of a form, sizes of its mesh axes and ways of attention -> a number (`CanonicalSpecs.number`).
        of_class: for each operator class, a function of the answers to all queries. It returns the answers for the
            operands, for the results, and for the values that the kernel reads and writes.
        has_ways: for each operator class, whether it can run over a sharded sequence in several ways. Only the prices
            of such classes depend on the ways.
    """

    def __init__(
        self, axes: LogicalAxes, roles: Roles, classes: Sequence[OperatorClass], distinct: Collection[int] = ()
    ):
        self.queries: list[tuple[_SpecOf, int]] = []
        self.of_class: list[Callable[[Mapping[int, int]], tuple[int, ...]]] = []
        self.has_ways = [_has_ways(each.op) for each in classes]
        self.numbers: dict[Spec, int] = {}
        self.specs: list[Spec] = []
        self.renamed: dict[Any, dict[tuple[int, ...], tuple[Names, Mapping[str, str], tuple[Spec, ...], int]]] = {}
        self.known: dict[Any, dict[bool, dict[tuple[int, ...], CanonicalSpecs]]] = {}
        self.forms: dict[tuple[Spec, ...], int] = {}
        self.keys: dict[tuple[Any, ...], int] = {}
        needed = [_needed_specs(each, axes, roles) for each in classes]
        values = dict.fromkeys(v for some in needed for _, v in some if v >= 0)
        found = value_classes(axes, roles, values, distinct)
        class_of = dict(zip(values, found.numbers.tolist(), strict=True)) | {-1: -1}
        numbers: dict[Any, int] = {}
        for some in needed:
            # Values of the same logical axes are computed and used in the same sharding.
            keys = [(f, axes.of_value[v]) if f is Layout.spec else (f, class_of[v]) for f, v in some]
            for key, query in zip(keys, some, strict=True):
                if numbers.setdefault(key, len(numbers)) == len(self.queries):
                    self.queries.append(query)
            self.of_class.append(_picker([numbers[key] for key in keys]))


def _has_ways(op: Op) -> bool:
    """Whether an operator states how it runs over a sharded sequence."""
    return is_declared(op) and sequence_forms_of(op.eqn.params, [v.aval for v in op.eqn.invars]) is not None


def _picker(queries: Sequence[int]) -> Callable[[Mapping[int, int]], tuple[int, ...]]:
    """Return a function that returns the answers to these queries, as a tuple."""
    if len(queries) > 1:
        return operator.itemgetter(*queries)  # twice as fast as a list comprehension, and a search makes many calls
    return lambda answers: tuple([answers[query] for query in queries])


def _needed_specs(op_class: OperatorClass, axes: LogicalAxes, roles: Roles) -> list[tuple[_SpecOf, int]]:
    """The functions and values that give the specs of an operator class."""
    op, kernel = op_class.op, op_class.kernel
    memory = (*kernel.reads, *kernel.writes) if kernel else ()
    operands = [(spec_function(axes, roles, v) if v >= 0 else _spec_of_literal, v) for v in op.operands]
    results = [(wanted_spec_of(axes, roles, op, v), v) for v in op.results]
    return [*operands, *results, *((spec_function(axes, roles, v), v) for v in memory)]


def _spec_of_literal(layout: Layout, literal: int) -> Spec:
    return ()


@shown
class CanonicalSpecs(NamedTuple):
    """Specs in which numbers stand for mesh axes.

    Attributes:
        names: number -> the mesh axes that it stands for.
        sizes: number -> their size.
        sequence: number -> how attention runs over them (`Layout.sequence`); empty for other operators.
        specs: the specs.
        number: specs of one program with the same number have the same prices.
    """

    names: Names
    sizes: Sizes
    sequence: Mapping[str, str]
    specs: tuple[Spec, ...]
    number: int


class _Answers(dict[int, int]):
    """The answers of a layout: number of a query -> number of a spec. A spec is derived when it is first needed."""

    def __init__(self, layout: Layout, queries: SpecQueries):
        super().__init__()
        self._layout, self._queries = weakref.ref(layout), queries

    def __missing__(self, query: int) -> int:
        spec_of, value = self._queries.queries[query]
        layout, specs = self._layout(), self._queries.specs
        assert layout is not None
        spec = spec_of(layout, value)
        number = self[query] = self._queries.numbers.setdefault(spec, len(specs))
        if number == len(specs):
            specs.append(spec)
        return number


class CanonicalLayout:
    """The specs of one layout in canonical form. It refers to the layout weakly.

    Attributes:
        priced: number of an operator class -> its price and the names of its mesh axes, once they are known.
    """

    def __init__(self, layout: Layout, queries: SpecQueries):
        self.mesh, self.sequence = layout.mesh, layout.sequence
        self.priced: dict[int, tuple[Price, Names]] = {}
        self._answers = _Answers(layout, queries)
        self._renamed = queries.renamed.setdefault((*self.mesh, None, *self.sequence.items()), {})
        self._known = queries.known.setdefault(
            (*self.mesh.items(), None, *self.sequence.items()), {False: {}, True: {}}
        )
        self._queries = queries

    def __call__(self, number_of_class: int) -> CanonicalSpecs:
        """Return the specs of an operator class, in canonical form."""
        queries = self._queries
        specs, has_ways = queries.of_class[number_of_class](self._answers), queries.has_ways[number_of_class]
        found = self._known[has_ways].get(specs)
        if found is None:
            renamed = self._renamed.get(specs)
            if renamed is None:
                made = canonical([queries.specs[n] for n in specs], self.mesh, self.sequence)
                renamed = self._renamed[specs] = *made, queries.forms.setdefault(made[2], len(queries.forms))
            names, ways, form, number_of_form = renamed
            sizes = {number: math.prod([self.mesh[a] for a in axes]) for number, axes in names.items()}
            ways = ways if has_ways else {}
            key = number_of_form, (*sizes.items(),), (*ways.items(),)
            number = queries.keys.setdefault(key, len(queries.keys))
            found = self._known[has_ways][specs] = CanonicalSpecs(names, sizes, ways, form, number)
        return found


def canonical(specs: Sequence[Spec], mesh: Iterable[str], sequence: Mapping[str, str]) -> Renamed:
    """Return specs with numbers for mesh axes, in mesh order. Axes that follow each other in every spec become one.

    Two such axes stay separate if attention runs over them in different ways (`Layout.sequence`).

    Args:
        specs: the specs.
        mesh: the mesh axes in order.
        sequence: see `Layout.sequence`.

    Returns:
        number -> the mesh axes that it stands for; number -> how attention runs over them; the specs.
    """
    after: dict[str, str | None] = {}
    before: dict[str, str | None] = {}
    for spec in specs:
        for dim in spec:
            if not dim:
                continue
            previous = None
            for axis in dim:
                if before.setdefault(axis, previous) != previous:
                    before[axis] = None
                if previous is not None and after.setdefault(previous, axis) != axis:
                    after[previous] = None
                previous = axis
            if after.setdefault(dim[-1], None) is not None:
                after[dim[-1]] = None
    head: dict[str, str] = {}
    chains: dict[str, list[str]] = {}
    for axis in mesh:  # an axis that follows another in every spec also follows it in the mesh
        if axis in before:
            leader = before[axis]
            joined = leader in head and after.get(leader) == axis and sequence.get(leader) == sequence.get(axis)
            head[axis] = head[leader] if joined and leader is not None else axis
            chains.setdefault(head[axis], []).append(axis)
    number = {axis: str(i) for i, axis in enumerate(chains)}
    return (
        {number[axis]: tuple(chain) for axis, chain in chains.items()},
        {number[axis]: sequence[axis] for axis in chains if axis in sequence},
        tuple(
            [tuple([tuple([number[a] for a in dim if a in number]) if dim else () for dim in spec]) for spec in specs]
        ),
    )
