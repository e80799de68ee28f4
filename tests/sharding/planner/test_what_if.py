"""The alternatives that `explain` prices equal plans with the alternative fixed."""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import Plan
from autoshard._units import bytes_text, change_text, time_text
from autoshard.errors import PlanError
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.planner.what_if import moments_of, neighbouring_specs, price_in_plan
from tests.sharding.example_step import shapes, train_step
from tests.sharding.programs import adamw_step, mlp_state

WQ = "0/params/attention/wq"
SHOWN_WQ = "state/params/attention/wq"
MOMENT = "0/moments/attention/wq"


@cache
def planned(words: Any = "fsdp:2 tp:4 seq", **options: Any) -> Plan:
    return autoshard.plan(train_step, *shapes(), plan=words, target="cpu:8", donate_argnums=0, **options)


def with_fixed(words: Any, fixed: Any, **options: Any) -> Plan:
    settings: dict[str, Any] = {"plan": words, "target": "cpu:8", "donate_argnums": 0, "fixed": fixed} | options
    return autoshard.plan(train_step, *shapes(), **settings)


def leaf(plan: Plan, path: str) -> Any:
    return next(x for x in plan.inputs if x.path == path)


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.few(2)
@pytest.mark.parametrize(("words", "path"), [("zero1:8", WQ), ("fsdp:8", "0/params/embed"), ("fsdp:2 tp:4 seq", "1/x")])
def test_an_alternative_costs_what_its_plan_costs(words, path):
    alternatives = neighbouring_specs(bound_or_error(planned(words).bound), [leaf(planned(words), path)])
    assert len({tuple(c.fixed.items()) for c in alternatives}) == len(alternatives) >= 2
    for choice in alternatives:
        estimate = with_fixed(words, choice.fixed).estimate
        assert (choice.step_time_us, choice.peak_bytes) == pytest.approx(
            (estimate.step_time_us, estimate.peak_memory_bytes)
        )
    assert [c.step_time_us for c in alternatives] == sorted(c.step_time_us for c in alternatives)


def test_explain_shows_the_next_best_alternative_with_its_cost():
    plan = planned("fsdp:8")
    best = neighbouring_specs(bound_or_error(plan.bound), [leaf(plan, WQ)])[0]
    whole = with_fixed("fsdp:8", {WQ: P(), MOMENT: P()}).estimate
    text = plan.explain(WQ)
    assert f"P({', '.join(map(repr, best.fixed[WQ]))})" in text
    assert "alternatives (all else as planned: step " in text and "; its moment sharded the same way):" in text
    step = change_text(whole.step_time_us, plan.estimate.step_time_us, time_text, 1e-3)
    memory = change_text(whole.peak_memory_bytes, plan.estimate.peak_memory_bytes, bytes_text, 1e-3)
    assert re.search(rf"P\(\) +slower: +step {re.escape(step)}, memory {re.escape(memory)}", text)
    assert step.startswith("+") and step.endswith(" %)")


def test_an_alternative_that_does_not_fit_is_infeasible():
    limit = planned("fsdp:8").estimate.peak_memory_bytes + 100
    plan = planned("fsdp:8", memory_limit_bytes=limit)
    table = next(
        x
        for x in neighbouring_specs(bound_or_error(plan.bound), [leaf(plan, "0/params/embed")])
        if not any(x.fixed["0/params/embed"])
    )
    assert table.peak_bytes > limit
    excess = bytes_text(table.peak_bytes - limit)
    assert re.search(rf"P\(\) infeasible: .*{excess} over the limit of", flat(plan.explain("params/embed")))


def test_tensors_that_cannot_be_sharded_have_no_alternatives():
    assert "alternatives" not in planned().explain("0/count") + planned().explain("1/loss")
    assert "alternatives" not in autoshard.plan(train_step, *shapes(), target="cpu:1").explain(WQ)
    assert "alternatives" not in Plan.from_json(planned().to_json()).explain(WQ)


# wishes


@pytest.mark.slow
def test_a_wish_costs_what_its_plan_costs():
    plan = planned("fsdp:8")
    text = flat(plan.explain(WQ, P()))
    # The parameter is gathered after its update instead of before its use.
    assert text.startswith(f"{SHOWN_WQ}: P() instead of P('fsdp'): a tie in time under this plan (fsdp:8): step ")
    weight_only, both = (with_fixed("fsdp:8", dict.fromkeys(paths, P())).estimate for paths in ([WQ], [WQ, MOMENT]))
    assert weight_only.step_time_us < both.step_time_us  # so the moment keeps its sharding
    change = change_text(weight_only.step_time_us, plan.estimate.step_time_us, time_text, 1e-3)
    assert (
        f"step {time_text(weight_only.step_time_us)}, {change}; memory {bytes_text(weight_only.peak_memory_bytes)}"
        in text
    )
    change = change_text(both.step_time_us, plan.estimate.step_time_us, time_text, 1e-3)
    assert f"alone; with its moment sharded the same way: step {change}" in text
    assert f"to get it: plan='fsdp:8', fixed={{'{SHOWN_WQ}': P()}}" in text


@pytest.mark.slow
def test_a_search_around_the_wish_is_priced_too():
    spec = P(None, None, "tp")
    explanation = flat(planned("dp:2 tp:4").explain(WQ, spec))
    around = min(with_fixed(None, dict.fromkeys(f, spec)).estimate.step_time_us for f in ([WQ], [WQ, MOMENT]))
    # compared with the best plan without the wish, not with the requested plan
    best = planned(None)
    change = change_text(around, best.estimate.step_time_us, time_text, 1e-3)
    assert f"; without it {best.chosen}): step {time_text(around)}, {change};" in explanation


def test_a_wish_that_ties_or_is_already_planned():
    plan = planned("fsdp:8")
    assert ": a tie under this plan (fsdp:8): " in flat(plan.explain(WQ, P(None, "fsdp")))
    assert "P('fsdp', None) is its sharding already" in flat(plan.explain(WQ, P("fsdp", None)))


def test_a_wish_can_be_faster():
    """A bad fixed sharding is undone. The result is the same strategy without it."""
    plan = with_fixed("fsdp:8", {WQ: P(), MOMENT: P()})
    text = flat(plan.explain(WQ, P("fsdp")))
    assert re.match(rf"{SHOWN_WQ}: P\('fsdp'\) instead of P\(\): faster", text)
    assert f"step {time_text(planned('fsdp:8').estimate.step_time_us)}, -" in text
    assert "with its moment sharded the same way" in text


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (P(None, None, "tp", "fsdp"), "has 4 entries, but the array has 3 dimensions"),
        (P("model"), "names mesh axis 'model'"),
        (P("tp", "tp"), "uses mesh axis 'tp' twice"),
        (P(None, None, ("tp", "fsdp")), r"dim 2 has size 4, not divisible by mesh axes 'tp' x 'fsdp' \(8\)"),
        (("nothing",), "has no logical axis 'nothing'"),
    ],
)
def test_an_infeasible_wish_gives_the_reason(wish, reason):
    text = flat(planned().explain(WQ, wish))
    assert re.match(rf"{SHOWN_WQ}: .* instead of P\('fsdp', 'tp'\): infeasible", text)
    assert re.search(f"infeasible: .*{reason}", text) and text.count("has 4 entries") <= 1


def test_a_wish_by_logical_axes_shows_its_partition_spec():
    text = flat(planned("fsdp:8").explain(WQ, (None, "heads")))
    assert text.startswith(f"{SHOWN_WQ}: (None, 'heads'), under this plan P(), instead of P('fsdp'): ")


def test_a_wish_for_several_tensors():
    text = flat(planned().explain("*/attention/w[qk]", P()))
    assert text.startswith("state/moments/attention/wk and 3 more: P() instead of P('fsdp', 'tp'): ")


@pytest.mark.parametrize(
    ("path", "wish", "message"),
    [
        (WQ, 8, "wish is 8; give a PartitionSpec, or a logical axis or None"),
        (WQ, {"wq": P()}, "wish is .*; give a PartitionSpec"),
        ("1/loss", P(), "'1/loss' is a result, which cannot be fixed.*Give the path of an input"),
        ("wz", P(), "no input or result is called 'wz'"),
    ],
)
def test_invalid_wishes_raise(path, wish, message):
    with pytest.raises(PlanError, match=message):
        planned().explain(path, wish)


def test_a_wish_needs_the_function():
    with pytest.raises(PlanError, match=r"plan\.bind"):
        Plan.from_json(planned().to_json()).explain(WQ, P())


def test_a_plan_read_from_json_prices_wishes_alike():
    plan = planned("fsdp:8")
    reread = Plan.from_json(plan.to_json()).bind(train_step, *shapes(), donate_argnums=0)
    ours, theirs = (price_in_plan(bound_or_error(p.bound), [leaf(p, WQ)], P())[1] for p in (plan, reread))
    assert (ours.step_time_us, ours.peak_bytes) == pytest.approx((theirs.step_time_us, theirs.peak_bytes))
    assert flat(reread.explain(WQ, P())).startswith(f"{SHOWN_WQ}: P() instead of P('fsdp'): a tie in time")


def test_the_moments_of_a_parameter():
    state = jax.eval_shape(lambda: (mlp_state(), __import__("optax").adamw(1e-2).init(mlp_state())))
    plan = autoshard.plan(adamw_step, state, jax.ShapeDtypeStruct((32, 64), "float32"), target="cpu:8")
    paths = {x.path for x in moments_of(plan, [leaf(plan, "0/0/w")])}
    assert len(paths) == 2 and all(path.endswith(("mu/w", "nu/w")) for path in paths)
    assert "the 2 moments" in plan.explain("0/0/w", P(None, plan.mesh.axis_names[0])) + plan.explain("0/0/w", P())


def test_moments_of_equal_layers_are_distinguished():
    def step(state, x):
        params, moments = state
        grads = jax.grad(lambda ps: sum(jnp.mean(jnp.tanh(x @ p["w"]) ** 2) for p in ps))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - m, params, moments), moments

    layers = [{"w": jax.ShapeDtypeStruct((64, 64), "float32")} for _ in range(3)]
    plan = autoshard.plan(step, (layers, layers), jax.ShapeDtypeStruct((32, 64), "float32"), target="cpu:8")
    roles = {x.path: x.role for x in plan.inputs}
    parameter = next(path for path, role in roles.items() if role == "parameter" and "/1/" in path)
    assert [x.path[-3:] for x in moments_of(plan, [leaf(plan, parameter)])] == ["1/w"]


# the cost of fixed shardings


def scanned(state, x):
    def loss(w):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)

    return state - 0.1 * jax.grad(loss)(state)


def scan_plan(words, spec=None):
    w, x = jax.ShapeDtypeStruct((8, 512, 512), "float32"), jax.ShapeDtypeStruct((8192, 512), "float32")
    fixed = {} if spec is None else {"0": spec}
    return autoshard.plan(scanned, w, x, plan=words, target="cpu:8", fixed=fixed, donate_argnums=0)


@pytest.mark.parametrize("words", ["dp:8", "fsdp:8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_stack_with_a_fixed_sharding_is_gathered_for_its_loop(words, dim):
    plan = scan_plan(words, P(*[None] * dim, words.partition(":")[0]))
    gathered = sum(size for kind, _, size, _ in plan.traffic if kind == "all-gather")
    assert gathered >= 7 / 8 * 8 * 512 * 512 * 4  # the whole stack, at least once
    if dim == 0:  # sharded along the loop: the whole stack is in memory at once
        assert plan.estimate.peak_memory_bytes > scan_plan(words).estimate.peak_memory_bytes
    text = (
        bound_or_error(plan.bound)
        .executable.jit()
        .lower(*bound_or_error(plan.bound).traced.in_avals)
        .compile()
        .as_text()
    )
    assert "all-gather" in text


def test_fix_plan_again_and_compare():
    searched = planned(None)
    spec = P() if leaf(searched, WQ).spec != P() else P(searched.mesh.axis_names[0])
    replanned = with_fixed(searched.chosen, {WQ: spec, MOMENT: spec})
    text = flat(searched.diff(replanned))
    assert "input attention/wq x2: " in text and text.count("input ") == 1
    assert f"{time_text(searched.estimate.step_time_us)} -> {time_text(replanned.estimate.step_time_us)}" in text
    assert replanned.estimate.step_time_us > searched.estimate.step_time_us
    assert "fixed by the user" in flat(replanned.explain(WQ)) or spec == P()
