"""What is priced once for many: values of one kind, operators of one group."""

import functools
from typing import Any

import pytest

from autoshard.models.workloads import workload
from autoshard.sharding.cost.canonical_layout import CanonicalLayout
from autoshard.sharding.cost.equivalence_classes import in_loops
from autoshard.sharding.layout.operator_sharding import operand_spec, result_spec
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.planner.planning import PlanningProblem
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.sharding.program.tracing import trace
from autoshard.train.program.build import workload_step

WORDS = ("fsdp:8", "zero1:8", "dp:2 fsdp:2 tp:2 seq", "tp:8 state", "dp:4 tp:2 seq")


@functools.cache
def planner(layers: int = 2) -> PlanningProblem:
    """What plans an unrolled model's train step."""
    step, state, batch = workload_step(workload("llama-tiny").with_(scan_layers=False, layers=layers))
    return PlanningProblem(trace(step, (state, batch), {}, (0,)), find_machine(None, "v5e:2x4"), None)


@functools.cache
def layout(words: str):
    """A layout of the unrolled model."""
    return planner()._requested(words)


def test_more_layers_are_no_more_groups():
    few, many = planner(layers=3), planner(layers=6)
    assert len(many.program.avals) > 1.8 * len(few.program.avals)
    assert len(many.cost.groups) == len(few.cost.groups)
    assert len(many.cost.values.examples) == len(few.cost.values.examples)
    kinds = [p.memory.kinds(p._requested("fsdp:8")) for p in (few, many)]
    assert len(kinds[0].examples) == len(kinds[1].examples) < len(kinds[0].values) / 3


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("pinned", [False, True])
def test_each_value_counts_where_it_is(words, pinned):
    """Though only one of each kind is asked for."""
    model, where = planner().memory, planner()._requested(words)
    if pinned:  # the same weight of the first and of the last layer, one of them whole
        paths = planner().traced.in_paths
        some = [v for v, path in zip(planner().program.inputs, paths, strict=True) if path.endswith("mlp/w_up")]
        where.fixed = {some[0]: ((), ())}
    local = model._local(where)
    for v in model.sized:
        ways = where.ways(a for dim in operand_spec(where, v) for a in dim)
        size = nbytes(planner().program.avals[v]) * planner().cost.fusion.narrow.get(v, 1.0)
        assert local[v] == pytest.approx(size * model._part(where, v), rel=1e-12)
        assert local[v] >= size / ways * (1 - 1e-12)  # more where tiles pad it


def test_one_layer_that_is_pinned_is_priced_as_one():
    """Whole on each device under `fsdp:8` it is not gathered; the same layer after it is."""
    made = planner(layers=5)
    some = [v for v, path in zip(made.program.inputs, made.traced.in_paths, strict=True) if path.endswith("mlp/w_up")]
    weights = [v for v in some if made.roles.inputs[v] == "parameter"]

    def sent(pinned):
        where = made._requested("fsdp:8")
        where.fixed = dict.fromkeys(pinned, ((), ()))
        return made.cost(where).comm_bytes

    free, each = sent([]), [sent([v]) for v in weights]
    assert len(weights) == 5 and free != each[0]
    assert each == pytest.approx([each[0]] * 5)
    assert sent(weights) - free == pytest.approx(5 * (each[0] - free))


@pytest.mark.parametrize("words", WORDS)
def test_what_is_not_priced_moves_nothing_anywhere(words):
    made, where = planner(), layout(words)
    priced = {number for g in made.cost.groups for number in g.numbers}
    left = [op for number, op in enumerate(made.program.ops()) if op.rule is not None and number not in priced]
    assert len(left) > 50
    for op in left:
        assert id(op) not in made.cost.fusion.kernels
        assert not is_decision_point(op)
        specs = [operand_spec(where, v) if v >= 0 else () for v in op.operands]
        assert made.cost._plain_moves(op, where.mesh, specs, [result_spec(where, op, v) for v in op.results]) == ()


@pytest.mark.parametrize("words", WORDS)
def test_what_is_gathered_waits_from_its_first_use_to_its_last(words):
    """Each value in each loop by itself, as it is found for all of a kind at once."""
    made, where = planner(), layout(words)
    groups = {number: (n, g) for n, g in enumerate(made.cost.groups) for number in g.numbers}
    named = CanonicalLayout(where, made.cost.values)
    expected: dict[Any, list[float]] = {}
    for number, (op, loop) in enumerate(in_loops(made.program.block)):
        price, names = made.cost._price(*groups[number], named) if number in groups else (None, {})
        for move in price.moves if price else ():
            if move.kind == "all-gather" and move.array >= 0:
                value, axes = op.operands[move.array], tuple(names[name] for name in move.axes)
                key, size = (
                    (axes, made.axes.parameter_aliases.get(value, value), loop),
                    move.local_bytes + move.wire_bytes,
                )
                expected.setdefault(key, [size, number, number])[2] = number
            elif move.kind == "reduce-scatter":
                expected[op, move.array] = [move.local_bytes, number, number]
    found = [
        (some.nbytes, first, last)
        for some in made.cost(where).waiting if some.nbytes
        for first, last in zip(some.first.tolist(), some.last.tolist(), strict=True)
    ]  # fmt: skip
    assert sorted(found) == sorted(map(tuple, expected.values()))
    assert found
