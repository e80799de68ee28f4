"""The search over what layers keep, recompute and offload: what it chooses, and that no values change."""

import math
import re
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from autoshard import Plan, auto_shard, plan
from autoshard.errors import ConfigError, PlanError
from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.workloads import workload
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.constants import HOST_MEMORY_SHARE
from autoshard.sharding.planner.strategy_prices import StrategyPrice, StrategyPrices
from autoshard.train.program import remat_search
from autoshard.train.program.build import workload_step, workload_steps, workload_variants
from autoshard.train.program.remat_choice import Choice
from autoshard.train.program.remat_guesses import Guesses
from autoshard.train.program.remat_search import promising
from autoshard.train.program.remat_space import Priced, RematSpace
from autoshard.train.program.workload_search import workload_search
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import make_train_step
from tests.sharding.programs import assert_close

SMALL = workload("gpt-tiny").with_(layers=4, context=256, batch_size=16, attention="plain")
OPTIONS: dict[str, Any] = {"target": "v5e:2x4", "plan": "fsdp:8"}


@cache
def peak(remat: str, microbatches: int = 1) -> float:
    return alone(remat, microbatches).estimate.peak_memory_bytes


@cache
def alone(remat: str, microbatches: int = 1) -> Plan:
    step = workload_step(SMALL.with_(remat=remat), microbatches)
    return plan(*step, **OPTIONS, memory_limit_bytes=10**12, donate_argnums=0)


def found(limit: float = 10**12, work: Any = SMALL, **how: Any) -> Plan:
    options: dict[str, Any] = {**OPTIONS, "memory_limit_bytes": int(limit)}
    given: dict[str, Any] = {"microbatches": 1} | how
    search = workload_search(work, options, **given)
    return plan(*workload_variants(work), **options, variants=search, donate_argnums=0)


@pytest.mark.slow
def test_with_enough_memory_nothing_is_recomputed_or_moved():
    """The plan is as fast as the fastest word, and its estimate is that of the same variant planned alone."""
    made = found()
    best = min(alone(remat).estimate.step_time_us for remat in ("none", "dots", "full"))
    assert made.estimate.step_time_us <= best and "host" not in made.variant["remat"]
    assert made.estimate.step_time_us == pytest.approx(alone(made.variant["remat"]).estimate.step_time_us)


@pytest.mark.slow
def test_less_memory_keeps_less():
    """The search keeps named values if they fit with room to spare and the step is then faster than under `full`."""
    limit = 1.2 * peak("full")
    assert limit < peak("none")
    made = found(limit, offload="none")
    assert made.fits and "host" not in made.variant["remat"] and ":" in made.variant["remat"]
    assert made.estimate.step_time_us < alone("full").estimate.step_time_us


@pytest.mark.slow
def test_what_does_not_fit_otherwise_waits_on_the_host():
    assert peak("host:residual") < peak("full")
    limit = 0.5 * (peak("host:residual") + peak("full"))
    made = found(limit)
    assert made.fits and "host:residual" in made.variant["remat"]
    assert made.estimate.host_traffic_bytes > 0


@pytest.mark.slow
def test_without_offload_the_same_limit_is_too_small():
    limit = 0.5 * (peak("host:residual") + peak("full"))
    with pytest.raises(PlanError, match="the requested plan does not fit"):
        found(limit, offload="none")


@pytest.mark.slow
def test_requested_names_wait_on_the_host():
    remat = found(offload="decoder_layer_input").variant["remat"]
    assert remat.startswith("host:residual") and "+" not in remat.partition(" ")[0]
    with pytest.raises(PlanError, match="offload names mlp_out, which no backward pass of a layer reads"):
        found(offload="residual+mlp_out")


@pytest.mark.slow
def test_an_unknown_bandwidth_of_the_host_moves_nothing():
    """On CPU devices the memory of the host is that of the devices."""
    options = {"target": "cpu:8", "plan": "fsdp:8", "memory_limit_bytes": 10**12}
    search = workload_search(SMALL, options, microbatches=1)
    assert all("host" not in each["remat"] for each in search([]))


@pytest.mark.slow
def test_unstacked_layers_are_searched_as_stacked_ones():
    limit = 1.2 * peak("full")
    unrolled = found(limit, SMALL.with_(scan_layers=False), offload="none")
    assert unrolled.fits and "host" not in unrolled.variant["remat"] and ":" in unrolled.variant["remat"]


@pytest.mark.parametrize(
    ("model", "how", "said"),
    [
        ("gpt-tiny", {"offload": "residul"}, "'residul' is not a named value. Give none, auto, optimizer, or names"),
        (
            "gpt-tiny",
            {"offload": "qkv", "remat": "full"},
            "offload is 'qkv' and remat is 'full'; both say what a layer",
        ),
        (
            "wide-resnet-tiny",
            {"offload": "residual+optimizer"},
            "the layers of wide-resnet-tiny have no named values. Give auto, none or optimizer",
        ),
        ("gpt-tiny", {"offload": "residual@1:"}, "the 2 layers are one scan"),
        ("gpt-tiny", {"offload": "residual@1:"}, "or write the layers out with --set scan_layers=False"),
    ],
)
def test_bad_requests(model, how, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        workload_search(workload(model), {}, **how)


def test_a_requested_plan_that_is_not_possible_is_an_error_that_says_why():
    options: dict[str, Any] = {"target": "v5e:2x4", "plan": "ep:8"}
    with pytest.raises(PlanError, match="ep"):
        plan(*workload_variants(SMALL), **options, variants=workload_search(SMALL, options), donate_argnums=0)


def test_the_search_takes_the_words_of_a_plan():
    """`gather` and `overlap` apply to all variants. A path that does not exist is an error."""
    step, *shapes = workload_step(workload("llama-7b").with_(remat="full"))
    of = partial(StrategyPrices, step, tuple(shapes), target="v5e:2x4", donate_argnums=(0,))
    choices: list[dict[str, Any]] = [{}, {"gather": "prefetch"}, {"overlap": {"*": {"gather": "off"}}}]
    usual, early, alone = (of(**words).of(["fsdp:8"])["fsdp:8"] for words in choices)
    assert early.peak_memory_bytes > usual.peak_memory_bytes
    assert alone.step_time_us > usual.step_time_us
    options: dict[str, Any] = {"target": "v5e:2x4", "overlap": {"*no": {"gather": "off"}}}
    with pytest.raises(PlanError, match="'\\*no' names no parameter"):
        plan(*workload_variants(SMALL), **options, variants=workload_search(SMALL, options), donate_argnums=0)


def test_prices_are_those_of_plans():
    step, *shapes = workload_step(SMALL.with_(remat="host:residual"))
    prices = StrategyPrices(step, tuple(shapes), target="v5e:2x4", donate_argnums=(0,)).of(["fsdp:8", "ep:8"])
    estimate = alone("host:residual").estimate
    assert list(prices) == ["fsdp:8"]
    assert prices["fsdp:8"].step_time_us == pytest.approx(estimate.step_time_us)
    assert prices["fsdp:8"].peak_memory_bytes == pytest.approx(estimate.peak_memory_bytes)
    assert prices["fsdp:8"].host_traffic_bytes == pytest.approx(estimate.host_traffic_bytes)


def test_prices_with_the_state_of_the_optimizer_on_the_host_are_those_of_plans():
    step, *shapes = workload_step(SMALL.with_(remat="host:residual"))
    words: Any = {"offload": ("optimizer",), "kernels": "auto"}
    found = StrategyPrices(step, tuple(shapes), target="v5e:2x4", donate_argnums=(0,), **words).of(["fsdp:8"])["fsdp:8"]
    estimate = plan(step, *shapes, **OPTIONS, memory_limit_bytes=10**12, donate_argnums=0, **words).estimate
    assert found.step_time_us == pytest.approx(estimate.step_time_us)
    assert found.peak_memory_bytes == pytest.approx(estimate.peak_memory_bytes)
    assert found.host_traffic_bytes == pytest.approx(estimate.host_traffic_bytes)
    alone = StrategyPrices(*(workload_step(SMALL.with_(remat="full"))[0], tuple(shapes)), target="v5e:2x4",
                           donate_argnums=(0,), **words).of(["fsdp:8"])["fsdp:8"]  # fmt: skip
    without = StrategyPrices(step, tuple(shapes), target="v5e:2x4", donate_argnums=(0,)).of(["fsdp:8"])["fsdp:8"]
    layers = found.beyond(alone)
    assert layers.host_traffic_bytes == pytest.approx(without.host_traffic_bytes) and without.host_traffic_bytes > 0
    assert layers.host_bytes < found.host_bytes and found.beyond(found).host_traffic_bytes == 0


@pytest.mark.slow
def test_the_state_of_the_optimizer_is_on_the_host_in_every_variant():
    """Under a limit that is too small otherwise. The layers keep what then fits."""
    limit = 0.9 * min(peak(remat) for remat in ("none", "full", "host:residual"))
    words = {"offload": ("optimizer",)}
    search = workload_search(SMALL, {**OPTIONS, "memory_limit_bytes": int(limit), **words}, offload="optimizer")
    options: dict[str, Any] = {**OPTIONS, "memory_limit_bytes": int(limit), **words}
    made = plan(*workload_variants(SMALL), **options, variants=search, donate_argnums=0)
    assert made.fits and set(made.offload) == {"optimizer"} and "host" not in made.variant["remat"]


def test_the_state_of_the_optimizer_does_not_count_as_a_value_of_a_layer():
    """It moves in every variant, so the traffic of the host says nothing about a name."""
    words = {"offload": ("optimizer",)}
    search = workload_search(SMALL, {**OPTIONS, **words}, offload="mlp_out+optimizer", microbatches=1)
    with pytest.raises(PlanError, match="offload names mlp_out, which no backward pass of a layer reads"):
        search([])


def test_specified_prices_name_the_way_of_attention():
    """A search prices `cp` without a way, and a request for it takes the fastest one: the difference is no saving."""
    step, *shapes = workload_step(SMALL.with_(context=4096, batch_size=2, attention="auto", remat="full"))
    prices = StrategyPrices(step, tuple(shapes), target="v5e:2x4", donate_argnums=(0,))
    [(words, price)] = prices.specified(["dp:2 cp:4"]).items()
    assert "cp:" not in words
    assert prices.of([words])[words] == price == prices.of(["dp:2 cp:4"])["dp:2 cp:4"]


@pytest.mark.slow
def test_no_variant_is_traced_twice(monkeypatch):
    """`full` is priced under more strategies, which other numbers of microbatches suggest, without a new trace."""
    monkeypatch.setattr(remat_search.constants, "SCREENED_STRATEGIES", 1)
    made: list[tuple[str, int]] = []
    step = workload_steps(SMALL.with_(scan_layers=True))

    def counted(remat: str, microbatches: int) -> tuple[Any, ...]:
        made.append((remat, microbatches))
        return step(remat, microbatches)

    space = RematSpace(counted, ["residual"], SMALL.config.layers, [1, 2], options={"target": "v5e:2x4"})
    assert promising(space)
    assert sorted(made) == sorted({*made}) and {("full", 1), ("full", 2), ("host:residual", 1)} <= {*made}


def check_additive_times(work: Any, options: dict[str, Any], tolerance: float, *remats: str) -> None:
    """Compares the additive times of choices that keep values with their prices."""
    space = RematSpace(workload_steps(work), tuple(NAMED_VALUES), work.config.layers, [1], options=options)
    probes = remat_search._Probes(space)
    strategy = probes.strategies[0]
    guesses = {each.remat: each.time_us for each in probes._pure(1, strategy)}
    for remat in remats:
        price_us = probes.prices(remat, 1).of([strategy])[strategy].step_time_us
        assert guesses[remat] == pytest.approx(price_us, rel=tolerance), remat
        assert price_us != pytest.approx(guesses["full"], rel=4 * tolerance), f"{remat} changes too little"


def test_additive_times_of_kept_values_are_their_prices():
    """Values are probed on the host. A kept value needs no transfer, and so no copies to and from it."""
    work = SMALL.with_(width=1024, heads=8, ffn=4096)
    remats = "keep:qkv", "keep:mlp_in", "keep:qkv+mlp_in"
    check_additive_times(work, {"target": "v5e:1x1", "memory_limit_bytes": 10**12}, 1e-3, *remats)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "target"), [("gpt-1.3b", "v5e:4x4"), ("llama-7b", "v5p:4x4x4")])
def test_additive_times_of_large_models_are_close(model, target):
    """Sums are too high only where two kept values also spare a kernel that both passes share."""
    remats = "keep:qkv+mlp_in", "keep:qkv+out_proj+mlp_in", "keep:qkv+context+out_proj+mlp_in"
    check_additive_times(workload(model), {"target": target}, 2.5e-3, *remats)


def test_what_mixes_add_to_the_memory_says_nothing_about_single_policies():
    guesses = Guesses(limit=100.0, host_limit=math.inf)
    guesses.learn(Priced("host:qkv,full", 1, 1.0, 95.0), Priced("host:qkv,full", 1, 1.0, 110.0))
    assert guesses.fits(Priced("host:qkv", 1, 1.0, 95.0))
    assert not guesses.fits(Priced("host:qkv,full,full,full", 1, 1.0, 90.0))


def test_variants_that_fit_only_under_slower_strategies_do_not_end_the_pricing():
    """Under the fast strategy, two variants need more memory than guessed. A third one fits, and is the fastest."""
    needed = {"keep:qkv": 105.0, "keep:context": 105.0, "keep:mlp_in": 90.0}
    tried: list[str] = []

    def priced(remat: str, microbatches: int) -> Any:
        tried.append(remat)
        return {"fast": StrategyPrice(8.0, needed[remat]), "slow": StrategyPrice(9.9, 60.0)}

    probes: Any = SimpleNamespace(
        limit=100.0, usable_bytes=100.0, host_limit=math.inf, offloads=False, priced=priced,
        space=SimpleNamespace(host=()), strategies=["fast", "slow"],
        known=lambda: [Priced("full", 1, 10.0, 50.0)],
        estimated=lambda: [
            Priced(remat, 1, time, peak, strategy="fast")
            for remat, time, peak in (("keep:qkv", 7.9, 99.0), ("keep:context", 8.0, 90.0), ("keep:mlp_in", 8.1, 80.0))
        ],
    )  # fmt: skip
    probes.best = partial(remat_search._Probes.best, probes)
    fitting, _ = remat_search._best_priced(probes)
    assert tried == ["keep:qkv", "keep:context", "keep:mlp_in"]
    assert min(fitting, key=lambda each: each.time_us) == Priced("keep:mlp_in", 1, 8.0, 90.0, usable_bytes=100.0)


def priced_in_turn(needed: dict[str, tuple[float, float, float]]) -> tuple[list[str], str]:
    """Return the priced variants, and the best one. `needed` has the time, guessed peak and true peak of each."""
    tried: list[str] = []

    def priced(remat: str, microbatches: int) -> Any:
        tried.append(remat)
        time, _, peak = needed[remat]
        return {"fsdp:8": StrategyPrice(time, peak)}

    probes: Any = SimpleNamespace(
        limit=100.0, usable_bytes=100.0, host_limit=math.inf, offloads=False, strategies=["fsdp:8"], priced=priced,
        space=SimpleNamespace(host=()),
        known=lambda: [Priced("full", 1, 10.0, 50.0)],
        estimated=lambda: [
            Priced(remat, 1, time, guessed, usable_bytes=100.0, strategy="fsdp:8")
            for remat, (time, guessed, _) in needed.items()
        ],
    )  # fmt: skip
    probes.best = partial(remat_search._Probes.best, probes)
    fitting, _ = remat_search._best_priced(probes)
    return tried, min(fitting, key=lambda each: each.score_us).remat


def test_variants_that_almost_fill_the_memory_do_not_end_the_pricing():
    """The first two variants almost fill the memory, so the third one is priced, too."""
    needed = {"keep:qkv": (7.0, 99.0, 99.0), "keep:context": (7.0, 99.0, 99.0), "keep:mlp_in": (7.46, 70.0, 70.0)}
    assert priced_in_turn(needed) == ([*needed], "keep:qkv")


def test_a_variant_that_just_fits_does_not_rule_out_others():
    """The first variant fits, but needs 17 bytes more than guessed. The second one would not fit with 17 bytes more."""
    tried, best = priced_in_turn({"keep:qkv": (7.9, 80.0, 97.0), "keep:context": (8.0, 88.5, 88.5)})
    assert (len(tried), best) == (2, "keep:context")


def test_guesses_that_do_not_fit_the_host_are_not_tried():
    """The search skips a choice that exceeds the host's memory, and takes the fastest one that fits."""
    guesses = Guesses(limit=100.0, host_limit=50.0)
    large, small = (Priced("host:qkv", 1, time, 60.0, host_bytes=size) for time, size in ((1.0, 60.0), (2.0, 40.0)))
    lean = Priced("host:residual", 1, 3.0, 20.0, host_bytes=90.0)
    assert guesses.best([large, small, lean]) == small
    guesses.learn(small, replace(small, peak_bytes=math.inf, host_bytes=60.0))
    assert not guesses.fits(small) and guesses.fits(replace(small, host_bytes=30.0))


@pytest.mark.slow
def test_a_small_host_gets_what_it_holds(monkeypatch):
    """The host is too small for the fastest choices. It can hold a slower choice, which offloads fewer values."""
    moved = alone("host:residual").estimate.host_memory_bytes
    limit = 0.5 * (peak("host:residual") + peak("full"))
    memory = 1.05 * moved / HOST_MEMORY_SHARE
    small = replace(CHIPS["v5e"], host_memory_bytes=memory, host_bandwidth=1e13)  # the more is offloaded, the faster
    monkeypatch.setitem(CHIPS, "v5e", small)
    monkeypatch.setattr(remat_search.constants, "MOST_PRICED", 2)
    options: dict[str, Any] = {**OPTIONS, "memory_limit_bytes": int(limit)}
    first, *_ = workload_search(SMALL, options, microbatches=1)([])
    found = plan(*workload_step(SMALL.with_(remat=first["remat"]), 1), **options, donate_argnums=0)
    assert found.fits and 0 < found.estimate.host_memory_bytes <= 1.05 * moved


@pytest.mark.slow
def test_the_chosen_policy_has_the_results_of_one_device():
    """Under a limit that only values on the host meet: losses, gradients and parameters of two steps."""
    made = found(0.5 * (peak("host:residual") + peak("full")))
    assert "host:" in made.variant["remat"]
    assert_close(trained("none", None), trained(made.variant["remat"], made.chosen))


def trained(remat: str, strategy: str | None) -> Any:
    """Trains two steps, under a strategy or on one device. The state of the optimizer holds the gradients."""
    work = SMALL.with_(remat=remat, context=32)
    optimizer = optax.chain(optax.trace(decay=0.0), optax.scale(-0.1))
    program = make_program(work.build, optimizer)
    step: Any = make_train_step(program, optax.constant_schedule(0.1))
    step = jax.jit(step) if strategy is None else auto_shard(step, plan=strategy)
    state, kept = program.create_state(jax.random.key(0)), []
    tokens = np.random.default_rng(0).integers(0, 128, (16, 33)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((16, 32), np.float32)}
    for _ in range(2):
        state, metrics = step(state, batch)
        kept.append(jax.device_get((state.opt_state, state.params, metrics)))
    return kept


@pytest.mark.parametrize("light", ["host:qkv", "none"])
def test_layers_that_offload_come_last_in_a_mix(light):
    """A loop sends a value until its next iteration computes it again: the later in the body, the longer."""
    pure = [Priced(light, 1, 10.0, 100.0, host_bytes=9.0 * light.startswith("host")), Priced("full", 1, 14.0, 20.0)]
    probes: Any = SimpleNamespace(space=SimpleNamespace(layers=80), limit=50.0, usable_bytes=50.0)
    found = [each.remat for each in remat_search._Probes._mixes(probes, pure)]
    parts: Any = SimpleNamespace(price_mix=lambda *_: (1.0, 1.0, 1.0), host_bytes=lambda *_: 9.0, microbatches=1)
    probes = SimpleNamespace(space=SimpleNamespace(layers=80))
    partly = [each.remat for each in remat_search._Probes._partly_offloaded(probes, parts, Choice(host=("qkv",)))]
    assert {"full,host:qkv", "full,full,full,host:qkv", "full,host:qkv,host:qkv,host:qkv"} == {*partly}
    assert {each.split(",")[0] for each in found} == {"full" if light.startswith("host") else "none"}


def test_mixes_are_made_of_policies_for_all_layers():
    """A mix of mixes would have groups of layers that do not divide their number."""
    pure = [
        Priced("none", 1, 10.0, 100.0),
        Priced("host:qkv,full", 1, 11.0, 60.0, host_bytes=9.0),
        Priced("host:qkv,host:qkv,full", 1, 12.0, 40.0, host_bytes=9.0),
        Priced("full", 1, 14.0, 20.0),
    ]
    probes: Any = SimpleNamespace(space=SimpleNamespace(layers=80), limit=50.0, usable_bytes=50.0)
    found = remat_search._Probes._mixes(probes, pure)
    assert found and all(80 % len(each.remat.split(",")) == 0 for each in found)
    assert {name for each in found for name in each.remat.split(",")} == {"none", "full"}
