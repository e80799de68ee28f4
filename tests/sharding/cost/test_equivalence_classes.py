"""Equivalence classes of values and operators, each of which is priced once."""

import functools
from typing import Any

import jax
import pytest

from autoshard.models.workloads import workload
from autoshard.sharding.axes.typical_inputs import typical_inputs
from autoshard.sharding.cost.equivalence_classes import ops_with_scopes
from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout
from autoshard.sharding.layout import layout as layout_module
from autoshard.sharding.layout.operator_sharding import operand_spec, result_spec
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.planner.planning import PlanningProblem
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.sharding.program.tracing import trace
from autoshard.train.program.build import workload_step

STRATEGIES = ("fsdp:8", "zero1:8", "dp:2 fsdp:2 tp:2 seq", "tp:8 state", "dp:4 tp:2 seq")


@functools.cache
def problem(layers: int = 2) -> PlanningProblem:
    """The planning problem of an unrolled model's train step."""
    step, state, batch = workload_step(workload("llama-tiny").with_(scan_layers=False, layers=layers))
    return PlanningProblem(trace(step, (state, batch), {}, (0,)), find_machine(None, "v5e:2x4"), None)


@functools.cache
def layout(strategy: str):
    """A layout of the unrolled model."""
    return problem()._requested_layout(strategy)


def test_more_layers_do_not_make_more_classes():
    few, many = problem(layers=3), problem(layers=6)
    assert len(many.program.avals) > 1.8 * len(few.program.avals)
    assert len(many.cost.classes) == len(few.cost.classes)
    assert len(many.cost.queries.queries) == len(few.cost.queries.queries)
    classes = [p.memory.classes_of(p._requested_layout("fsdp:8")) for p in (few, many)]
    assert len(classes[0].examples) == len(classes[1].examples) < len(classes[0].values) / 3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_the_size_of_each_value_is_that_of_its_own_shard(strategy, is_fixed):
    """The layout is queried for one value of each class only."""
    model, chosen = problem().memory, problem()._requested_layout(strategy)
    if is_fixed:  # one layer's weight is replicated, the others are not
        paths = problem().traced.in_paths
        weights = [v for v, path in zip(problem().program.inputs, paths, strict=True) if path.endswith("mlp/w_up")]
        chosen.fixed = {weights[0]: ((), ())}
    local = model._local(chosen)
    for v in model.sized:
        shard_count = chosen.shard_count(a for dim in operand_spec(chosen, v) for a in dim)
        size = nbytes(problem().program.avals[v]) * problem().cost.fusion.narrow.get(v, 1.0)
        assert local[v] == pytest.approx(size * model._fraction(chosen, v, model.tiled.get(v)), rel=1e-12)
        assert local[v] >= size / shard_count * (1 - 1e-12)  # more if tiles pad it


def test_one_fixed_layer_is_priced_by_itself():
    """A replicated weight is not gathered under `fsdp:8`; the same weight of other layers is."""
    with jax.default_matmul_precision(
        "highest"
    ):  # otherwise two gathers in 16 bits save as much as an all-reduce costs
        planning = problem(layers=5)
    inputs = [
        v
        for v, path in zip(planning.program.inputs, planning.traced.in_paths, strict=True)
        if path.endswith("mlp/w_up")
    ]
    weights = [v for v in inputs if planning.roles.inputs[v] == "parameter"]

    def comm_bytes(fixed):
        chosen_layout = planning._requested_layout("fsdp:8")
        chosen_layout.fixed = dict.fromkeys(fixed, ((), ()))
        return planning.cost(chosen_layout).comm_bytes

    without_fixed, each = comm_bytes([]), [comm_bytes([v]) for v in weights]
    assert len(weights) == 5 and without_fixed != each[0]
    assert each == pytest.approx([each[0]] * 5)
    assert comm_bytes(weights) - without_fixed == pytest.approx(5 * (each[0] - without_fixed))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operators_that_are_not_priced_move_nothing(strategy):
    planning, chosen_layout = problem(), layout(strategy)
    priced = {number for each in planning.cost.classes for number in each.numbers}
    not_priced = [
        op for number, op in enumerate(planning.program.ops()) if op.rule is not None and number not in priced
    ]
    assert len(not_priced) > 50
    for op in not_priced:
        assert id(op) not in planning.cost.fusion.kernels
        assert not is_decision_point(op)
        specs = [operand_spec(chosen_layout, v) if v >= 0 else () for v in op.operands]
        assert (
            planning.cost.prices.plain_moves(
                op, chosen_layout.mesh, specs, [result_spec(chosen_layout, op, v) for v in op.results]
            )
            == ()
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gathered_values_are_live_from_their_first_use_to_their_last(strategy, monkeypatch):
    """The live ranges of classes are those of each value in each loop."""
    planning, chosen_layout = problem(), layout(strategy)
    monkeypatch.setattr(planning.cost, "_late", None)  # delayed products hold them longer
    class_of = {number: (n, each) for n, each in enumerate(planning.cost.classes) for number in each.numbers}
    canonical = CanonicalLayout(chosen_layout, planning.cost.queries)
    expected: dict[Any, list[float]] = {}
    for number, (op, loop) in enumerate(ops_with_scopes(planning.program.block)):
        price, names = planning.cost._price(*class_of[number], canonical) if number in class_of else (None, {})
        for move in price.moves if price else ():
            if move.kind == "all-gather" and move.array >= 0:
                value, axes = op.operands[move.array], tuple(names[name] for name in move.axes)
                key, size = (
                    (axes, planning.axes.parameter_aliases.get(value, value), loop),
                    move.local_bytes + move.wire_bytes,
                )
                expected.setdefault(key, [size, number, number])[2] = number
            elif move.kind == "reduce-scatter":
                expected[op, move.array] = [move.local_bytes, number, number]
    actual = [
        (some.nbytes, first, last)
        for some in planning.cost(chosen_layout).live_buffers if some.nbytes
        for first, last in zip(some.first.tolist(), some.last.tolist(), strict=True)
    ]  # fmt: skip
    assert sorted(actual) == sorted(map(tuple, expected.values()))
    assert actual


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_inputs_of_one_layer_give_the_shardings_of_all_gradients(strategy, monkeypatch):
    few, many = problem(layers=3), problem(layers=6)
    typical = typical_inputs(many.axes, many.roles)
    assert len(typical) == len(typical_inputs(few.axes, few.roles)) < len(many.roles.inputs)
    found = many._requested_layout(strategy)._derive_gradient_specs()
    monkeypatch.setattr(layout_module, "typical_inputs", lambda axes, roles: tuple(roles.inputs))
    assert many._requested_layout(strategy)._derive_gradient_specs() == found
