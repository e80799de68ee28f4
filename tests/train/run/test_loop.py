"""Whole runs: their files, resuming, interruption, and refused settings."""

import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from autoshard.ckpt import Checkpointer, CheckpointWarning, DamagedCheckpointError
from autoshard.cli import main
from autoshard.errors import AutoshardError, ConfigError
from autoshard.models import flops_per_token
from autoshard.train.config import run_directory
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.run import interrupt, loop, throughput
from autoshard.train.run.interrupt import Interrupts, StopAgreement
from autoshard.train.run.loop import Trainer, train
from autoshard.train.run.metrics import read_metrics
from autoshard.train.step.ema import averaged_params

MakeConfig = Callable[..., TrainConfig]


def losses(run_dir: Path | None) -> dict[int, float]:
    assert run_dir is not None
    return {line["step"]: line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line}


def validation(run_dir: Path | None) -> list[float]:
    assert run_dir is not None
    return [line["val_loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "val_loss" in line]


def test_a_run_learns_and_writes_all_its_files(make_config: MakeConfig, capsys: pytest.CaptureFixture) -> None:
    config = make_config(steps=30, sample_tokens=5, checkpoint_every=10, keep_checkpoints=2, prompt="the ")
    result = train(config)
    found = losses(result.run_dir)
    assert list(found) == list(range(1, 31))
    assert found[30] < found[1] - 1.0
    assert result.evaluation is not None and abs(result.evaluation.loss - validation(result.run_dir)[-1]) < 1e-12
    bits = result.evaluation.loss / np.log(2)
    assert result.evaluation.bits_per_byte == pytest.approx(bits)
    names = {path.name for path in result.run_dir.iterdir()}
    files = "config.json attempts.jsonl metrics.jsonl tensorboard plan.txt plan.json loss.png sample.txt"
    assert names == {*files.split(), "checkpoints"}
    assert (result.run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (result.run_dir / "sample.txt").read_text().startswith("the ")
    assert len(list((result.run_dir / "checkpoints").glob("step_*"))) == 2
    output = capsys.readouterr().out
    assert "fsdp" in output and "Sample:\nthe " in output and "finished at step 30/30" in output
    assert load_trained(result.run_dir, step=20).step == 20


@pytest.mark.filterwarnings("ignore:.*devices (have work|are idle)")
@pytest.mark.slow
def test_the_loss_is_the_same_under_every_plan(make_config: MakeConfig, tmp_path: Path) -> None:
    shape = dict(gpt=dict(width=32, heads=4, kv_heads=2, dropout=0.1), steps=3, microbatches=2)
    runs = []
    for index, plan in enumerate(["fsdp:8", "dp:2 fsdp:2 tp:2", None]):
        mesh = "data=1" if plan is None else None
        config = make_config(run_dir=tmp_path / str(index), plan=plan, mesh=mesh, **shape)
        train(config)
        runs.append([*losses(config.run_dir).values(), *validation(config.run_dir)])
    np.testing.assert_allclose(runs[0], runs[2], rtol=1e-5)
    np.testing.assert_allclose(runs[1], runs[2], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*devices (have work|are idle)")
@pytest.mark.slow
def test_training_and_evaluation_are_the_same_under_a_pipeline(make_config: MakeConfig, tmp_path: Path) -> None:
    shape = dict(gpt=dict(width=32, heads=4, kv_heads=2, layers=4), steps=3, microbatches=2)
    runs = []
    for index, settings in enumerate(
        [{"plan": "pp:2 fsdp:2 tp:2", "schedule": "ftb"}, {"plan": None, "mesh": "data=1"}]
    ):
        config = make_config(run_dir=tmp_path / str(index), **shape, **settings)
        train(config)
        runs.append([*losses(config.run_dir).values(), *validation(config.run_dir)])
    np.testing.assert_allclose(*runs, rtol=1e-5)


@pytest.mark.slow
def test_evaluation_does_not_change_the_training(make_config: MakeConfig, tmp_path: Path) -> None:
    shape = dict(gpt=dict(dropout=0.1), steps=4)
    for name, every in (("with", 1), ("without", 0)):
        train(make_config(run_dir=tmp_path / name, eval_every=every, **shape))
    assert len(validation(tmp_path / "with")) == 4 and len(validation(tmp_path / "without")) == 1
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    states = [load_trained(tmp_path / name).state for name in ("with", "without")]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
def test_the_average_is_sharded_evaluated_and_exported(make_config: MakeConfig, tmp_path: Path) -> None:
    """The average does not change the training. With `use_ema=False` the held-out loss is that of the parameters."""
    shape = dict(steps=4, optimizer=dict(learning_rate=0.1))
    runs = {"none": {}, "unused": dict(ema_decay=0.5, use_ema=False), "used": dict(ema_decay=0.5)}
    found = {}
    for name, settings in runs.items():
        train(make_config(run_dir=tmp_path / name, **shape, **settings))
        found[name] = validation(tmp_path / name)[-1]
    assert found["none"] == found["unused"] != found["used"]
    shapes = Trainer(make_config(run_dir=tmp_path / "used", resume=True, **shape, **runs["used"])).placed.state_shapes
    for mean, leaf in zip(jax.tree.leaves(shapes.ema.mean), jax.tree.leaves(shapes.params), strict=True):
        assert mean.sharding.spec == leaf.sharding.spec
    assert any(any(leaf.sharding.spec) for leaf in jax.tree.leaves(shapes.ema.mean))
    state = load_trained(tmp_path / "used").state
    with Checkpointer(tmp_path / "used" / "checkpoints") as checkpoints:
        checkpoints.export(None, tmp_path / "out", use_ema=True)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for path, expected in jax.tree_util.tree_leaves_with_path(averaged_params(state.ema, state.params)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_allclose(exported.pop(name), expected, rtol=1e-6, err_msg=name)
    assert not exported


@pytest.mark.whole
def test_how_often_metrics_and_checkpoints_are_written(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learning rate of zero two evaluations differ only by their batches."""
    monkeypatch.setattr(throughput, "peak_flops", lambda kind: 1e9)
    config = make_config(
        steps=5, log_every=3, checkpoint_every=2, keep_checkpoints=0, eval_every=2, eval_batches=1,
        optimizer=dict(name="sgd", learning_rate=0.0, min_learning_rate=0.0),
    )  # fmt: skip
    result = train(config)
    lines = read_metrics(result.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 3, 5]
    assert [line["step"] for line in lines if "val_loss" in line] == [2, 4, 5]
    some, again, whole = validation(result.run_dir)
    assert some == again != whole
    steps = sorted(path.name for path in (result.run_dir / "checkpoints").glob("step_*"))
    assert steps == ["step_00000002", "step_00000004", "step_00000005"]
    share = flops_per_token(config.gpt) / (1e9 * jax.device_count())
    assert lines[-3]["mfu"] == pytest.approx(lines[-3]["tokens_per_second"] * share)
    causes = {name: value for name, value in lines[-1].items() if name.startswith("seconds_")}
    assert set(causes) >= {f"seconds_{each}" for each in ("steps", "plan", "compile", "data", "evaluation", "save")}
    assert lines[-1]["goodput"] == pytest.approx(causes["seconds_steps"] / sum(causes.values()))


def test_the_trainer_is_imported_without_matplotlib(run_python: Callable[..., Any]) -> None:
    """Only the end of a run needs it."""
    completed = run_python("import sys, autoshard.train.run.loop; assert 'matplotlib' not in sys.modules")
    assert completed.returncode == 0, completed.stderr


@pytest.mark.slow
def test_a_checkpoint_is_written_after_some_minutes(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All saves are of the types for which the run prepared them after its first step."""
    calls: list[tuple[str, Any, int]] = []

    def types(state: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)

    def recorded(name: str, position: int) -> None:
        method = getattr(Checkpointer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            assert config.run_dir is not None
            calls.append((name, types(args[position]), len(losses(config.run_dir))))
            return method(*args, **kwargs)

        monkeypatch.setattr(Checkpointer, name, call)

    recorded("prepare", 1)
    recorded("save", 2)
    config = make_config(steps=3, checkpoint_minutes=1e-9, keep_checkpoints=0)
    train(config)
    assert [(name, steps) for name, _, steps in calls] == [("prepare", 1), ("save", 1), ("save", 2), ("save", 3)]
    assert all(saved == calls[0][1] for _, saved, _ in calls)
    assert config.run_dir is not None
    steps = sorted(path.name for path in (config.run_dir / "checkpoints").glob("step_*"))
    assert steps == ["step_00000001", "step_00000002", "step_00000003"]


@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4", "data=1"])
def test_a_run_resumes_on_another_mesh(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture, mesh: str
) -> None:
    shape = dict(gpt=dict(dropout=0.1), ema_decay=0.5, steps=16, checkpoint_every=6)
    train(make_config(run_dir=tmp_path / "whole", **shape))
    config = make_config(run_dir=tmp_path / "parts", **shape)
    trainer = Trainer(config)
    trainer.config = replace(config, steps=6)  # stop early, with the schedule of sixteen steps
    trainer.run()
    train(replace(config, resume=True, plan=None, mesh=mesh))
    output = capsys.readouterr().out
    assert re.search(r"^restored step 6: .* read in [\d.]+ s, of which [\d.]+ s for digests$", output, re.M), output
    assert f"parameters on {mesh.removeprefix('data=')} cpu devices; the run continues from step 6" in output
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert list(parts) == list(range(1, 17))
    np.testing.assert_allclose([*parts.values()], [*whole.values()], rtol=1e-5)
    np.testing.assert_allclose(validation(tmp_path / "parts")[-1], validation(tmp_path / "whole")[-1], rtol=1e-5)


@pytest.mark.slow
def test_metrics_written_after_the_last_checkpoint_are_dropped(make_config: MakeConfig) -> None:
    config = make_config(steps=4, checkpoint_every=2)
    train(config)
    assert config.run_dir is not None
    with (config.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 99.0}) + "\n" + '{"step": 6, "lo')
    train(replace(config, resume=True, steps=6))
    found = [(line["step"], line["loss"]) for line in read_metrics(config.run_dir / "metrics.jsonl") if "loss" in line]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6] and found[4][1] != 99.0


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_saves_and_ends_the_run(make_config: MakeConfig, capsys: pytest.CaptureFixture, name: str) -> None:
    config = make_config(steps=100_000)
    assert config.run_dir is not None
    metrics = config.run_dir / "metrics.jsonl"

    def interrupt() -> None:
        while len(read_metrics(metrics)) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, name))

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    result = train(config)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert result.interrupted_by == name and 3 <= result.step < 100_000
    assert load_trained(config.run_dir).step == result.step
    assert f"{name}: saved and stopped at step {result.step}" in capsys.readouterr().out
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.slow
def test_a_signal_after_the_last_step_is_ignored(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes do not get the signal. They evaluate and sample, and need this process for that."""
    whole = loop.evaluate

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return whole(*args, **kwargs)

    monkeypatch.setattr(loop, "evaluate", interrupted)
    result = train(make_config(steps=3, sample_tokens=2))
    assert result.interrupted_by is None and result.evaluation is not None
    assert load_trained(result.run_dir).step == 3 and (result.run_dir / "sample.txt").exists()


def test_processes_agree_on_stopping_from_time_to_time_and_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exchange rarely if steps are short, and after each step if any process is slow. All stop together."""
    now, others = [0.0], {"signal": 0, "seconds": 0.0}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(interrupt.time, "perf_counter", lambda: now[0])
    exchanged: list[Any] = []

    def largest(what: str, values: Sequence[float]) -> list[float]:
        exchanged.append(int(what.split()[1].rstrip(":")))
        return [max(values[0], others["signal"]), max(values[1], others["seconds"])]

    monkeypatch.setattr(interrupt.distributed, "maximum_over_processes", largest)

    def run(steps: int, seconds: float) -> list[Any]:
        exchanged.clear()
        with Interrupts() as interrupts:
            agreement = StopAgreement(interrupts, 0, at_least_every=10)
            for step in range(1, steps + 1):
                now[0] += seconds
                if agreement.after(step, last=step == steps):
                    return [*exchanged, interrupts.received]
        return exchanged

    assert run(25, 0.01) == [1, 11, 21, 25]
    assert run(14, 0.3) == [1, 7, 13, 14]  # 2 s are 6 steps of 0.3 s
    assert run(4, 30.0) == [1, 2, 3, 4]
    others["seconds"] = 1.0
    assert run(6, 0.01) == [1, 3, 5, 6]
    others["signal"] = signal.SIGTERM
    assert run(6, 0.01) == [1, "SIGTERM in another process"]


@pytest.mark.slow
@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_changes_no_save(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, jump: float
) -> None:
    """A checkpoint is due after minutes of work, whatever the clock says; no time is negative or a day too long."""
    real, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() + (jump if next(calls) > 2 else 0.0))
    result = train(make_config(steps=6, checkpoint_minutes=10.0, log_every=1))
    assert Checkpointer(result.run_dir / "checkpoints", keep=None).steps() == [6]
    seconds = [v for line in read_metrics(result.run_dir / "metrics.jsonl") for k, v in line.items() if "seconds" in k]
    assert seconds and all(0 <= each < 1000 for each in seconds)
    assert "goodput" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_steps_is_evaluated_and_saved(make_config: MakeConfig) -> None:
    """Its warm-up may be longer than the run."""
    result = train(make_config(steps=0, optimizer=dict(warmup_steps=25)))
    assert result.step == 0 and result.evaluation is not None
    assert load_trained(result.run_dir).step == 0


def test_a_second_ctrl_c_stops_at_once() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.whole
def test_a_run_that_cannot_be_resumed_changes_nothing(make_config: MakeConfig, capsys: pytest.CaptureFixture) -> None:
    """Another run is in the folder or writes to it, or the arrays do not divide by the requested mesh."""
    config = make_config(steps=3)
    train(config)
    assert config.run_dir is not None
    before = contents(config.run_dir)
    with pytest.raises(ConfigError, match="is not empty: add --resume"):
        train(config)
    with pytest.raises(ConfigError, match=r"--gpt\.layers is 2, the run has 1\. Give --gpt\.layers 1, or"):
        train(replace(config, resume=True, gpt=replace(config.gpt, layers=2)))
    with pytest.raises(ConfigError, match=r"--seed is 5, the run has 0\. Give --seed 0, or give another --run-dir"):
        train(replace(config, resume=True, seed=5))
    assert contents(config.run_dir) == before
    again = ["train", "--run-dir", str(config.run_dir), "--resume", "--steps", "5"]
    with Checkpointer(config.run_dir / "checkpoints") as other:
        other.claim()
        assert main(again) == 2
        assert "another run is writing checkpoints to" in capsys.readouterr().err
    assert contents(config.run_dir) == before
    assert main([*again, "--mesh", "data=3", "--plan", "data=fsdp:3"]) == 2
    error = capsys.readouterr().err
    assert "batch 8 is not divisible by data 3" in error and error.count("error:") == 1, error
    assert contents(config.run_dir) == before


@pytest.mark.slow
def test_a_run_resumes_with_its_data_and_not_backwards(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question\n" * 100)
    config = make_config(steps=4, data=str(text))
    train(config)
    assert config.run_dir is not None
    before = contents(config.run_dir)
    again = replace(config, resume=True)
    with pytest.raises(ConfigError, match=r"it is at step 4, but --steps is 3 \(give --steps 4 or more\)\. Or give"):
        train(replace(again, steps=3))
    text.write_text(text.read_text().replace("question", "answer..", 1))
    with pytest.raises(ConfigError, match="cannot be resumed: it was trained on other data than .*/text' has now"):
        train(replace(again, steps=5))
    assert contents(config.run_dir) == before
    assert train(replace(again, steps=5, allow_other_data=True)).step == 5
    assert not run_directory.read_config(config.run_dir)["allow_other_data"]  # not stored
    capsys.readouterr()
    assert train(replace(again, steps=6)).step == 6  # the data have not changed since
    assert "all its steps" not in capsys.readouterr().out
    assert train(replace(again, steps=6)).step == 6
    assert "has all its steps already; to train further, give more --steps than 6" in capsys.readouterr().out
    text.write_text(text.read_text().replace("answer..", "question", 1))
    with pytest.raises(ConfigError, match="other data"):
        train(replace(again, steps=7))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "cannot be read: Expecting"),
        ("[1]", "cannot be read: it is not a table of settings"),
        ('{"gpt": 3}', "gpt is 3, but it is a table of settings"),
        ('{"nonsense": 3}', "unknown setting 'nonsense'"),
    ],
)
def test_a_run_whose_settings_are_damaged(
    make_config: MakeConfig, capsys: pytest.CaptureFixture, settings: str, message: str
) -> None:
    run_dir = make_config().run_dir
    assert run_dir is not None
    run_dir.mkdir()
    (run_dir / "config.json").write_text(settings)
    assert main(["train", "--run-dir", str(run_dir), "--resume"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("error:") == 1, error
    assert [path.name for path in run_dir.iterdir()] == ["config.json"]


def test_a_folder_with_something_else_is_left_alone(make_config: MakeConfig) -> None:
    config = make_config()
    assert config.run_dir is not None
    config.run_dir.mkdir()
    (config.run_dir / "thesis.txt").write_text("years of work")
    for resume, message in ((False, "is not empty and has no run: give a new or empty folder"), (True, "is not a run")):
        with pytest.raises(ConfigError, match=message) as raised:
            train(replace(config, resume=resume))
        assert "add --resume" not in str(raised.value)
    with pytest.raises(ConfigError, match="thesis.txt' is a file: give a new or empty folder"):
        train(replace(config, run_dir=config.run_dir / "thesis.txt"))
    assert [path.name for path in config.run_dir.iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be_created_is_refused_before_planning(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr(loop, "place_step", plan)
    (tmp_path / "file").write_text("a file")
    for run_dir in (tmp_path / "file" / "run", Path("/proc/no/run")):
        with pytest.raises(ConfigError, match=f"--run-dir '{run_dir}' cannot be written to .*: give another folder"):
            train(make_config(run_dir=run_dir))
    with pytest.raises(AssertionError, match="planned"):
        train(make_config(run_dir=tmp_path / "new" / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_every_plan_of_a_run_is_kept(make_config: MakeConfig) -> None:
    config = make_config(steps=3)
    train(config)
    assert config.run_dir is not None
    first = {name: content for name, content in contents(config.run_dir).items() if "/plan." in name}
    train(replace(config, resume=True, steps=4))
    assert not list(config.run_dir.glob("plan-*"))  # the same machine gets the same plan
    for plan, name in (("dp:8", "plan-4"), ("dp:4 fsdp:2", "plan-4-2"), ("dp:8", "plan-4")):
        train(replace(config, resume=True, steps=4, plan=plan))
        assert plan in (config.run_dir / f"{name}.txt").read_text() and (config.run_dir / f"{name}.json").exists()
    assert first.items() <= contents(config.run_dir).items() and len(first) == 2
    assert len(list(config.run_dir.glob("plan*"))) == 6


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_clear_error(make_config: MakeConfig) -> None:
    config = make_config(steps=3)
    train(config)
    assert config.run_dir is not None
    # Any of the files may store a given value, so some bytes of each are changed.
    for path in (config.run_dir / "checkpoints" / "step_00000003" / "state").rglob("d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
        path.write_bytes(content)
    before = contents(config.run_dir)
    with pytest.raises(DamagedCheckpointError, match="step 3"):
        train(replace(config, resume=True, steps=5))
    assert contents(config.run_dir) == before


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run(make_config: MakeConfig) -> None:
    optimizer = dict(name="sgd", learning_rate=1e30, min_learning_rate=1e30, clip_norm=0.0)
    with pytest.raises(AutoshardError, match="the (loss|gradient norm) is .* try a lower --optimizer.learning-rate"):
        train(make_config(steps=20, optimizer=optimizer))


def test_non_finite_states_do_not_replace_checkpoints(make_config: MakeConfig) -> None:
    """The loss is checked before each save, even if it is rarely logged, so that good checkpoints are kept."""
    optimizer = dict(name="sgd", learning_rate=1e12, min_learning_rate=1e12, clip_norm=0.0, warmup_steps=0)
    config = make_config(steps=20, log_every=20, checkpoint_every=1, keep_checkpoints=2, optimizer=optimizer)
    with pytest.raises(AutoshardError, match=r"step \d+: the (loss|gradient norm) is (nan|inf)"):
        train(config)
    assert config.run_dir is not None
    with Checkpointer(config.run_dir / "checkpoints") as checkpoints:
        state = checkpoints.restore(min(checkpoints.steps()))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))


@pytest.mark.slow
def test_a_damaged_last_step_is_saved_again(make_config: MakeConfig) -> None:
    config = make_config(steps=4, checkpoint_every=2)
    train(config)
    assert config.run_dir is not None
    folder = config.run_dir / "checkpoints"
    for path in (folder / "step_00000004" / "state").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.warns(CheckpointWarning) as caught:
        train(replace(config, resume=True))
    assert str(caught[-1].message).endswith("is damaged: it was renamed to damaged.step_00000004")
    with Checkpointer(folder) as checkpoints:
        assert checkpoints.steps() == [2, 4] and not checkpoints.verify(4)


def test_a_users_model_and_data(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])  # the folder of user_code.py
    config = make_config(
        model="user_code:factory", data="user_code:counting", steps=60, gpt=dict(vocab=8),
        optimizer=dict(learning_rate=0.3, min_learning_rate=0.1),
    )  # fmt: skip
    result = train(config)
    assert result.evaluation is not None and result.evaluation.loss < 0.2
    assert result.evaluation.bits_per_byte is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model="user_code:nothing"), "module user_code has no function 'nothing'"),
        (dict(model="no_such_code:factory"), "no module named 'no_such_code'"),
        (dict(model="bert"), "'bert' is unknown: give package.module:function, or gpt"),
        (dict(model="user_code:not_a_model"), "returned int, not an nnx.Module"),
        (dict(data="user_code:words"), "one-dimensional integer arrays"),
        (dict(freeze=("nothing/*",)), "no parameter matches"),
        (dict(mesh="data"), "such as data=4,model=2"),
        (dict(mesh="data=64", plan=None), "--mesh data=64 has 64 devices, this machine has 8"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, changes: dict, message: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])  # the folder of user_code.py
    config = make_config(**changes)
    with pytest.raises(AutoshardError, match=message):
        train(config)
    assert config.run_dir is not None and not config.run_dir.exists()
