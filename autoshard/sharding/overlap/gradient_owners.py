"""The operators that sum the gradient of each parameter, by dataflow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.operator_sharding import is_gradient, lacks_axes
from autoshard.sharding.program.array_sizes import is_float
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.spmdrules.ir.program import Op


class GradientSums:
    """Finds the operators that sum gradients.

    Args:
        axes: the logical axes of the program.
        roles: the roles of its inputs and values.
    """

    def __init__(self, axes: LogicalAxes, roles: Roles):
        self.axes, self.roles = axes, roles
        self.scalars = {v for v, aval in enumerate(axes.program.avals) if not aval.shape and is_float(aval)}
        self.made_by: dict[int, Op] = {}
        self.inner: defaultdict[int, list[int]] = defaultdict(list)  # result or carry of a loop -> values of its body
        for op in axes.program.ops():
            if not op.blocks:
                self.made_by.update(dict.fromkeys(op.results, op))
            for edge in op.edges:
                if edge.outer in op.results:
                    self.inner[edge.outer].append(edge.inner)
                elif edge.outer not in op.operands:  # the carry after an iteration, and before the next one
                    self.inner[edge.inner].append(edge.outer)

    def of(
        self, results: Iterable[int], *, within_replicas: bool = False, scalars: bool = False
    ) -> Iterator[tuple[Op, int]]:
        """Yield decision points whose results are parts of a gradient, with these results.

        The search goes back from results of the program, through values without the batch, to the operators that sum
        over the batch. A scalar, such as the norm of all gradients, is not followed from an array.

        Args:
            results: the updated parameter, or its gradient.
            within_replicas: whether to go on to the operators that sum over the rows of each replica, before the sum
                over the replicas.
            scalars: whether to find the gradients of scalar parameters, too. Scalars are then followed from scalars,
                and from arrays in which a loop stacks one scalar per iteration.
        """
        pending, seen = [*results], {*results}
        while pending:
            value = pending.pop()
            op = self.made_by.get(value)
            operands = op.operands if op is not None else ()
            if op is not None and is_decision_point(op):
                if value in self.scalars and not is_gradient(self.axes, self.roles, op, value):
                    continue  # the norm of gradients
                yield op, value
                if lacks_axes(self.axes, self.roles.rows, op, value):
                    continue
            further = [v for v in (*self.inner[value], *operands) if v in self.roles.gradients
                       or (within_replicas and self._is_of_replicas(v))]  # fmt: skip
            if scalars:
                reached = self.inner[value] if value not in self.scalars else (*self.inner[value], *operands)
                further += [v for v in reached if v in self.scalars]
            further = [v for v in dict.fromkeys(further) if v not in seen]
            seen.update(further)
            pending += further

    def _is_of_replicas(self, value: int) -> bool:
        """Whether a value has the axis of the replicas, but not that of their rows."""
        classes = {c for dim in self.axes.of_value[value] for c in dim} if value >= 0 else set()
        return self.roles.replicas in classes and self.roles.batch not in classes


def gradient_owners(axes: LogicalAxes, roles: Roles, state: Sequence[tuple[int, int]]) -> dict[int, frozenset[int]]:
    """Return, for each result of an operator that sums over the batch, the parameters whose update it is part of.

    Args:
        axes: the logical axes of the program.
        roles: the roles of its inputs and values.
        state: pairs (input, output) of its state, or of inputs and results of the same structure.
    """
    sums, found = GradientSums(axes, roles), defaultdict[int, set[int]](set)
    for source, output in state:
        if roles.inputs.get(source) == "parameter":
            for op, value in sums.of([output]):
                if is_gradient(axes, roles, op, value):
                    found[value].add(source)
    return {value: frozenset(owners) for value, owners in found.items()}
