"""The choice among option sets for a plan. The compiler is faked, except where the real one is marked."""

import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, plan
from autoshard.sharding.audit import Audit
from autoshard.sharding.planner.bound_plan import bound_or_error

compiled_options = importlib.import_module("autoshard.sharding.autotune.compiled_options")
LIMIT = 2.0**35


def step(params, x):
    def loss(params):
        def layer(h, w):
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def planned(target="v6e:2x4", words="fsdp:8", **options):
    params = {
        "up": jax.ShapeDtypeStruct((2, 256, 512), "float32"),
        "down": jax.ShapeDtypeStruct((2, 512, 256), "float32"),
    }
    return plan(step, params, jax.ShapeDtypeStruct((64, 256), "float32"), target=target, plan=words, **options)


def own_audit(made, us=100.0):
    return Audit("ok", step_time_us=us, peak_bytes=1e6, program="own", options=made.compiler_options["tpu"])


def choose(monkeypatch, made, outcomes):
    """The plan and the audit that are chosen if the set with this option has this outcome, and the sets' options."""
    tried = []

    def compile_under(executable, options, timeout_s, until):
        assert timeout_s > 0 and until == "code"
        tried.append(dict(options))
        found = next((audit for name, audit in outcomes.items() if name in options), None)
        return replace(found or Audit("ok", step_time_us=100.0, peak_bytes=1e6, program="own"), options=dict(options))

    monkeypatch.setattr(compiled_options, "verify_under", compile_under)
    bound, audit = compiled_options.fastest_options(bound_or_error(made.bound), own_audit(made), LIMIT)
    return bound.plan, audit, tried


def result(us, program="other", **more):
    return Audit("ok", step_time_us=us, peak_bytes=1e6, program=program, **more)


VMEM = "xla_tpu_scoped_vmem_limit_kib"
LAYOUT = "xla_tpu_assign_all_reduce_scatter_layout"
FUSE = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"


def test_the_fastest_set_is_kept(monkeypatch):
    made = planned()
    best, audit, tried = choose(monkeypatch, made, {LAYOUT: result(80.0), FUSE: result(90.0)})
    assert best.compiler_options["tpu"][LAYOUT] == "true" and FUSE not in best.compiler_options["tpu"]
    assert audit.step_time_us == 80.0 and len(tried) == 2
    (note,) = best.notes[len(made.notes) :]
    assert note.startswith("compiler options, compiled for v6e:2x4: plan's own 100 us; ")
    assert "; reduction-layout 80.0 us (0.80x), chosen; gather-fusion 90.0 us (0.90" in note


def test_a_set_that_changes_nothing_is_named(monkeypatch):
    best, _, _ = choose(monkeypatch, planned(), {FUSE: result(90.0)})
    assert "; reduction-layout changes nothing in the compiled program; gather-fusion 90.0 us (0.90" in best.notes[-1]


def test_the_default_sets_are_not_tried_again(monkeypatch):
    _, _, tried = choose(monkeypatch, planned(), {})
    assert len(tried) == 2 and {options[VMEM] for options in tried} == {"98304"}


def test_chosen_options_reach_json_and_the_next_audit(monkeypatch):
    best, _, _ = choose(monkeypatch, planned(), {LAYOUT: result(80.0)})
    again = Plan.from_json(
        Plan.of(bound_or_error(planned().bound).where(compiler_options=best.compiler_options)).to_json()
    )
    assert again.compiler_options == best.compiler_options
    assert "reduction-layout" in str(again)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (result(99.9), "reduction-layout"),  # too small a gain
        (result(110.0), "1.10x"),
        (replace(result(50.0), peak_bytes=2 * LIMIT), "does not fit"),
        (Audit("error", "no such luck"), "reduction-layout does not compile (error: no such luck)"),
        (Audit("oom"), "reduction-layout does not compile (oom)"),
    ],
)
def test_a_set_that_does_not_pay_is_not_kept(monkeypatch, outcome, words):
    made = planned()
    best, audit, _ = choose(monkeypatch, made, {LAYOUT: outcome})
    assert best.compiler_options == made.compiler_options and audit.program == "own"
    assert words in best.notes[-1] and "chosen" not in best.notes[-1]


def test_options_that_the_compiler_refuses_are_left_out_and_named(monkeypatch):
    best, _, _ = choose(monkeypatch, planned(), {LAYOUT: result(80.0, dropped=("xla_tpu_new",))})
    assert "without xla_tpu_new, unknown to this compiler" in best.notes[-1]
    fused, _, _ = choose(monkeypatch, planned(), {FUSE: result(80.0, dropped=(FUSE,))})
    assert FUSE not in fused.compiler_options["tpu"]


def test_no_more_sets_are_compiled_than_the_limit(monkeypatch):
    monkeypatch.setattr(compiled_options, "MOST_OPTION_SETS", 1)
    best, _, tried = choose(monkeypatch, planned(), {})
    assert len(tried) == 1
    assert best.notes[-1].startswith("option sets that were not tried: gather-fusion")


def test_machines_without_sets_are_left_alone(monkeypatch):
    bound = bound_or_error(planned("cpu:8").bound)
    own = Audit("ok", step_time_us=1.0)
    assert compiled_options.fastest_options(bound, own, LIMIT) == (bound, own)


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_the_best_of_the_sets_of_a_tpu_is_kept():
    made = planned("v6e:2x2", "fsdp:4", verify=1)
    note = next(note for note in made.notes if note.startswith("compiler options, by schedules for v6e:2x2"))
    assert "gather-fusion" in note and "reduction-layout" in note and "scoped-vmem" not in note
    (audit,) = made.audits
    assert audit.ok and {**made.compiler_options["tpu"]} == {**audit.options}
    assert ("chosen" in note) == (made.compiler_options != planned("v6e:2x2", "fsdp:4").compiler_options)
