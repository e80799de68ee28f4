"""The shardings of one operator under a layout: of its operands, of its results, and of its work.

Cost, memory, lowering and reports all use this module, so that the prices are those of the lowered program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.axes.stored_values import may_be_stored
from autoshard.sharding.axes.weights.loop_sums import is_loop_term
from autoshard.sharding.axes.weights.spread_matrices import within_matrices
from autoshard.sharding.layout.known_strategies import known_strategy
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_strategy import Move, OperatorStrategy
from autoshard.sharding.layout.sequence_strategy import over_sequence
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.program.array_sizes import itemsize, nbytes
from autoshard.sharding.program.flops import flops_of
from autoshard.sharding.program.operator_kinds import REDUCTIONS, decodes, is_decision_point, is_declared
from autoshard.sharding.program.partitioner_faults import MISPARTITIONED, ShardedOperator, known_fault, writes_one_row
from autoshard.spmdrules.core.factor_projection import project
from autoshard.spmdrules.core.layer_stacks import layer_stacks
from autoshard.spmdrules.core.placement import Spec, axes_of, bytes_sent_per_byte, exchanged_spec, shard_count
from autoshard.spmdrules.core.reshard_path import moves_axis
from autoshard.spmdrules.core.rule import Dims, Rule
from autoshard.spmdrules.custom_ops.sequence_forms import sequence_forms_of
from autoshard.spmdrules.families.stacked import EXCHANGES, MATRIX_STACKS, SPREADS
from autoshard.spmdrules.families.stacked.stages import STAGE, STAGE_OPERATORS, TO_STAGES, WITH_ALL_LAYERS, shift_p
from autoshard.spmdrules.families.weight_gathers import OUTSIDE_LOOPS, after_loop_p
from autoshard.spmdrules.ir.program import Block, Op

AFTER_UPDATE, BEFORE_LOOPS = "after the update", "before a loop"


def operand_spec(layout: Layout, value: int) -> Spec:
    """The sharding of a value before an operator uses it.

    Parameters, slices of them and weights computed from them have their stored sharding, gradients that of the state
    which consumes them.
    """
    if (held := layout.held_spec(value)) is not None:
        return held
    is_stored = value in layout.roles.gradients and value not in layout.roles.loop_sums
    return gradient_spec_of(layout, value) if is_stored else layout.spec(value)


def spec_function(axes: LogicalAxes, roles: Roles, value: int) -> Callable[[Layout, int], Spec]:
    """The function that gives the same sharding of a value as `operand_spec`, with less work for most values."""
    return operand_spec if may_be_stored(axes, roles, value) else Layout.spec


def result_spec(layout: Layout, op: Op, value: int) -> Spec:
    """The wanted sharding of the result of a decision point.

    It is the stored sharding of its state for a gradient, for what is decoded from the optimizer's state, and for the
    weights of a stage's layers, which the stage gathers one by one. It is the computed sharding for any other result.
    """
    return wanted_spec_of(layout.axes, layout.roles, op, value)(layout, value)


def written_spec(layout: Layout, op: Op, value: int) -> Spec:
    """The sharding to which the result of a decision point is constrained.

    It is that of `result_spec`, but terms of a sum that is reduced after a loop keep their computed sharding.
    """
    return layout.spec(value) if value in layout.roles.loop_sums else result_spec(layout, op, value)


def computed_weight_spec(layout: Layout, value: int) -> Spec:
    """The sharding in which a computed weight is computed, even if its parameter was gathered before a loop."""
    source = layout.aliased_inputs.get(value)
    return layout.spec(value) if source is None else layout.alias_spec(source, value)


def wanted_spec_of(axes: LogicalAxes, roles: Roles, op: Op, value: int) -> Callable[[Layout, int], Spec]:
    """The function that gives the wanted sharding of the result of a decision point, see `result_spec`."""
    if value in roles.computed_weights:
        return computed_weight_spec
    if op.name in TO_STAGES and value in axes.parameter_aliases:
        return operand_spec
    return gradient_spec_of if is_stored_gradient(axes, roles, op, value) else Layout.spec


def is_stored_gradient(axes: LogicalAxes, roles: Roles, op: Op, value: int) -> bool:
    """Whether the result of an operator is a gradient that is wanted as its state is stored.

    That is a gradient where it is summed, the gradients of layers that the stages give back, sums of gradients after
    their loop (`reduce_after_loop`), and what is looked up by numbers that are computed from gradients, such as new
    codes. If a group of rows has one row of each microbatch, the replicas are the batch.
    """
    if op.name == "gather" and value in roles.gradients and op.operands[1] in roles.gradients:
        return True
    if op.name == after_loop_p.name and value in roles.gradients:
        return True
    if op.name in EXCHANGES and (value in roles.gradients or (roles.replicas,) in axes.of_value[value]):
        return True
    return is_gradient(axes, roles, op, value)


def is_gradient(axes: LogicalAxes, roles: Roles, op: Op, value: int) -> bool:
    """Whether an operator sums over all rows, or over all replicas: an operand has such an axis, its result not."""
    replicas = frozenset() if roles.replicas is None else frozenset({roles.replicas})
    return any(lacks_axes(axes, some, op, value) for some in (roles.rows, replicas))


def lacks_axes(axes: LogicalAxes, some: frozenset[int], op: Op, value: int) -> bool:
    """Whether an operand of an operator has one of these axes, and its result has none of them."""
    if not some or any(not some.isdisjoint(dim) for dim in axes.of_value[value]):
        return False
    return any(v >= 0 and any(not some.isdisjoint(dim) for dim in axes.of_value[v]) for v in op.operands)


def gradient_spec_of(layout: Layout, value: int) -> Spec:
    """The sharding of a gradient: that of the state which consumes it, if the layout shards stored state."""
    spec = layout.gradient_spec(value) if layout.storage else None
    return layout.spec(value) if spec is None else spec


@shown
@dataclass(frozen=True)
class StateGather:
    """A gather of state outside of any operator.

    Attributes:
        value: the program input that is gathered.
        axes: the mesh axes over which it is gathered.
        wire_bytes: bytes that each device sends.
        when: when it happens, for reports.
    """

    value: int
    axes: tuple[str, ...]
    wire_bytes: float
    when: str


def state_gathers(layout: Layout, updated: Iterable[int]) -> list[StateGather]:
    """The gathers of small stacks before their loops, and of updated parameters (ZeRO-1 and 2).

    ZeRO-1 and 2 update each parameter in shards, and then gather it.

    Args:
        layout: the layout.
        updated: the inputs that the program returns updated.
    """
    moves = [(v, layout.stored_spec(v), layout.spec(v), BEFORE_LOOPS) for v in layout.inputs_gathered_before_loops]
    for v in updated:
        update_spec = layout.gradient_spec(v) if layout.roles.inputs.get(v) == "parameter" else None
        if update_spec is not None:
            moves.append((v, update_spec, layout.stored_spec(v), AFTER_UPDATE))
    gathers = []
    for v, before, after, when in moves:
        after_axes = set(axes_of(after))
        gathered = tuple(a for a in axes_of(before) if a not in after_axes)
        aval = layout.axes.program.avals[v]
        size = layout.small_stacks.get(v, itemsize(aval)) if when == BEFORE_LOOPS else itemsize(aval)
        local = nbytes(aval) / itemsize(aval) * size / layout.shard_count({*after_axes, *gathered})
        if wire := bytes_sent_per_byte("all-gather", layout.shard_count(gathered)) * local:
            gathers.append(StateGather(v, gathered, wire, when))
    return gathers


def strategy_in_layout(layout: Layout, op: Op, prices: LinkPrices) -> OperatorStrategy:
    """The strategy of a decision point under a layout; `prices`: see `choose_strategy`."""
    operands = [operand_spec(layout, v) if v >= 0 else () for v in op.operands]
    results, moved = [result_spec(layout, op, v) for v in op.results], transfer_bytes(layout.axes, layout.roles, op)
    return strategy_for_specs(
        op, operands, results, moved, layout.mesh, prices, layout.sequence, is_loop_term(layout.roles.loop_sums, op)
    )


def pinned_operands(layout: Layout, op: Op, block: Block, prices: LinkPrices) -> dict[int, Spec]:
    """Return the operands of a decision point that are first constrained to their own shardings: operand -> sharding.

    Without this, XLA sees only the sharding that the operator needs. It propagates that sharding back to the operators
    that compute the value, and to its other users, and reshards the operands of all of them. (Shardy gives it to all
    users after two constraints in a row, see its `apply_sharding_constraints.cc`.) In a loop, XLA then reshards whole
    stacks in each iteration, before it takes a slice.

    Sums are constrained before they are reduced (`reduce_after_loop`), and three kinds of activations. The constrained
    value replaces the value in the rest of its block.

        activations that need a mesh axis on another dimension
        inputs of a loop's body that are resharded
        rows of the data that others refer to (`Roles.other_rows`), if they stay sharded along another dimension

    Args:
        layout: the layout.
        op: an operator.
        block: its block.
        prices: see `choose_strategy`.
    """
    if not is_decision_point(op) or op.name in REDUCTIONS:
        return {}
    chosen, inputs = strategy_in_layout(layout, op, prices), block.inputs if block.loop else ()
    is_sum, of_rows, found = op.name == after_loop_p.name, op.name == "gather" and layout.roles.other_rows, {}
    for i, (v, dims) in enumerate(zip(op.operands, chosen.rule(op).operands, strict=True)):
        if v >= 0 and v not in layout.aliased_inputs and v not in layout.roles.inputs:
            spec, wanted = operand_spec(layout, v), chosen.spec(dims)
            if moves_axis(spec, wanted) or (spec != wanted and (v in inputs or is_sum or (of_rows and any(wanted)))):
                found[i] = spec
    return found


def transfer_bytes(axes: LogicalAxes, roles: Roles, op: Op) -> list[float]:
    """Bytes of each operand as a collective moves it: a parameter in its transfer type (`LogicalAxes`).

    Of a stack of layers, it moves one layer. In a program with `Roles.other_rows`, it moves no repeated constant.
    """
    filled = axes.program.filled if roles.other_rows else ()  # plans of other programs were not compiled with this
    sizes = [0.0 if n in filled else float(nbytes(v.aval)) for n, v in zip(op.operands, op.eqn.invars, strict=True)]
    if is_declared(op) and (stacks := layer_stacks(op.eqn.params["fn"])) is not None:
        assert op.rule is not None
        for i, dims in enumerate(op.rule.operands):
            if dims[:1] == ((stacks.factor,),):
                sizes[i] /= op.eqn.invars[i].aval.shape[0]
    if axes.transfer_dtype:
        for i, v in enumerate(op.operands):
            if v in axes.transfer_dtype:
                sizes[i] *= axes.transfer_dtype[v].itemsize / op.eqn.invars[i].aval.dtype.itemsize
    return sizes


def strategy_for_specs(
    op: Op,
    operand_specs: Sequence[Spec],
    result_specs: Sequence[Spec],
    moved: Sequence[float],
    mesh: Mapping[str, int],
    prices: LinkPrices,
    sequence: Mapping[str, str],
    summed: bool = False,
) -> OperatorStrategy:
    """The strategy of a decision point.

    Args:
        op: the operator.
        operand_specs: the shardings of its operands; empty for a literal.
        result_specs: the wanted shardings of its results.
        moved: bytes of its operands as collectives move them (`transfer_bytes`).
        mesh: mesh axis -> size.
        prices: see `choose_strategy`.
        sequence: see `Layout`.
        summed: whether its result is reduced after a loop (`is_loop_term`), so that contractions cost nothing in it.
    """
    assert op.rule is not None
    avals = [v.aval for v in op.eqn.invars]
    specs = [spec or ((),) * a.ndim for spec, a in zip(operand_specs, avals, strict=True)]
    given = [nbytes(v.aval) for v in op.eqn.outvars]
    forms = sequence_forms_of(op.eqn.params, avals) if sequence else None
    is_gather = op.name in OUTSIDE_LOOPS or decodes(op)
    if forms is None and op.name not in EXCHANGES and not (is_gather or summed):
        chosen = known_strategy(op.rule, moved, specs, given, result_specs, mesh, flops_of(op), prices)
        return _with_shift(op, chosen, mesh) if op.name == shift_p.name else chosen

    def choose(rule: Rule, forced: Mapping[str, Sequence[str | None]] | None = None) -> OperatorStrategy:
        return known_strategy(rule, moved, specs, given, result_specs, mesh, flops_of(op), prices, forced)

    if is_gather:  # the operand is gathered, so that its gather is one of a stored weight
        of_result = project(op.rule, op.rule.results[0], result_specs[0], mesh)
        return choose(op.rule, {axis: [of_result.get(axis)] for axis in mesh})
    if summed:
        first, *rest = [project(op.rule, dims, spec, mesh) for dims, spec in zip(op.rule.operands, specs, strict=True)]
        return choose(op.rule, {a: [f] for a, f in first.items() if all(each.get(a) == f for each in rest)})
    if forms is None:
        dims, of_layer = _layer_of(op, specs, result_specs, mesh)
        of_stages = (result_specs if op.name in SPREADS else specs)[0]
        if op.name not in SPREADS:  # a stage takes its shards of the layers before the exchange
            specs = [exchanged_spec((*((),) * (len(of_stages) - len(of_layer)), *of_layer), of_stages)]
        of_layers, stages = project(op.rule, dims, of_layer, mesh), axes_of(of_stages[:1])
        # The exchange between the stages moves shards. Each mesh axis alone would rather gather small shards, before
        # other mesh axes gather all layers.
        return choose(op.rule, {axis: [of_layers[axis]] for axis in stages if axis in of_layers})
    return over_sequence(op, forms, mesh, sequence, choose)


def _layer_of(
    op: Op, operand_specs: Sequence[Spec], result_specs: Sequence[Spec], mesh: Mapping[str, int]
) -> tuple[Dims, Spec]:
    """The factors and the sharding of one layer, where an operator gives layers to the stages or takes them back."""
    assert op.rule is not None
    stack, dims, spec, layer = op.rule.results[0], op.rule.operands[0], operand_specs[0], op.eqn.invars[0]
    if op.name not in SPREADS:
        stack, dims, spec, layer = dims, stack, result_specs[0], op.eqn.outvars[0]
    if op.name in MATRIX_STACKS and op.eqn.params["stacked"]:
        spec = within_matrices(spec, layer.aval.shape, mesh)
    first = 1 if op.name in WITH_ALL_LAYERS else len(dims) - len(stack) + 1
    return dims[first:], spec[first:]


def _with_shift(op: Op, chosen: OperatorStrategy, mesh: Mapping[str, int]) -> OperatorStrategy:
    """The strategy of a shift between stages, with the permute that moves the values of border stages."""
    assert op.rule is not None
    axes = tuple(axis for axis, factor in sharded_factors(chosen, mesh).items() if factor == STAGE)
    if not axes:
        return chosen
    aval, one_stage = op.eqn.invars[0].aval, op.rule.operands[0][1:]
    local = nbytes(aval) / aval.shape[0] / shard_count(chosen.spec(one_stage), mesh)
    return OperatorStrategy(chosen.factors, (*chosen.moves, Move("collective-permute", axes, -1, local, local)))


def sharded_factors(strategy: OperatorStrategy, mesh: Mapping[str, int]) -> dict[str, str]:
    """Mesh axis -> the factor that it shards; without the mesh axes that shard none."""
    return {axis: factor for axis, factor in strategy.factors.items() if factor is not None and mesh[axis] > 1}


def runs_on_shards(op: Op, strategy: OperatorStrategy, mesh: Mapping[str, int]) -> bool:
    """Whether an operator runs on shards by its rule, because XLA's partitioner has a known fault with it.

    The partitioner computes some strategies wrongly, aborts on some, and gathers operands that the rule leaves sharded.
    Operators on the stages of a pipeline always run on shards.
    """
    if op.name in STAGE_OPERATORS:
        return bool(sharded_factors(strategy, mesh))
    return _has_known_fault(op, list(sharded_factors(strategy, mesh).values()), mesh)


def transposed_order(layout: Layout, op: Op) -> tuple[int, ...]:
    """Return the order of a result's dimensions after its only use, if that is a transpose; else its own order."""
    transposed = layout.roles.transposed_gradients.get(op.results[0])
    if transposed is None or len(op.results) > 1:
        return tuple(range(len(op.eqn.outvars[0].aval.shape)))
    return transposed[1]


def order_of_scatter(layout: Layout, op: Op, strategy: OperatorStrategy, want: Spec) -> tuple[int, ...] | None:
    """Return the order of dimensions in which to reduce-scatter a product whose leading dimensions have size 1.

    For example, the stages of a pipeline compute `[stages, batch, embed]`, and each device has one stage. XLA:TPU
    reduce-scatters along the first dimension only, so `run_on_shards` drops the leading dimensions for the collective.
    The order is the product's own or, if it is only transposed, that of its transpose. Return None for other products.
    """
    sums = [move for move in strategy.moves if move.array < 0]
    if op.name != "dot_general" or all(move.kind != "reduce-scatter" for move in sums):
        return None
    assert op.rule is not None
    computed, shape = strategy.spec(op.rule.results[0]), op.eqn.outvars[0].aval.shape
    ones = [n == shard_count((axes,), layout.mesh) for n, axes in zip(shape, want, strict=True)]
    scattered = [d for d, (before, after) in enumerate(zip(computed, want, strict=True)) if before != after]
    if len(scattered) != 1:
        return None
    added = want[scattered[0]][len(computed[scattered[0]]) :]
    partial = {axis for move in sums for axis in move.axes}
    if (*computed[scattered[0]], *added) != want[scattered[0]] or not partial >= {*added}:
        return None
    for order in ((*range(len(shape)),), transposed_order(layout, op)):
        front = [*itertools.takewhile(lambda d: d != scattered[0], order)]
        if front and all(ones[d] for d in front):
            return order
    return None


def _has_known_fault(op: Op, sharded: Sequence[str], mesh: Mapping[str, int]) -> bool:
    """Whether the partitioner has a known fault with the operator where these factors are sharded."""
    assert op.rule is not None
    if not sharded or op.name not in MISPARTITIONED or any(_compat.is_extended(v.aval.dtype) for v in op.eqn.invars):
        return False
    application = ShardedOperator([v.aval for v in op.eqn.invars], op.eqn.params, op.rule, tuple(sharded))
    fault = known_fault(op.name, application, axes=sum(n > 1 for n in mesh.values()))
    return writes_one_row(op.name, application, math.prod(mesh.values())) or (fault is not None and fault.avoided)


def can_constrain_at_once(layout: Layout, op: Op, strategy: OperatorStrategy, result: int, want: Spec) -> bool:
    """Like `extends_computed_spec`, but also False where the partitioner has a known fault with the wanted sharding."""
    rule = op.rule
    assert rule is not None
    dims = rule.results[result]
    computed = strategy.spec(dims)
    if not extends_computed_spec(rule, dims, computed, want):
        return False
    newly_sharded = [f for dim, c, w in zip(dims, computed, want, strict=True) if len(w) > len(c) for f in dim]
    return not newly_sharded or not _has_known_fault(
        op, [*sharded_factors(strategy, layout.mesh).values(), *newly_sharded], layout.mesh
    )


def extends_computed_spec(rule: Rule, dims: Dims, computed: Spec, want: Spec) -> bool:
    """Whether a result may be constrained directly to its wanted sharding, and not to the computed one first.

    This holds only where the wanted sharding extends the computed one, so that a partial sum becomes a reduce-scatter,
    and does not extend a batch dimension that is sharded already. In all other cases the partitioner would choose how
    to reshard, and may compute wrong values, as from (dp, tp) x (tp, fsdp) to ((dp, fsdp), tp). In a lookup, each
    sharded dimension counts as a batch: with a table sharded along both dimensions, the partitioner fails to compile
    if a dimension of the indices is sharded further.
    """
    indexed = any(f.kind == "index" for f in rule.factors)
    for names, c, w in zip(dims, computed, want, strict=True):
        batch = indexed or any(all(any(f in dim for dim in operand) for operand in rule.operands) for f in names)
        if w[: len(c)] != c or (batch and c and w != c):
            return False
    return True
