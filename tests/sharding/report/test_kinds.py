"""The best plan of each kind: as data, and in the text of a plan."""

import jax
import jax.numpy as jnp

from autoshard import plan
from autoshard.models import workload
from autoshard.sharding.search.constants import KIND_ERROR
from autoshard.sharding.search.strategy_kinds import kind_of
from autoshard.train.program.build import workload_step


def planned(rows, **options):
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])

    w = {"a": jax.ShapeDtypeStruct((256, 1024), "float32"), "b": jax.ShapeDtypeStruct((1024, 256), "float32")}
    return plan(jax.grad(loss), w, jax.ShapeDtypeStruct((rows, 256), "float32"), target="v5e:2x4", **options)


def test_each_kind_has_its_fastest_plan_that_fits():
    made = planned(4096)
    found = made.best_of_kinds()
    assert {"dp", "fsdp", "tp"} <= found.keys() and next(iter(found)) == kind_of(made.chosen)
    for kind, best in found.items():
        same = [c for c in made.candidates if kind_of(c[0]) == kind]
        assert (best.strategy, best.step_time_us, best.peak_bytes) == min(same, key=lambda c: c[1])
        assert best.ratio == best.step_time_us / made.estimate.step_time_us >= 1
    again = planned(4096, plan=found["tp"].strategy)
    assert again.estimate.step_time_us == found["tp"].step_time_us


def test_plans_over_the_limit_are_left_out():
    made = planned(4096)
    least = min(best.peak_bytes for best in made.best_of_kinds().values())
    lean = planned(4096, memory_limit_bytes=least * 1.01)
    assert 0 < len(lean.best_of_kinds()) < len(made.best_of_kinds())


def test_the_text_names_the_other_kinds_and_those_too_close_to_call():
    made = planned(4096)
    text, (first, *others) = str(made), made.best_of_kinds().values()
    assert f"fastest of other kinds: {kind_of(others[0].strategy)} {others[0].strategy} " in text
    close = [kind for kind, best in made.best_of_kinds().items() if best != first and best.ratio <= 1 + KIND_ERROR]
    assert (f"closer than the estimate's error of 11 %: {', '.join(close)}; verify='auto' decides" in text) == bool(
        close
    )


def test_a_requested_plan_has_no_other_kinds():
    made = planned(4096, plan="fsdp:8")
    assert list(made.best_of_kinds()) == ["fsdp"] and "other kinds" not in str(made)


def test_changed_plans_that_the_search_rejects_are_left_out():
    """Repeated work would be faster by the estimate for a model this small."""
    step, state, batch = workload_step(workload("gpt-tiny").with_(batch_size=16))
    made = plan(step, state, batch, target="h100:8", donate_argnums=0)
    faster = [each for each in made.history[0].tried if each.step_time_us < 0.9 * made.estimate.step_time_us]
    assert faster and all(each.changed for each in faster)
    assert all(best.ratio >= 1 for best in made.best_of_kinds().values())
