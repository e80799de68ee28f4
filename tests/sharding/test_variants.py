"""Variants of a program: which is chosen, what is said of the others, and which of them are compiled."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import AutoshardWarning, Plan, plan
from autoshard.commands import plan as command
from autoshard.errors import AutoshardError
from autoshard.models.workloads import workload
from autoshard.sharding import aot
from autoshard.train.build import variants_of, workload_step, workload_variants

TINY = workload("gpt-tiny").with_(batch_size=64)


def tiny(**options: Any) -> Plan:
    """The plan of a tiny workload, over its variants."""
    given: dict[str, Any] = {"target": "cpu:8", "variants": variants_of(TINY), "donate_argnums": 0} | options
    return plan(*workload_variants(TINY), **given)


def test_the_fastest_variant_that_fits_is_chosen():
    made = tiny()
    assert len(made.variants) == 9
    times = {tuple(v.values()): (peak > made.limit_bytes, us) for v, _, us, peak in made.variants}
    assert times[tuple(made.variant.values())] == min(times.values())
    alone = plan(*workload_step(TINY.with_(remat="full"), 2), target="cpu:8", donate_argnums=0)
    assert times["full", 2] == (False, pytest.approx(alone.estimate.step_time_us))


def test_less_memory_takes_another_variant():
    peaks = {tuple(v.values()): peak for v, _, _, peak in tiny().variants}
    limit = (min(peaks.values()) + sorted(peaks.values())[1]) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoshardWarning)  # what does not fit is not complained of: something does
        made = tiny(memory_limit_bytes=limit)
    assert made.fits and peaks[tuple(made.variant.values())] == min(peaks.values())


def test_the_text_and_the_json_tell_the_variant():
    made = tiny()
    chosen = ", ".join(f"{name}={value}" for name, value in made.variant.items())
    assert f"variant: {chosen}, of 9" in str(made) and "next best variants: " in str(made)
    again = Plan.from_json(made.to_json())
    assert (again.variant, again.variants) == (made.variant, made.variants)
    assert "variant" not in str(plan(*workload_step(TINY), target="cpu:8", donate_argnums=0))


def test_the_best_candidates_of_all_variants_are_compiled(monkeypatch):
    class Audit:
        ok, peak_bytes, kind, message = True, 0, "ok", ""

        def __init__(self, made: Plan):
            self.step_time_us = 1.0 if made.variant["remat"] == "none" else 2.0

    asked = []
    monkeypatch.setattr(aot, "verify", lambda made: asked.append((made.variant, made.chosen)) or Audit(made))
    made = tiny(verify=4, variants=variants_of(TINY) | {"accumulation": [1]})
    assert len(asked) == 4 == len({(*variant.values(), words) for variant, words in asked})
    assert made.variant["remat"] == ("none" if any(v["remat"] == "none" for v, _ in asked) else asked[0][0]["remat"])
    assert len(made.audits) == 4 and made.notes[-1].startswith("the fastest of 4 compiled for cpu:8: ")
    ranked = sorted(us for _, _, us, _ in tiny(variants=variants_of(TINY) | {"accumulation": [1]}).variants)
    assert made.estimate.step_time_us >= ranked[0]


def test_a_variant_can_be_called():
    """What is run is the variant that was chosen."""

    def fn(x, *, times):
        return jnp.tanh(x) * times

    made = plan(fn, jax.ShapeDtypeStruct((8, 4), "float32"), target="cpu:8", variants={"times": [3]})
    assert float(made.jit()(jnp.ones((8, 4)))[0, 0]) == pytest.approx(3 * float(jnp.tanh(1.0)))


def test_what_changes_numbers_is_no_variant():
    for name in ("moe-tiny", "mixtral-tiny", "wide-resnet-tiny"):
        assert variants_of(workload(name))["accumulation"] == [1]
    assert variants_of(workload("gpt-tiny").with_(batch_size=6))["accumulation"] == [1, 2]


def test_the_command_searches_what_is_not_given(capsys):
    assert command.run(["gpt-tiny", "--target", "cpu:8"]) == 0
    assert ", of 9" in capsys.readouterr().out
    assert command.run(["gpt-tiny", "--target", "cpu:8", "--remat", "dots", "--accumulation", "2"]) == 0
    assert "variant: remat=dots, accumulation=2, of 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match="remat is 'some'"):
        command.run(["gpt-tiny", "--target", "cpu:8", "--remat", "some"])
    with pytest.raises(AutoshardError, match="does not divide into 3"):
        command.run(["gpt-tiny", "--target", "cpu:8", "--accumulation", "3"])
