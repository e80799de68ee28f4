"""The structure of a traced program: its logical axes, their roles and names, and its state."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from autoshard._shown import shown
from autoshard.sharding.axes.expert_routing import split_expert_axes
from autoshard.sharding.axes.logical_axes import LogicalAxes, find_axes
from autoshard.sharding.axes.naming.axis_names import name_axes, name_computed_axes
from autoshard.sharding.axes.roles import Role, Roles, find_roles
from autoshard.sharding.axes.rows.batch_axis import batch_axis
from autoshard.sharding.axes.rows.carried_rows import carried_batch
from autoshard.sharding.axes.rows.generated_batches import join_generated_batches
from autoshard.sharding.axes.rows.graph_axes import find_graph_axes
from autoshard.sharding.axes.rows.separate_batches import separate_batches
from autoshard.sharding.axes.rows.single_row import values_of_single_row
from autoshard.sharding.program.tracing import Traced


@shown
@dataclass(frozen=True)
class Analysis:
    """What planning knows about a program before it considers a mesh.

    Attributes:
        axes: the logical axes, with their names.
        roles: the roles of the inputs and of the axes.
        state: pairs (input value, output value) of the state; values are numbered as in `axes.program`.
    """

    axes: LogicalAxes
    roles: Roles
    state: list[tuple[int, int]]


def analyse(traced: Traced) -> Analysis:
    """Finds the logical axes of a traced program, their roles and their names.

    If the state is data, such as a cache (`carried_batch`), the roles are found as if no state were known.

    The seven steps run in a fixed order, because later steps read what earlier ones have changed:

    1. `find_axes` unifies the dimensions of all values into logical axes.
    2. `batch_axis` chooses the batch among these axes. In a step that was cut into microbatches, it is the axis that
       was cut. In a function without state whose microbatches are single rows, it is another axis of that dimension.
       A step with a single row whose state is data has no batch axis (`single_row`).
    3. `join_generated_batches` merges the axes of rows that the step generates itself into the batch, in place. It
       must run before the roles are found, because they depend on which values have the batch.
    4. `find_graph_axes` finds edges, nodes and graphs in the data. If the batch is one of them, the others are rows,
       too: their values are activations, not sums over the batch. In any case their features are data. And
       `separate_batches` finds batches of the data beside the batch. They are rows, too.
    5. `find_roles` takes the batch and these rows, and assigns roles to inputs and axes. It finds the axes of experts.
    6. `split_expert_axes` gives the router's experts an axis of their own, in place. It needs the roles of step 5. The
       roles need not be found again: the axis that it adds has no role but `Roles.routers`.
    7. `name_axes` names the axes, including the added one, and `name_computed_axes` those that no input has.

    Args:
        traced: the traced program. It is not changed.
    """
    program = traced.program
    state = [(program.inputs[i], program.outputs[o]) for i, o in traced.state]
    state_inputs = [i for i, _ in state]
    axes = find_axes(program)
    arrays = _without_keys(axes, state)
    row = values_of_single_row(program, arrays, traced.owners) if traced.batch is None else frozenset[int]()
    carried = None if row else carried_batch(program, axes, arrays)
    if row or carried is not None:
        state_inputs = []  # the roles are those of a step that computes new data from data
    batch = carried if traced.batch is None else _known_batch(traced, axes)
    if batch is None and not row:
        batch = batch_axis(program, axes, frozenset(state_inputs), _cut_dimension(traced, axes))
    join_generated_batches(axes, batch)
    replicas, counts = _cut_axes(traced, axes)
    known = _known_roles(traced, axes)
    graph = find_graph_axes(program, axes, state_inputs)
    others = (*graph.beside(batch), *separate_batches(program, axes, state_inputs, batch, {*graph.all}))
    roles = find_roles(
        program, axes, state_inputs, batch=batch, other_rows=others, row=row, replicas=replicas,
        counts=counts, single_rows=traced.microbatches if _cuts_single_rows(traced, axes) else 0, known=known,
    )  # fmt: skip
    routers = split_expert_axes(axes, roles)
    roles.routers = routers if roles.dispatched_rows else ()
    for v in graph.features(program, axes, state_inputs):
        roles.inputs[v] = "data"
    axes.names = name_axes(program, axes, roles, traced.in_names, graph)
    axes.computed_names = name_computed_axes(program, axes, roles)
    return Analysis(axes, roles, state)


def _without_keys(axes: LogicalAxes, state: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the state without random keys that are arrays of words: these have no rows in any step."""
    classes = {i: {c for dim in axes.of_value[i] for c in dim} for i, _ in state}
    return [(i, o) for i, o in state if not classes[i] or not classes[i] <= axes.key_words]


def _cut_axes(traced: Traced, axes: LogicalAxes) -> tuple[int | None, frozenset[int]]:
    """The axis of replicas (None without them), and the axes that count the microbatches.

    A loop reads each leaf of the batch by the number of the microbatch. So each leaf has an axis of its own for that.
    """
    if traced.batch is None:
        return None, frozenset()
    leaf, dim, place, rows = traced.batch
    classes = axes.of_value[traced.program.inputs[leaf]][dim]
    replicas = classes[place - 1] if traced.replicas > 1 else None
    place += rows > 1  # dimensions of size 1 have no axis
    if traced.microbatches == 1:
        return replicas, frozenset()
    dims = [axes.of_value[v] for v in traced.program.inputs]
    after = {c for dim in itertools.chain.from_iterable(dims) for major, c in itertools.pairwise(dim)
             if place and major == classes[place - 1]}  # fmt: skip
    counts = after.union(classes[place : place + 1])
    return replicas, frozenset(c for c in counts if axes.sizes[c] == traced.microbatches)


def _cut_dimension(traced: Traced, axes: LogicalAxes) -> frozenset[int]:
    """The axes of the dimension that was cut into microbatches, if a microbatch is a single row; else none.

    Of a function without state, weights are inputs like data, so rows could not be told from layers.
    """
    if traced.batch is None or traced.state:
        return frozenset()
    leaf, dim, _, _ = traced.batch
    return frozenset(axes.of_value[traced.program.inputs[leaf]][dim])


def _known_roles(traced: Traced, axes: LogicalAxes) -> Mapping[int, Role]:
    """The roles of the inputs of the whole step, if a microbatch is a single row: no value has an axis of rows then."""
    if not _cuts_single_rows(traced, axes):
        return {}
    return dict(zip(traced.program.inputs, cast(Sequence[Role], traced.input_roles), strict=True))


def _cuts_single_rows(traced: Traced, axes: LogicalAxes) -> bool:
    """Whether the step was cut into microbatches of single rows."""
    return traced.batch is not None and _known_batch(traced, axes) is None


def _known_batch(traced: Traced, axes: LogicalAxes) -> int | None:
    """The batch that the trace records; None if it records none, or if a microbatch is a single row."""
    if traced.batch is None:
        return None
    leaf, dim, place, rows = traced.batch
    classes = axes.of_value[traced.program.inputs[leaf]][dim]
    return next((c for c in classes[place : place + 1] if axes.sizes[c] == rows > 1), None)
