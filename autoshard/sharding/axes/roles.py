"""The roles of inputs and logical axes, derived from the structure of the program and never from names.

batch       the leading axis of an input that occurs in most activations, by bytes; no parameter has it
parameter   an input without the batch axis that is an operand of an operator with it (contraction, gather, broadcast).
            Integers are parameters if they are codes of a quantized weight: a matrix that a product with the batch
            takes, or a table of the state. Numbers of the rows of a table are not codes, unless they have 8 bits.
            Booleans of the state that such a product takes are masks of weights, and parameters, too
optimizer   any other floats of the state, and codes of 8 bits; they only occur beside values of their own shape
parallel    axes that one weight produces and another one contracts (heads, ffn, experts, vocabulary): tensor
            parallelism shards them. `residual` is the axis that these weights start from and return to. If a large
            part of the weights has no such axis, `weight_cover` adds further axes, perhaps also the residual
sequence    axes of the data other than the batch. If a loop runs over blocks of such an axis (the keys of attention),
            then only the axis that counts the blocks. If the batch counts the positions of a single row, and attention
            runs over them, it is a sequence, too. An axis is no sequence if a slice of one element takes each of its
            positions, such as the coordinates of a point. If such an axis were sharded, every slice would be sent to
            all devices. Two kinds of axes are exempt: positions of attention, and axes that count the blocks of a
            longer axis
context     sequence axes that no loop runs over
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from autoshard._shown import shown
from autoshard.sharding.axes.axis_uses import AxisUses, find_uses
from autoshard.sharding.axes.constants import MAX_FUSED_WEIGHTS
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.rows.batch_axis import batch_axis
from autoshard.sharding.axes.rows.dispatched_rows import dispatched_rows
from autoshard.sharding.axes.weights.computed_weights import computed_weights, rearranged_weights
from autoshard.sharding.axes.weights.decoded_weights import decoded_weights
from autoshard.sharding.axes.weights.gradients import gradients_of
from autoshard.sharding.axes.weights.joined_weights import JoinedWeights, stacks_weights
from autoshard.sharding.axes.weights.loop_sums import reduced_loop_sums
from autoshard.sharding.axes.weights.transposed_gradients import transposed_gradients
from autoshard.sharding.axes.weights.weight_cover import cover_weights
from autoshard.sharding.program.array_sizes import axis_weight, is_float, is_integer, itemsize
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.families.stacked.stages import LAYER_STACKS, TO_STAGES
from autoshard.spmdrules.families.weight_gathers import gather_p
from autoshard.spmdrules.ir.program import Program

Role = Literal["data", "parameter", "optimizer", "other"]
STATE: tuple[Role, ...] = ("parameter", "optimizer")


def _as_fast_as_gathers(devices: int) -> float:
    return 1.0


@shown
@dataclass(eq=False)
class Roles:
    """The roles of inputs and axes.

    `parallel`, `experts`, `vocabulary`, `output_classes` and `heads` are ordered by the parameter bytes that have the
    axis, in descending order; the axes of `weight_cover` come last in `parallel`.

    Attributes:
        inputs: program input -> its role.
        batch: the batch axis, if there is one. In a single row it counts positions, and may be in `sequence`, too.
        other_rows: axes of rows besides the batch: edges, nodes and graphs, if the batch is one of them (`graph_axes`),
            and batches of another size (`separate_batches`). Values with such an axis are activations like those with
            the batch.
        row: the values of the only row of a step without a batch axis (`single_row`).
        sequence: sequence axes.
        context: sequence axes that no loop runs over.
        residual: the axis of the residual stream, if there is one.
        parallel: axes that tensor parallelism shards.
        experts: axes of experts.
        routers: axes of experts in the masks of a router that dispatches tokens of the whole batch (`expert_routing`).
        vocabulary: axes of the rows of tables that are indexed.
        output_classes: parallel axes that a loss sums over.
        heads: axes of attention heads, each followed by the query groups of a key-value head.
        head_dims: axes of the elements of a head, in queries, keys and values.
        dispatched: values that hold rows of the batch, but not its axis (`dispatched_rows`).
        dispatched_rows: the axes of their rows. What shards the batch shards them.
        gradients: values that are sums over the batch, and values computed from them without the batch.
        computed_weights: weights that are computed from a parameter -> the parameter (`weights.computed_weights`).
        rearranged_weights: the computed weights that are transposed or reshaped -> the value before that.
        joined: the computed weights that are concatenated, stacked, split or sliced.
        decoded_weights: values that are computed from gathered codes and scales (`weights.decoded_weights`).
        transposed_gradients: gradients whose only use is a transpose -> its result and its permutation. JAX computes
            the gradients of some weights transposed.
        loop_sums: values of sums over a loop's iterations that are reduced after it -> the reduced value.
        stages: the axis of a pipeline's stages, if there is one.
        within_stages: the other axes of the values that have the axis of the stages.
        replicas: the axis of groups of rows whose sums are added after a loop over microbatches, if there is one.
        counts: the axes that count the microbatches, if the step was cut into them. They are no sequences.
        separate_layers: whether the stages get the weights of their layers once a step: each layer has weights of its
            own, or the number of stages does not divide that of the layers.
        gathers_once: whether weights are gathered before a loop over microbatches, so that `fsdp` shards replicas, too.
        exchange_weight: the time of an all-to-all over so many devices, relative to that of an all-gather of equally
            many bytes. It is the only figure of the machine that shardings depend on.
    """

    inputs: dict[int, Role]
    batch: int | None
    sequence: tuple[int, ...]
    context: tuple[int, ...]
    residual: int | None
    parallel: tuple[int, ...]
    experts: tuple[int, ...]
    vocabulary: tuple[int, ...]
    output_classes: tuple[int, ...]
    heads: tuple[int, ...]
    head_dims: tuple[int, ...] = ()
    gradients: frozenset[int] = frozenset()
    computed_weights: Mapping[int, int] = field(default_factory=dict)
    rearranged_weights: Mapping[int, int] = field(default_factory=dict)
    joined: JoinedWeights = JoinedWeights()
    decoded_weights: frozenset[int] = frozenset()
    transposed_gradients: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    loop_sums: Mapping[int, int] = field(default_factory=dict)
    dispatched: frozenset[int] = frozenset()
    dispatched_rows: tuple[int, ...] = ()
    routers: tuple[int, ...] = ()
    stages: int | None = None
    within_stages: frozenset[int] = frozenset()
    replicas: int | None = None
    counts: frozenset[int] = frozenset()
    separate_layers: bool = False
    gathers_once: bool = False
    row: frozenset[int] = frozenset()
    other_rows: tuple[int, ...] = ()
    exchange_weight: Callable[[int], float] = _as_fast_as_gathers

    @cached_property
    def rows(self) -> frozenset[int]:
        """The batch and the other axes of rows."""
        return frozenset(self.other_rows) | (frozenset() if self.batch is None else {self.batch})

    def have_rows(self, leaves: Leaves) -> bool:
        """Whether a value with these logical axes has the batch or another axis of rows."""
        return any([not self.rows.isdisjoint(dim) for dim in leaves])


def find_roles(
    program: Program,
    axes: LogicalAxes,
    state: Sequence[int] = (),
    *,
    batch: int | None = None,
    other_rows: tuple[int, ...] = (),
    row: frozenset[int] = frozenset(),
    replicas: int | None = None,
    counts: frozenset[int] = frozenset(),
    single_rows: int = 0,
    known: Mapping[int, Role] | None = None,
) -> Roles:
    """Finds the roles.

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that the program returns updated (known from the pytree structure). They are never data.
        batch: its batch axis, if `batch_axis` was called before.
        other_rows: its other axes of rows, see `Roles`.
        row: the values of the only row of a step without a batch axis (`single_row`).
        replicas: the axis of groups of rows whose sums are added later, if there is one.
        counts: the axes that count the microbatches, see `Roles`.
        single_rows: the number of microbatches of a step that was cut into single rows; 0 for other steps. The
            dimension that counts them is no sequence.
        known: the roles of inputs that are already known, such as in a step whose microbatches are single rows.
    """
    batch = batch_axis(program, axes, frozenset(state)) if batch is None and not row else batch
    in_rows = {batch, *other_rows}
    of_dims = {dims: any([not in_rows.isdisjoint(dim) for dim in dims]) for dims in {*axes.of_value}}
    has_batch = [v in row or of_dims[dims] for v, dims in enumerate(axes.of_value)]
    inputs, owner = _input_roles(program, has_batch, frozenset(state))
    inputs |= known or {}
    parameters = [v for v, role in inputs.items() if role == "parameter"]
    in_parameters = {c for v in parameters for dim in axes.of_value[v] for c in dim}
    parameter_bytes = Counter()
    for v in parameters:
        for c in {c for dim in axes.of_value[v] for c in dim} - axes.stacked:
            parameter_bytes[c] += axis_weight(program.avals[v])
    dispatched, dispatched_axes = dispatched_rows(program, axes, batch, in_parameters)
    single = replicas is not None and batch == replicas  # each group has one row, so the groups are the batch
    use = find_uses(program, axes, batch, in_parameters, owner, dispatched, row, other_rows=other_rows, groups=single)
    stages = axes.stages
    for own in (c for c in (stages, replicas) if c is not None):
        use.discard(own)
    shared = {c for c, weights in use.weights.items() if len(weights) > 1} - use.windows
    data = [v for v, role in inputs.items() if role == "data"]
    in_data = {c for v in data for dim in axes.of_value[v] for c in dim}
    residual = _residual(use, shared - use.heads, parameter_bytes, in_data)
    ordered = [c for c, _ in sorted(parameter_bytes.items(), key=lambda item: (-item[1], item[0]))]
    # axes of one dimension (key-value heads, query groups) must be ordered major to minor, or none can be sharded
    ordered = _major_first(ordered, axes, parameters)
    shardable = (use.hidden | _reduced_outputs(use) | use.indexed | use.experts) - {residual} - use.inner
    weight_bytes = {v: axis_weight(program.avals[v]) for v in parameters}
    covering = cover_weights(axes, use, weight_bytes, shardable, in_data)
    parallel = (*(c for c in ordered if c in shardable), *covering)
    groups = {
        c for v in parameters for dim in axes.of_value[v] for major, c in itertools.pairwise(dim) if major in use.heads
    }  # fmt: skip
    with_batch = {c for v, has in enumerate(has_batch) if has for dim in axes.of_value[v] for c in dim}
    sequence = dict.fromkeys(
        c for v in data for dim in axes.of_value[v] for c in _sequence(dim, axes.stacked)
        if c not in (*in_rows, replicas, *counts) and c in with_batch and not use.weights[c]
        and not (len(dim) == 1 and c not in use.attended and use.is_taken_apart(c, axes.sizes[c]))
    )  # fmt: skip
    if single_rows:
        counting = {c for v in data for dim in _before(axes, v, batch) for c in axes.of_value[v][dim]}
        sequence = {c: None for c in sequence if c not in counting}
    gradients = gradients_of(program, axes, batch, other_rows) - dispatched | _stacked_terms(program, axes, replicas)
    computed, joined = ({}, JoinedWeights()) if batch is None else computed_weights(axes, inputs, has_batch, gradients)
    decoded = decoded_weights(axes, parameters, computed, has_batch, gradients) if batch is not None else frozenset()
    if batch in use.attended and _has_one_row(axes, inputs, batch, max(single_rows, 1)):
        sequence = {batch: None, **sequence}
    return Roles(
        inputs=inputs,
        batch=batch,
        sequence=tuple(sequence),
        context=tuple(c for c in sequence if c not in axes.stacked),
        residual=residual,
        parallel=parallel,
        experts=tuple(c for c in ordered if c in use.experts),
        vocabulary=tuple(c for c in ordered if c in use.indexed),
        output_classes=tuple(c for c in parallel if c in _reduced_outputs(use)),
        heads=tuple(c for c in parallel if c in use.heads or c in groups),
        head_dims=_head_dims(axes, use, parameters, use.heads | groups, {residual, *parallel, *axes.stacked}),
        dispatched=dispatched,
        dispatched_rows=dispatched_axes,
        gradients=gradients,
        computed_weights=computed,
        rearranged_weights=rearranged_weights(axes, computed),
        joined=joined,
        decoded_weights=decoded,
        transposed_gradients=transposed_gradients(program, gradients),
        loop_sums=reduced_loop_sums(program),
        stages=stages,
        within_stages=frozenset() if stages is None else _axes_beside(axes, stages),
        replicas=replicas,
        counts=counts,
        separate_layers=stages is not None and any(op.name in TO_STAGES for op in program.ops()),
        gathers_once=any(op.name == gather_p.name for op in program.ops()),
        row=row,
        other_rows=other_rows,
    )


def _axes_beside(axes: LogicalAxes, axis: int) -> frozenset[int]:
    """The other logical axes of all values that have an axis."""
    return frozenset(c for dims in set(axes.of_value) if any(axis in d for d in dims) for d in dims for c in d) - {axis}


def _head_dims(
    axes: LogicalAxes, use: AxisUses, parameters: Sequence[int], heads: set[int], others: Collection[int | None]
) -> tuple[int, ...]:
    """The axes of the elements of a head.

    Attention contracts queries and keys over them, and keeps those of the values. After a rotary embedding, queries and
    keys have other axes than their weights. The axes of the weights are then those of the same size after the heads.
    """
    flat = [[c for dim in axes.of_value[v] for c in dim] for v in parameters]
    after_heads = [c for dims in flat for c in dims[_last(dims, heads) :] if c not in heads and c not in others]
    if heads:
        found = [c for c in after_heads if c in use.inner | use.kept]
    else:
        found = [c for dims in flat for c in dims if c in use.inner and c not in others]
    sizes = {axes.sizes[c] for c in found}
    return tuple(dict.fromkeys([*found, *(c for c in after_heads if axes.sizes[c] in sizes)]))


def _last(dims: Sequence[int], heads: set[int]) -> int:
    """The position after the last axis of heads; the end if there is none."""
    return max((i + 1 for i, c in enumerate(dims) if c in heads), default=len(dims))


def _sequence(dim: Sequence[int], stacked: frozenset[int]) -> Sequence[int]:
    """The axes of one dimension of the data that sequence parallelism can shard.

    If a loop runs over blocks of the dimension, it is the axis that counts the blocks. A loop axis that makes up a
    dimension of its own is not a sequence.
    """
    if len(dim) > 1 and dim[0] in stacked:
        return dim[:1]
    return [c for c in dim if c not in stacked]


def is_of_one_row(axes: LogicalAxes, roles: Roles) -> bool:
    """Whether the batch axis counts the positions of a single row.

    The data has a dimension of size 1 for that row, and dimensions of size 1 have no axis.
    """
    return _has_one_row(axes, roles.inputs, roles.batch, 1)


def _has_one_row(axes: LogicalAxes, inputs: Mapping[int, Role], batch: int | None, rows: int) -> bool:
    """Whether the dimensions before the batch, in data with several dimensions, count rows that are computed apart.

    Data that all rows share, such as a table of angles, has no such dimension.
    """
    sizes = [
        axes.program.avals[v].shape[d]
        for v, role in inputs.items() if role == "data"
        for d in _before(axes, v, batch)
    ]  # fmt: skip
    return bool(sizes) and {*sizes} <= {1, rows}


def _before(axes: LogicalAxes, value: int, axis: int | None) -> range:
    """The dimensions of a value before that of an axis; none if it does not have the axis."""
    return range(next((d for d, dim in enumerate(axes.of_value[value]) if axis in dim), 0))


def _stacked_terms(program: Program, axes: LogicalAxes, replicas: int | None) -> frozenset[int]:
    """The gradients that stages give back for each group of rows. Groups of single rows are the batch of the step."""
    given = (v for op in program.ops() if replicas is not None and op.name in LAYER_STACKS for v in op.results)
    return frozenset(v for v in given if (replicas,) in axes.of_value[v])


def _input_roles(
    program: Program, has_batch: Sequence[bool], state: frozenset[int]
) -> tuple[dict[int, Role], dict[int, frozenset[int]]]:
    """The role of each input; and, for each value without the batch, the inputs that it was computed from."""
    owner: dict[int, frozenset[int]] = {v: frozenset({v}) for v in program.inputs}
    parameters: set[int] = set()
    codes, positions = set[int](), set[int]()  # integers: weights before they are scaled; numbers of rows

    def visit(block: Any) -> None:
        for op in block.ops:
            if op.rule is None:
                for tie in op.edges:
                    if tie.outer in owner:
                        owner.setdefault(tie.inner, owner[tie.outer])
                for inner in op.blocks:
                    visit(inner)
                for tie in op.edges:  # a weight that a loop casts, and stacks for its gradient
                    if tie.inner in owner and tie.outer >= 0:
                        owner.setdefault(tie.outer, owner[tie.inner])
                continue
            owned = frozenset[int]().union(*[owner[v] for v in op.operands if v in owner and not has_batch[v]])
            if op.name == "gather":
                positions.update(v for v in owner.get(op.operands[1], ()) if itemsize(program.avals[v]) > 1)
            if any([has_batch[v] for v in (*op.operands, *op.results) if v >= 0]):
                parameters.update(owned)
                if op.name in CONTRACTIONS:
                    codes.update(owned)
                elif op.name == "gather":
                    codes.update(v for v in owner.get(op.operands[0], ()) if v in state)
            elif owned and (
                len(owned) <= MAX_FUSED_WEIGHTS
                or op.name in TO_STAGES
                or stacks_weights(op)
                or any(owned == owner.get(v) for v in op.operands)  # of a stack of many layers
            ):
                for v in op.results:
                    owner.setdefault(v, owned)

    visit(program.block)
    roles: dict[int, Role] = {}
    for v in program.inputs:
        aval = program.avals[v]
        is_table = v in codes - positions and sum(n > 1 for n in aval.shape) > 1
        if is_table and not has_batch[v] and (is_integer(aval) or (aval.dtype == bool and v in state)):
            roles[v] = "parameter"
        elif has_batch[v] or (v not in state and not is_float(aval) and aval.ndim):
            roles[v] = "data"
        elif not aval.ndim or not (is_float(aval) or (itemsize(aval) == 1 and v not in parameters)):
            roles[v] = "other"
        elif v in parameters:
            roles[v] = "parameter"
        else:
            roles[v] = "data" if state and v not in state else "optimizer"
    return roles, owner


def _reduced_outputs(use: AxisUses) -> set[int]:
    """Axes, except heads and units of experts, that a weight produces and a reduction sums over: classes of a loss."""
    beside = {w for c in use.heads | use.experts for w in use.weights[c]}
    return {c for c in use.produced if c in use.reduced and not use.weights[c] & beside}


def _residual(use: AxisUses, candidates: set[int], parameter_bytes: Counter[int], in_data: set[int]) -> int | None:
    """The axis that most weights have."""
    found = [c for c in parameter_bytes if c in candidates]
    if len(found) < 2:
        return None
    return max(found, key=lambda c: (len(use.weights[c]), c in in_data, parameter_bytes[c], -c))


def _major_first(ordered: list[int], axes: LogicalAxes, values: Sequence[int]) -> list[int]:
    """Sorts the axes of each dimension major to minor, within the positions that they occupy in the list."""
    for v in values:
        for dim in axes.of_value[v]:
            places = sorted(ordered.index(c) for c in dim if c in ordered)
            for place, c in zip(places, [c for c in dim if c in ordered], strict=True):
                ordered[place] = c
    return ordered
