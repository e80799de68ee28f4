"""Variants of a step: which is chosen, how the others are reported, and which of them are compiled."""

import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import AutoshardWarning, Plan, plan
from autoshard.commands import plan as command
from autoshard.errors import AutoshardError, ConfigError, PlanError
from autoshard.models.workloads import workload
from autoshard.sharding.autotune import compiled_time
from autoshard.sharding.autotune.selection import requested_selection
from autoshard.sharding.planner.shortlist import without_near_duplicates
from autoshard.train.program.build import variant_search, workload_step, workload_variant_values, workload_variants

TINY = workload("gpt-tiny").with_(batch_size=64)
POLICIES = workload_variant_values(TINY) | {"microbatches": [1]}


def tiny(**options: Any) -> Plan:
    """The plan of a tiny workload over variants, by default those that differ in remat policy alone."""
    given: dict[str, Any] = {"target": "cpu:8", "variants": POLICIES, "donate_argnums": 0} | options
    return plan(*workload_variants(TINY), **given)


@cache
def over_all_variants() -> Plan:
    return tiny(variants=workload_variant_values(TINY))


@pytest.mark.slow
def test_the_fastest_variant_that_fits_is_chosen():
    made = over_all_variants()
    assert len(made.variants) == 9
    times = {tuple(v.values()): (peak > made.limit_bytes, us) for v, _, us, peak in made.variants}
    assert times[tuple(made.variant.values())] == min(times.values())
    alone = plan(*workload_step(TINY.with_(remat="full"), 2), target="cpu:8", donate_argnums=0)
    assert times["full", 2] == (False, pytest.approx(alone.estimate.step_time_us))


@pytest.mark.slow
def test_less_memory_takes_another_variant():
    peaks = {tuple(v.values()): peak for v, _, _, peak in over_all_variants().variants}
    limit = (min(peaks.values()) + sorted(peaks.values())[1]) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoshardWarning)  # another variant fits, so no warning
        made = tiny(variants=workload_variant_values(TINY), memory_limit_bytes=limit)
    assert made.fits and peaks[tuple(made.variant.values())] == min(peaks.values())


def test_a_function_returns_the_variants_to_try_next():
    """It gets the attempts so far. A variant that was tried is not tried again."""
    asked: list[list[tuple[Any, bool]]] = []

    def following(attempts):
        asked.append([(each.keywords["remat"], each.step_time_us > 0 and each.fits) for each in attempts])
        return [{"remat": "full", "microbatches": 1}, *([{"remat": "dots", "microbatches": 1}] if attempts else [])]

    made = tiny(variants=following)
    assert asked == [[], [("full", True)], [("full", True), ("dots", True)]]
    assert [v["remat"] for v, *_ in made.variants] == ["full", "dots"] and made.variant["remat"] == "dots"
    for wrong, said in (
        (object(), "variants is <object object at"),
        (lambda attempts: {"remat": "full"}, "variants returned {'remat': 'full'}: return a list"),
        (lambda attempts: None, "variants returned None: return a list"),
        (lambda attempts: [{"rematt": "full"}], "has no parameter 'rematt'; it has"),
        ({"remat": "full"}, "variants: 'remat' is 'full'; give a list of its values, such as {'remat': ['full']}"),
        ({5: ["full"]}, "variants: 5 is not a keyword"),
    ):
        with pytest.raises(PlanError, match=re.escape(said)):
            tiny(variants=wrong)
    with pytest.raises(PlanError, match="variants gives no variant to try"):
        tiny(variants=lambda attempts: [])


def test_a_function_cannot_change_the_attempts():
    def following(attempts):
        for each in attempts:
            each.keywords["remat"] = "none"
        return [{"remat": "full", "microbatches": 1}]

    assert [v["remat"] for v, *_ in tiny(variants=following).variants] == ["full"]


@pytest.mark.slow
def test_as_many_layers_as_fit_use_the_lighter_policy():
    """Where one policy does not fit and the next does, policies that layers take in turn are searched."""
    work = workload("gpt-350m")
    search = variant_search({"remat": ["none", "dots", "full"], "microbatches": [1]}, work.config.layers)

    def found(limit: int | None = None) -> Plan:
        return plan(*workload_variants(work), target="v5e:2x4", plan="fsdp:8", variants=search,
                    memory_limit_bytes=limit, donate_argnums=0)  # fmt: skip

    peaks = {v["remat"]: peak for v, _, _, peak in found(10**11).variants}
    assert list(peaks) == ["none", "dots", "full"]
    for part, wanted in ((0.2, "full"), (0.35, "dots,full,full,full"), (0.6, "dots,full")):
        made = found(int(peaks["full"] + part * (peaks["dots"] - peaks["full"])))
        assert made.fits and made.variant["remat"] == wanted and len(made.variants) == 3 + ("," in wanted)


@pytest.mark.slow
def test_groups_of_layers_cost_what_single_layers_cost():
    """A loop over groups of layers has the collectives and the memory of a loop over layers."""
    one, two = (
        plan(*workload_step(workload("gpt-350m").with_(remat=remat)), target="v5e:2x4", plan="fsdp:8",
             donate_argnums=0)
        for remat in ("dots", "dots,dots")
    )  # fmt: skip
    assert two.estimate.comm_bytes == pytest.approx(one.estimate.comm_bytes, rel=1e-3)
    assert two.estimate.peak_memory_bytes == pytest.approx(one.estimate.peak_memory_bytes, rel=0.03)
    assert two.estimate.step_time_us == pytest.approx(one.estimate.step_time_us, rel=0.01)


def of_groups(taken: Callable[[jax.Array], Any] | None) -> Callable[..., Any]:
    """A step over eight layers: in groups of two, out of which `taken` takes the layers, or one by one."""

    def loss(stacks, x):
        def layer(x, up, down):
            return x + jnp.tanh(x @ up) @ down

        def body(x, group):
            if taken is None:
                return jax.checkpoint(layer)(x, *group), None
            for n in range(2):
                x = jax.checkpoint(lambda x, *each, n=n, of=taken: layer(x, *(of(w)[n] for w in each)))(x, *group)
            return x, None

        if taken is not None:
            stacks = [stack.reshape(4, 2, *stack.shape[1:]) for stack in stacks]
        return jnp.mean(jnp.square(jax.lax.scan(body, x, stacks)[0]))

    def step(stacks, x):
        value, grads = jax.value_and_grad(loss)(stacks, x)
        return jax.tree.map(lambda p, g: p - g, stacks, grads), value

    return step


def test_layers_can_be_taken_out_of_a_group_in_several_ways():
    """Each way of writing it has the collectives and the memory of a loop over layers."""
    stacks = [jax.ShapeDtypeStruct((8, 512, 2048), "float32"), jax.ShapeDtypeStruct((8, 2048, 512), "float32")]
    x = jax.ShapeDtypeStruct((1024, 512), "float32")
    ways = {"index": lambda a: a, "unstack": jnp.unstack, "split": lambda a: [part[0] for part in jnp.split(a, 2)]}
    found = {name: plan(of_groups(way), stacks, x, target="v5e:2x4", plan="fsdp:8") for name, way in ways.items()}
    alone = plan(of_groups(None), stacks, x, target="v5e:2x4", plan="fsdp:8").estimate
    for made in found.values():
        assert made.estimate.comm_bytes == pytest.approx(alone.comm_bytes, rel=1e-3)
        assert made.estimate.peak_memory_bytes == pytest.approx(alone.peak_memory_bytes, rel=0.45)


def test_near_duplicates_are_compiled_last():
    ranked = [(1.0, 5.0, "a"), (1.0005, 5.001, "a again"), (1.0006, 9.0, "b"), (1.2, 5.0, "c")]
    assert [name for *_, name in without_near_duplicates(ranked)] == ["a", "b", "c", "a again"]


def test_the_text_and_the_json_name_the_variant():
    made = tiny(variants={"remat": ["none", "full"], "microbatches": [1]})
    chosen = ", ".join(f"{name}={value}" for name, value in made.variant.items())
    assert f"variant: {chosen}, of 2" in str(made) and "next best variants: " in str(made)
    again = Plan.from_json(made.to_json())
    assert (again.variant, again.variants) == (made.variant, made.variants)
    assert "variant" not in str(plan(*workload_step(TINY), target="cpu:8", donate_argnums=0))


@pytest.mark.slow
def test_the_best_candidates_of_all_variants_are_compiled(monkeypatch):
    class Audit:
        ok, peak_bytes, kind, message, until = True, 0, "ok", "", "code"

        def __init__(self, made: Plan):
            self.step_time_us = 1.0 if made.variant["remat"] == "none" else 2.0

    asked = []

    def scheduled(executable):
        asked.append((executable.plan.variant, executable.plan.chosen))
        return Audit(executable.plan)

    monkeypatch.setattr(compiled_time, "scheduled", scheduled)
    made = tiny(verify=4)
    assert len(asked) == 4 == len({(*variant.values(), words) for variant, words in asked})
    assert made.variant["remat"] == ("none" if any(v["remat"] == "none" for v, _ in asked) else asked[0][0]["remat"])
    assert len(made.audits) == 4 and made.notes[-1].startswith("the fastest of 4 compiled for cpu:8: ")
    ranked = sorted(us for _, _, us, _ in tiny().variants)
    assert made.estimate.step_time_us >= ranked[0]


def test_candidates_slightly_over_the_limit():
    """The fastest that exceeds the limit by at most 25 %, and a faster one that exceeds it by at most 50 %."""
    options = {"verify": 2}, {"verify": 1}, {"measure": 2}
    asked, one, measured = (requested_selection(each, variants=False).shortlist for each in options)
    assert asked is not None and one is not None and measured is not None
    near, far, slow, huge = (8.0, 1.2, "near"), (7.0, 1.4, "far"), (8.5, 1.1, "slow"), (1.0, 1.6, "huge")
    assert asked.beyond([slow, near, far, huge], 1.0, 9.0) == [near, far]
    assert asked.beyond([slow, (6.0, 1.2, "near"), far], 1.0, 9.0) == [(6.0, 1.2, "near")]
    assert asked.beyond([slow, near, far], 1.0, 7.5) == [far]
    assert asked.beyond([slow, near, far], 2.0, 9.0) == []
    assert one.beyond([near, far], 1.0, 9.0) == measured.beyond([near, far], 1.0, 9.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [0.9, pytest.param(1.1, marks=pytest.mark.slow)])
def test_candidates_slightly_over_the_limit_are_compiled_too(monkeypatch, compiled):
    """XLA rematerializes what does not fit, so a faster variant may fit once compiled."""
    variants = {"remat": ["none", "full"], "microbatches": [1]}
    peaks = {choice["remat"]: peak for choice, _, _, peak in tiny(variants=variants).variants}
    limit = peaks["none"] / 1.1
    assert peaks["full"] < limit

    class Audit:
        message, until = "", "code"

        def __init__(self, made: Plan):
            part = 0.5 if made.fits else compiled
            self.ok, self.kind = part < 1, "ok" if part < 1 else "oom"
            self.peak_bytes, self.step_time_us = part * limit, made.estimate.step_time_us
            asked.append(made)

    asked: list[Plan] = []
    monkeypatch.setattr(compiled_time, "scheduled", lambda executable: Audit(executable.plan))
    made = tiny(verify=2, variants=variants, memory_limit_bytes=limit)
    assert [each.fits for each in asked] == [True, True, False]
    if compiled < 1:
        assert made.variant["remat"] == "none" and not made.fits and len(made.audits) == 3
        assert "XLA rematerializes what does not fit" in made.notes[-2]
        assert "as compiled, not by the estimate" in str(made)
    else:
        fastest = min(each.estimate.step_time_us for each in asked if each.fits)
        assert made.fits and made.estimate.step_time_us == fastest
        assert len(made.audits) == 2 and all(audit.ok for audit in made.audits)


def test_a_variant_can_be_called():
    """The plan runs the variant that was chosen."""

    def fn(x, *, times):
        return jnp.tanh(x) * times

    made = plan(fn, jax.ShapeDtypeStruct((8, 4), "float32"), target="cpu:8", variants={"times": [3]})
    assert float(made.jit()(jnp.ones((8, 4)))[0, 0]) == pytest.approx(3 * float(jnp.tanh(1.0)))


def test_variants_that_change_numbers_are_left_out():
    for name in ("moe-tiny", "mixtral-tiny", "wide-resnet-tiny"):
        assert workload_variant_values(workload(name))["microbatches"] == [1]
        assert workload_variant_values(workload(name), numerics=True)["microbatches"] == [1, 2, 4]
    assert workload_variant_values(workload("gpt-tiny").with_(batch_size=6))["microbatches"] == [1, 2]


@pytest.mark.slow
def test_the_command_searches_what_no_option_sets(capsys):
    tiny_model = ["gpt-tiny", "--target", "cpu:8"]
    assert command.run([*tiny_model, "--microbatches", "1"]) == command.run([*tiny_model, "--remat", "full"]) == 0
    searched, given = re.findall(", of [0-9]|, the only", capsys.readouterr().out)
    assert searched in (", the only", ", of 2") and given == ", of 3"  # the most promising policies; all microbatches
    assert command.run([*tiny_model, "--remat", "dots", "--microbatches", "2"]) == 0
    assert "variant: remat=dots, microbatches=2, the only one that was tried" in capsys.readouterr().out
    moe = ["moe-tiny", "--target", "cpu:8", "--remat", "full"]
    assert command.run(moe) == command.run([*moe, "--allow-numerics"]) == 0
    assert re.findall(", of [0-9]|, the only", capsys.readouterr().out) == [", the only", ", of 3"]
    one = ["gpt-tiny", "--target", "cpu:8", "--remat", "dots", "--microbatches", "1", "--plan", "fsdp:4 tp:2"]
    wish = ["--explain", "0/params/blocks/attention/wq=-,-,-,fsdp+tp"]
    assert command.run([*one, *wish, "--fixed", "*/w_up=-,tp,fsdp"]) == 0
    said = capsys.readouterr().out
    assert "wq: P(None, None, None, ('fsdp', 'tp')) instead of P(" in said
    assert re.search(r"w_up .* -> P\(None, 'tp', 'fsdp'\)|w_up .*fixed", said)
    with pytest.raises(ConfigError, match="has no sharding: write a path and the mesh axes of each dimension"):
        command.run(["gpt-tiny", "--target", "cpu:8", "--fixed", "*/w_up"])
    with pytest.raises(
        ConfigError, match="gpt-tiny: GPTConfig: remat is 'dots,full,dots'; 2 scanned layers .* groups of 3"
    ):
        command.run(["gpt-tiny", "--target", "cpu:8", "--remat", "dots,full,dots"])
    with pytest.raises(ConfigError, match="remat is 'some'"):
        command.run(["gpt-tiny", "--target", "cpu:8", "--remat", "some"])
    with pytest.raises(AutoshardError, match="does not divide into 3"):
        command.run(["gpt-tiny", "--target", "cpu:8", "--microbatches", "3"])
