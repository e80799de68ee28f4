"""Plans chosen by measuring: which plans run, which one wins, what the notes report, and what cannot be run."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import Plan, auto_shard, plan
from autoshard._processes import MissingProcessError
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.autotune import measured_time, synthetic_inputs
from autoshard.sharding.autotune.constants import FINAL_TURNS, TURNS
from autoshard.sharding.planner.shortlist import without_near_duplicates
from autoshard.sharding.report.page import page


@pytest.fixture
def step_seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Step times in seconds, by strategy, which replace the measured ones. The steps still run."""
    seconds: dict[str, float] = {}
    turn = measured_time._turn

    def fixed(run: Any) -> list[float]:
        turn(run)
        return [seconds.get(run.plan.chosen, 1.0)]

    monkeypatch.setattr(measured_time, "_turn", fixed)
    return seconds


def step_of(state: Any, batch: Any, *, twice: bool = False) -> Any:
    """A train step of two layers, which has several plans on eight devices."""

    def loss(w):
        return jnp.mean(jnp.square(jnp.tanh(batch @ w["a"]) @ w["b"])) * (1 + twice)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - g, state, grads), value


SHAPES = (
    {"a": jax.ShapeDtypeStruct((64, 256), "float32"), "b": jax.ShapeDtypeStruct((256, 64), "float32")},
    jax.ShapeDtypeStruct((64, 64), "float32"),
)


def planned(**options: Any) -> Plan:
    return plan(step_of, *SHAPES, donate_argnums=0, **options)


def ranked() -> list[str]:
    """The strategies of the candidates in the order in which they are run."""
    order = sorted(planned().candidates, key=lambda c: c[1])
    return [name for *_, name in without_near_duplicates([(time, peak, name) for name, time, peak in order])]


def test_the_fastest_plan_is_chosen(step_seconds):
    best, strategies = planned(), ranked()
    step_seconds[strategies[2]] = 0.5
    plan = planned(measure=4)
    assert plan.chosen == strategies[2] and plan.inputs == planned(plan=strategies[2]).inputs
    note = plan.notes[-1]
    assert note.startswith(f"the fastest of 4 run on cpu:8: {strategies[2]} 500 ms") and f"{best.chosen} 1.00 s" in note
    assert plan.measured[0] == (strategies[2], pytest.approx(5e5)) and len(plan.measured) == 4
    assert (best.chosen, pytest.approx(1e6)) in plan.measured and '"measured"' not in plan.to_json()
    html = page(plan)
    assert "measured, the median of its runs" in html and "faster by the estimate, but not as measured" in html


@pytest.mark.slow
def test_a_measured_plan_computes_the_values_of_one_device():
    """The real clock is used. Measuring does not change the caller's state."""

    def step(state, batch):
        def loss(w):
            return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ w["a"]) @ w["b"]))

        value, grads = jax.value_and_grad(loss)(state["w"])
        key, other = jax.random.split(state["key"])
        w = jax.tree.map(lambda p, g: p - g + 0 * jax.random.normal(other, ()), state["w"], grads)
        return {"w": w, "key": key, "count": state["count"] + batch["valid"].sum()}, value

    def state():
        a, b = jax.random.split(jax.random.key(1))
        w = {"a": jax.random.normal(a, (32, 64)), "b": jax.random.normal(b, (64, 32))}
        return {"w": w, "key": jax.random.key(7), "count": jnp.int32(0)}

    batch = {"x": jax.random.normal(jax.random.key(2), (64, 32)), "valid": jnp.ones((64,), bool)}
    expected, loss = jax.jit(step)(state(), batch)
    run = auto_shard(step, donate_argnums=0, measure=3)
    updated, value = run(state(), batch)
    assert "run on cpu:8" in run.plan(state(), batch).notes[-1]
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(updated["w"]), jax.tree.leaves(expected["w"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert int(updated["count"]) == int(expected["count"])
    np.testing.assert_array_equal(jax.random.key_data(updated["key"]), jax.random.key_data(expected["key"]))


def test_plans_of_all_variants_are_measured(step_seconds):
    plan = planned(variants={"twice": [False, True]}, measure=3)
    assert re.search(r"the fastest of 3 run on cpu:8: .*\(twice=\w+\) 1.00 s", plan.notes[-1])
    assert len(plan.variants) == 2


def test_a_plan_that_does_not_run_is_reported_and_not_chosen(step_seconds, monkeypatch):
    strategies = ranked()
    turn = measured_time._turn

    def full(run: Any) -> Any:
        if run.plan.chosen in refused:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")
        return turn(run)

    monkeypatch.setattr(measured_time, "_turn", full)
    refused = {strategies[0]}
    plan = planned(measure=2)
    assert plan.chosen == strategies[1]
    assert plan.notes[-1].endswith(f"; {strategies[0]} does not run: RESOURCE_EXHAUSTED: Out of memory while trying to "
                                   "allocate 9 bytes")  # fmt: skip
    refused = set(strategies)
    plan = planned(measure=2)
    assert plan.chosen == strategies[0] and plan.notes[-1].startswith("none of 2 plans runs on cpu:8; ")


def test_a_slow_plan_is_run_once(step_seconds, monkeypatch):
    strategies = ranked()
    step_seconds[strategies[0]], runs = 2.0, []
    turn = measured_time._turn
    monkeypatch.setattr(measured_time, "_turn", lambda run: runs.append(run.plan.chosen) or turn(run))
    assert planned(measure=2).chosen == strategies[1]
    assert runs == [*strategies[:2], strategies[1], strategies[1]]  # no final turns for a single plan


def test_close_plans_run_final_turns(step_seconds, monkeypatch):
    strategies = ranked()
    step_seconds.update({strategies[0]: 1.0, strategies[1]: 1.05, strategies[2]: 1.2})
    counts: dict[str, int] = {}
    turn = measured_time._turn

    def counted(run: Any) -> Any:
        counts[run.plan.chosen] = counts.get(run.plan.chosen, 0) + 1
        return turn(run)

    monkeypatch.setattr(measured_time, "_turn", counted)
    assert planned(measure=3).chosen == strategies[0]
    assert [counts[name] for name in strategies[:3]] == [TURNS + FINAL_TURNS] * 2 + [TURNS]


def test_machines_that_are_not_attached_raise():
    x = jax.ShapeDtypeStruct((64, 64), "float32")

    def product(a, b):
        return a @ b

    absent: list[tuple[dict[str, Any], str]] = [({"target": "v5e:2x4"}, "v5e:2x4"), ({"mesh": {"a": 16}}, "cpu:16")]
    for options, has in absent:
        with pytest.raises(PlanError, match=f"devices \\(8 of cpu\\), but this plan is for {has}. Use verify=k"):
            plan(product, x, x, measure=2, **options)
    assert "run on cpu:8" in plan(product, x, x, measure=2, target="cpu:8").notes[-1]
    for measure in (-1, True, "all"):
        with pytest.raises(PlanError, match="measure is .*; give the number of plans to run"):
            plan(product, x, x, measure=measure)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="measure is .*; both choose"):
        plan(product, x, x, measure=1, verify=1)


def scaled(w, x, by):
    return jnp.mean(jnp.square(jnp.tanh(x @ w) * by))


def arguments() -> tuple[jax.Array, jax.Array]:
    return jnp.ones((16, 8)), jnp.ones((32, 16))


def tolerant(w, x, tolerance):
    """Halve until the sum is small enough. The loop never ends for some tolerances."""
    y = jnp.tanh(x @ w)
    return jax.lax.while_loop(lambda y: jnp.sum(jnp.abs(y)) > tolerance - 1, lambda y: (y + 1) / 2, y)


def counted_within(w, x, bound):
    return jax.jit(lambda w: jax.lax.fori_loop(0, bound, lambda i, y: jnp.tanh(y @ w), x[:, :8]))(w[:8])


@pytest.mark.parametrize("loop", [tolerant, counted_within])
def test_programs_with_loops_that_may_never_end_are_not_run(loop, monkeypatch):
    monkeypatch.setattr(measured_time, "_turn", lambda run: pytest.fail("the program was run"))
    number = 3 if loop is counted_within else 0.5
    planned, best = plan(loop, *arguments(), number, measure=2), plan(loop, *arguments(), number)
    assert planned.chosen == best.chosen and planned.inputs == best.inputs
    note = rf"no plan was measured: {loop.__name__} has a loop whose trip count depends on values at .*_time.py:\d+"
    assert re.match(note, planned.notes[-1])


def test_a_loop_inside_a_shard_map_is_found():
    mesh = jax.sharding.AbstractMesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    for body, may_not_end in ((lambda y: tolerant(arguments()[0], y, 0.5), True), (jnp.tanh, False)):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        eqns = jax.make_jaxpr(mapped)(arguments()[1]).eqns
        assert any(synthetic_inputs._contains_while(eqn) for eqn in eqns) is may_not_end


def test_programs_with_loops_that_always_end_are_run():
    def counts(w, x):
        def body(carry):
            n, y = carry
            return n + 1, jnp.tanh(y @ w)

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x[:, :8]))

    assert "run on cpu:8" in plan(counts, jnp.ones((8, 8)), jnp.ones((32, 16)), measure=2).notes[-1]


def test_synthetic_scalars_and_first_elements_are_not_zero():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64):
        assert synthetic_inputs._numbers((), dtype) != 0 and synthetic_inputs._numbers((3, 2), dtype)[0, 0] != 0


def test_programs_with_side_effects_are_not_run():
    seen: list[Any] = []

    def reports(w, x):
        jax.debug.callback(lambda y: seen.append(y), jnp.sum(x))
        return jnp.tanh(x @ w)

    planned = plan(reports, *arguments(), measure=2)
    assert not seen and planned.chosen == plan(reports, *arguments()).chosen
    assert planned.notes[-1].startswith("no plan was measured: reports has side effects (DebugEffect)")


def test_synthetic_values_may_give_nan_under_debug_nans():
    with jax.debug_nans(True):
        planned = plan(lambda w, x: jnp.log(-jnp.square(x @ w) - 1), *arguments(), measure=2)
    assert planned.notes[-1].startswith("the fastest of 2 run on cpu:8: ") and "does not run" not in planned.notes[-1]


def test_errors_of_a_plan_are_reported(step_seconds, monkeypatch):
    strategies = ranked()
    turn = measured_time._turn

    def wrong(run: Any) -> Any:
        if run.plan.chosen == strategies[0]:
            raise raised
        return turn(run)

    monkeypatch.setattr(measured_time, "_turn", wrong)
    raised: BaseException = ValueError("layouts disagree\nin detail")
    plan = planned(measure=2)
    assert plan.chosen == strategies[1] and plan.notes[-1].endswith(f"; {strategies[0]} does not run: layouts disagree")
    for raised in (KeyboardInterrupt(), MissingProcessError("gone", processes=[1], what="it", seconds=1.0)):
        with pytest.raises(type(raised)):
            planned(measure=2)


def test_inputs_of_four_bits_raise_no_error():
    w = jnp.ones((16, 8), jnp.int4)
    planned = plan(lambda w, x: jnp.tanh(x @ w.astype(x.dtype)), w, arguments()[1], measure=2)
    assert "run on cpu:8" in planned.notes[-1] or planned.notes[-1].startswith("none of 2 plans runs on cpu:8; ")


@pytest.mark.parametrize("number", [0.5, 2, True])
def test_python_numbers_are_accepted_as_arguments(number):
    planned = plan(scaled, *arguments(), number, measure=2)
    assert planned.notes[-1].startswith("the fastest of 2 run on cpu:8: ") and "does not run" not in planned.notes[-1]
    assert auto_shard(scaled).lower(*arguments(), number).compile() is not None


def test_a_requested_plan_is_measured_once(step_seconds):
    assert planned(plan="fsdp:8", measure=3).notes[-1] == "the fastest of 1 run on cpu:8: fsdp:8 1.00 s"


def test_variants_of_a_program_that_cannot_be_sharded():
    def odd(w, x, k=0):
        return jnp.mean(jnp.square(jnp.tanh(x @ w))) + k

    with pytest.warns(AutoshardWarning, match="nothing is sharded"):
        planned = plan(odd, jnp.ones((7, 11)), jnp.ones((9, 7)), variants={"k": [0, 1]}, measure=2)
    assert "run on cpu:8" in planned.notes[-1] and len(planned.variants) == 2
