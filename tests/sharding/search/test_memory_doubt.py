"""Plans whose memory comes close to the limit are ranked as slower than their estimated time."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.sharding.autotune.settling import contenders
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.pipeline.choice import plan_of_pipelines
from autoshard.sharding.plan.memory_doubt import usable_bytes, usable_bytes_of
from autoshard.sharding.plan.serialization import plan_from_json, plan_json
from autoshard.sharding.planner import offload_choice, problem, shortlist
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.planner.shortlist import Shortlist, fastest_of_all
from autoshard.sharding.planner.variants import fastest
from autoshard.sharding.search import layout_search
from autoshard.train.program import remat_search
from autoshard.train.program.remat_space import Priced


def candidate(time: float, peak: float, limit: float) -> Any:
    return SimpleNamespace(
        cost=SimpleNamespace(step_time_us=time), peak_bytes=peak, usable_bytes=limit, fits=lambda most: peak <= most
    )


@pytest.mark.parametrize(("limit", "chosen"), [(100.0, 0), (95.0, 0), (92.0, 1), (90.0, 1), (89.0, 1)])
def test_a_slightly_slower_plan_with_memory_to_spare_is_chosen(limit, chosen, monkeypatch):
    """The plan of 90 bytes is 3 % faster. It almost fills 92 bytes of memory."""
    monkeypatch.setattr(layout_search, "best_assigned", lambda candidate, cost: candidate)
    no_cost: Any = None
    every = [candidate(100.0, 90.0, limit), candidate(103.0, 50.0, limit)]
    best, listed = layout_search._best_fitting(every, every, [], no_cost, limit)
    assert best is every[chosen]
    assert listed == every, "they are listed by their estimated times"


def test_the_search_ranks_by_the_memory_that_the_user_gives():
    """The candidates of the search have this limit."""
    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    made = autoshard.plan(lambda w, x: jnp.tanh(x @ w).sum(), *args, target="v5e:2x4", memory_limit_bytes=2**28)
    best, others = bound_or_error(made.bound).problem.search({}, {}, None)
    assert {each.usable_bytes for each in (best, *others)} == {2**28}


@pytest.mark.parametrize(("target", "share"), [("v5e:2x4", 0.95), ("h100:8", 1.0)])
def test_a_program_can_use_less_than_all_of_a_tpus_memory(target, share):
    """On a GPU, a program can use all of the limit."""
    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    made = autoshard.plan(lambda w, x: jnp.tanh(x @ w).sum(), *args, target=target)
    assert made.usable_bytes == pytest.approx(share * made.limit_bytes)


@pytest.mark.parametrize(("limit", "chosen"), [(95, 0), (92, 1)])
def test_layouts_of_a_requested_strategy_are_compared_with_the_doubt(limit, chosen, monkeypatch):
    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    step = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
    made = autoshard.plan(step, *args, target="v5e:2x4", memory_limit_bytes=limit * 2**20, plan="fsdp:8")
    planning: Any = bound_or_error(made.bound).problem
    every = [candidate(time, peak * 2**20, limit * 2**20) for time, peak in ((100.0, 90.0), (103.0, 50.0))]
    for each in every:
        each.name, each.layout = "fsdp:8", bound_or_error(made.bound).layout
    priced = iter(every)
    monkeypatch.setattr(problem, "price", lambda *_: next(priced))
    monkeypatch.setattr(problem, "best_assigned", lambda candidate, cost: candidate)
    monkeypatch.setattr(planning, "_requested_layouts", lambda _: [("fsdp:8", every[0].layout)] * 2)
    assert planning.choose("fsdp:8", {}, {})[0] is every[chosen]


def test_without_a_limit_nothing_is_full():
    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    step: Any = lambda w, x: jnp.tanh(x @ w).sum()  # noqa: E731
    made = autoshard.plan(step, *args, target="v5e:2x4", memory_limit_bytes=float("inf"))
    assert (made.limit_bytes, made.usable_bytes) == (0.0, 0.0)
    assert usable_bytes(math.inf, CHIPS["v5e"]) == math.inf


def test_a_stored_plan_says_how_much_memory_its_program_can_use():
    """A plan of an older version has only a limit."""
    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    made = autoshard.plan(lambda w, x: jnp.tanh(x @ w).sum(), *args, target="v5e:2x4")
    assert 0 < usable_bytes_of(made) == made.usable_bytes < made.limit_bytes
    read = plan_from_json(plan_json(made), autoshard.Plan)
    assert read.usable_bytes == made.usable_bytes
    old = json.loads(plan_json(made))
    del old["usable_bytes"]
    assert usable_bytes_of(plan_from_json(json.dumps(old), autoshard.Plan)) == made.limit_bytes


def bound(time: float, peak: float, fits: bool = True, chosen: str = "fsdp:8") -> Any:
    estimate = SimpleNamespace(step_time_us=time, peak_memory_bytes=peak)
    plan = SimpleNamespace(
        estimate=estimate,
        limit_bytes=100.0,
        usable_bytes=100.0,
        fits=fits,
        fits_host=True,
        chosen=chosen,
        candidates=(),
    )
    made = SimpleNamespace(plan=plan)
    made.where = lambda **changes: made
    return made


@pytest.mark.parametrize(("lean_us", "chosen"), [(103.0, 1), (107.0, 0)])
def test_variants_are_compared_with_the_doubt(lean_us, chosen, monkeypatch):
    """A plan at 98 % of the memory counts as 4.8 % slower."""
    monkeypatch.setattr("autoshard.sharding.planner.variants.variant_table", lambda bound, choice, made: bound)
    tight, lean = bound(100.0, 98.0), bound(lean_us, 60.0)
    assert fastest([({"a": 1}, tight), ({"a": 2}, lean)]) is (tight, lean)[chosen]


def test_offloads_are_compared_with_the_doubt():
    """Values go to the host if that gains at least 10 %: here 7 % by the time, and 4.8 % by the memory."""
    plain, lean = bound(100.0, 98.0), bound(93.0, 60.0)
    assert offload_choice._best((plain, []), [(lean, [])])[0] is lean
    assert offload_choice._best((bound(100.0, 90.0), []), [(lean, [])])[0] is not lean


def test_plans_are_compiled_in_the_order_of_the_doubt(monkeypatch):
    """The order matters: if no plan compiles, the first is chosen, and only the first of a kind is compiled."""
    monkeypatch.setattr(shortlist, "variant_table", lambda bound, choice, made: bound)
    tight, lean = bound(100.0, 92.0), bound(102.0, 60.0)
    for each in (tight, lean):
        each.plan.usable_bytes = 95.0  # of 100
    made: Any = [({"a": 1}, tight), ({"a": 2}, lean)]
    compared = []
    fastest_of_all(made, Shortlist(2, lambda plans, limit: compared.append(plans) or plans[0]), lambda *_: None)
    assert compared == [[lean, tight]]
    ((_, of_kind),) = contenders(made, 100.0)
    assert [each.variant for each in of_kind] == [1, 0]


def test_numbers_of_stages_are_compared_with_the_doubt():
    plans = {2: bound(100.0, 98.0, chosen="pp:2"), 4: bound(103.0, 60.0, chosen="pp:4")}
    for each in plans.values():
        each.plan.notes = ()
    assert plan_of_pipelines("step", "1f1b", [2, 4], plans.__getitem__) is plans[4]


def test_mixes_are_made_of_policies_that_almost_fill_the_memory():
    probes: Any = SimpleNamespace(space=SimpleNamespace(layers=4), limit=100.0, usable_bytes=100.0)
    strict = Priced("full", 1, 10.0, 40.0, usable_bytes=100.0)
    for peak, expected in ((90.0, False), (97.0, True), (130.0, True)):
        light = Priced("none", 1, 8.0, peak, usable_bytes=100.0)
        assert bool(remat_search._Probes._mixes(probes, [light, strict])) == expected
    assert replace(strict, peak_bytes=100.0).score_us == pytest.approx(1.08 * strict.score_us)
