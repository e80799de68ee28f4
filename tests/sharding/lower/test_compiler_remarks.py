"""XLA's remarks do not reach the terminal, all other lines do, and remarks that cost something are one warning."""

import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import AutoshardWarning
from autoshard.sharding.lower import activation_spread, compiler_remarks
from autoshard.sharding.lower.compiler_remarks import kept_remarks, remarks_text
from tests.sharding.programs import LOSS_LINE, assert_close, batch, mlp_state, sgd_step

REMARK = (
    "W1125 00:35:48.133936 9728 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler "
    "cannot go from sharding {{devices=[{n},1]<=[{n}]}} to {{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}} "
    'efficiently for HLO operation %a = f32[32,512]{{1,0}} add(), metadata={{op_name="{op}"}}. As the last resort'
)


@pytest.fixture(autouse=True)
def no_stored_programs():
    """Writes nothing to the compilation cache. XLA makes no remarks on a program that is read from it."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


@pytest.fixture
def resharding_at_once(monkeypatch):
    """Leaves out the shardings in between. XLA makes remarks where it moves and gathers mesh axes at once."""
    monkeypatch.setattr(activation_spread, "reshard_path", lambda before, after: [after])


def lines_written_to(capfd) -> list[str]:
    return capfd.readouterr().err.splitlines()


def test_a_planned_call_reports_remarks_in_one_warning(capfd, monkeypatch, resharding_at_once):
    monkeypatch.setattr(compiler_remarks, "LEAST_REMARK_BYTES", 1)
    step = autoshard.auto_shard(sgd_step, plan="dp:2 tp:4", fixed={"params/w": P(("tp", "dp"))})
    with pytest.warns(AutoshardWarning, match="involuntary full rematerialization") as caught:
        new, _ = step(mlp_state(), batch())
    (warning,) = [str(w.message) for w in caught if "rematerialization" in str(w.message)]
    assert "makes 1 array whole" in warning and "28.0 KiB for shards f32[8,128] at params/w" in warning
    assert caught[0].filename == __file__
    assert not [line for line in lines_written_to(capfd) if "rematerialization" in line]
    assert_close(new, sgd_step(mlp_state(), batch())[0])
    step(new, batch())  # no further warning


def test_resharding_in_steps_leaves_nothing_to_remark(monkeypatch):
    monkeypatch.setattr(compiler_remarks, "LEAST_REMARK_BYTES", 1)
    step = autoshard.auto_shard(sgd_step, plan="dp:2 tp:4", fixed={"params/w": P(("tp", "dp"))})
    new, _ = step(mlp_state(), batch())  # without a warning, which would be an error
    assert_close(new, sgd_step(mlp_state(), batch())[0])


def test_other_lines_appear_in_their_order(capfd):
    with kept_remarks() as remarks:
        os.write(2, b"first\n")
        os.write(2, b"W1125 a warning")
        os.write(2, f" of XLA\n{REMARK.format(n=8, op='')}\nsecond\n".encode())
        os.write(2, b"no end")
    assert len(remarks) == 1 and "Involuntary" in remarks[0]
    os.write(2, b"\nlast\n")
    assert lines_written_to(capfd) == ["first", "W1125 a warning of XLA", "second", "no end", "last"]


def test_nested_contexts_share_one_redirection(capfd):
    before = os.fstat(2)
    with kept_remarks() as outer, kept_remarks() as inner:
        os.write(2, f"{REMARK.format(n=8, op='')}\n".encode())
    assert (len(outer), len(inner)) == (1, 0) and os.path.samestat(before, os.fstat(2))
    with pytest.raises(KeyError), kept_remarks():
        raise KeyError
    assert os.path.samestat(before, os.fstat(2)) and lines_written_to(capfd) == []


def test_the_last_lines_of_a_process_that_aborts_appear():
    code = (
        "import os; from autoshard.sharding.lower.compiler_remarks import kept_remarks\n"
        "with kept_remarks(): os.write(2, b'F1125 check failed\\n'); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode and "F1125 check failed" in done.stderr


def test_remarks_have_their_source_lines_and_price():
    lowered = jax.jit(sgd_step).lower(mlp_state(), batch()).as_text(debug_info=True)
    op = "jit(sgd_step)/jvp()/dot_general"
    assert f'"{op}"' in lowered
    text = remarks_text("step", [REMARK.format(n=8, op=op)], (), lambda: lowered)
    assert f"448 KiB for shards f32[32,512] at sharding/programs.py:{LOSS_LINE} (mlp_loss)" in text


def test_remarks_that_cost_next_to_nothing_are_left_out():
    assert remarks_text("step", [REMARK.format(n=1, op="")], (), str) == ""
    small = REMARK.format(n=8, op="").replace("f32[32,512]", "f32[8,128]")
    assert remarks_text("step", [small], (), str) == ""
    both = remarks_text("step", [REMARK.format(n=1, op=""), REMARK.format(n=8, op="")], (), str)
    assert "makes 1 array whole" in both


def test_the_jitted_plan_reports_remarks_once(capfd, monkeypatch, resharding_at_once):
    monkeypatch.setattr(compiler_remarks, "LEAST_REMARK_BYTES", 1)
    plan = autoshard.plan(sgd_step, mlp_state(), batch(), plan="dp:2 tp:4", fixed={"params/w": P(("tp", "dp"))})
    run, state = plan.jit(), jax.device_put((mlp_state(), batch()), plan.in_shardings())
    with pytest.warns(AutoshardWarning, match="makes 1 array whole") as caught:
        new, _ = run(*state)
    assert caught[0].filename == __file__
    assert_close(new, sgd_step(mlp_state(), batch())[0])
    run(*state)  # no further warning
    assert not [line for line in lines_written_to(capfd) if "rematerialization" in line]


@pytest.mark.parametrize("called", ["auto_shard", "Plan.jit"])
def test_a_program_that_is_compiled_again_reports_its_remarks_once(capfd, monkeypatch, called, resharding_at_once):
    monkeypatch.setattr(compiler_remarks, "LEAST_REMARK_BYTES", 1)
    step = autoshard.auto_shard(sgd_step, plan="dp:2 tp:4", fixed={"params/w": P(("tp", "dp"))})
    plan = step.plan(mlp_state(), batch())
    arguments = jax.device_put((mlp_state(), batch()), plan.in_shardings())
    run = step if called == "auto_shard" else plan.jit()
    with pytest.warns(AutoshardWarning, match="makes 1 array whole"):
        run(*arguments)
    if called == "auto_shard":
        run(*arguments)
    compiled = []
    listener = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        with jax.default_device(jax.devices()[1]):  # which changes nothing
            results = run(*arguments)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled  # without a warning, which would be an error
    assert_close(results[0], sgd_step(mlp_state(), batch())[0])
    os.write(2, b"later\n")
    assert lines_written_to(capfd) == ["later"]


@pytest.mark.whole
def test_remarks_of_measured_plans_are_reported_by_the_first_call(capfd, monkeypatch, resharding_at_once):
    monkeypatch.setattr(compiler_remarks, "LEAST_REMARK_BYTES", 1)
    step = autoshard.auto_shard(sgd_step, plan="dp:2 tp:4", fixed={"params/w": P(("tp", "dp"))}, measure=1)
    assert step.plan(mlp_state(), batch()).measured
    with pytest.warns(AutoshardWarning, match="makes 1 array whole"):
        state, _ = step(mlp_state(), batch())
    with pytest.warns(AutoshardWarning, match="makes 1 array whole"):  # another program
        step(state, batch(size=64))
    assert not [line for line in lines_written_to(capfd) if "rematerialization" in line]
