"""Several processes train as one run."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.ckpt import Checkpointer
from autoshard.errors import ConfigError
from autoshard.train.config.stored_config import to_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.run import distributed
from autoshard.train.run.distributed import initialize, set_virtual_devices
from autoshard.train.run.loop import train
from autoshard.train.run.metrics import read_metrics
from tests.compiler_flags import xla_flags

ROOT = Path(__file__).resolve().parents[3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


TRAINING = """
import json, sys
from dataclasses import replace
from autoshard.train.run import distributed
from autoshard.train.config.stored_config import from_dict
from autoshard.train.run.loop import Trainer
distributed.initialize()
with open(sys.argv[1]) as file:
    trainer = Trainer(from_dict(json.load(file), "settings"))
if len(sys.argv) > 2:  # stop early, with the schedule of the whole run
    trainer.config = replace(trainer.config, steps=int(sys.argv[2]))
trainer.run()
"""


def run_together(
    config: TrainConfig, folder: Path, *, count: int, devices: int, until: int | None = None
) -> list[tuple[str, str]]:
    """Run in `count` processes of `devices` devices each; return each one's standard output and standard error."""
    settings = folder / "settings.json"
    settings.write_text(json.dumps(to_dict(config)))
    port = free_port()
    processes = []
    for process in range(count):
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": xla_flags(devices),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(process),
        }
        command = [sys.executable, "-c", TRAINING, str(settings), *([] if until is None else [str(until)])]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, outputs
    return outputs


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_run_in_one_process_then_two_then_four(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    """Each run resumes from the checkpoint of fewer processes on another mesh. The losses are those of one run."""
    shape = dict(gpt=dict(dropout=0.1, heads=4, width=32), ema_decay=0.5, steps=18, sample_tokens=0)
    whole = make_config(run_dir=tmp_path / "whole", **shape)
    train(whole)
    parts = make_config(run_dir=tmp_path / "parts", **shape)
    for count, plan, until in ((1, "fsdp:4", 6), (2, "dp:2 fsdp:2", 12), (4, "fsdp:2 tp:2", 18)):
        config = replace(parts, plan=plan, resume=count > 1)
        output, _ = run_together(config, tmp_path, count=count, devices=4 // count, until=until)[0]
        assert f"finished at step {until}/{until}" in output
        with Checkpointer(tmp_path / "parts" / "checkpoints", keep=None) as checkpoints:
            assert checkpoints.latest() == until and checkpoints.verify() == []
            written_by = checkpoints.describe().written_by
        assert (written_by["processes"], written_by["devices"]) == (count, 4)
    one, other = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    for name in ("loss", "grad_norm"):
        values = [{line["step"]: line[name] for line in lines if name in line} for lines in (one, other)]
        assert [*values[1]] == [*values[0]] == list(range(1, 19))
        np.testing.assert_allclose([*values[1].values()], [*values[0].values()], rtol=1e-5)
    assert values[0][18] < values[0][1]
    assert other[-1]["val_loss"] == pytest.approx(one[-1]["val_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_as_one(make_config, tmp_path: Path) -> None:
    shape = dict(gpt=dict(dropout=0.1), eval_every=3, sample_tokens=4, prompt="a")
    single = make_config(run_dir=tmp_path / "alone", **shape)
    train(single)
    together = make_config(run_dir=tmp_path / "together", **shape | {"plan": None, "measure": 3})
    outputs = run_together(together, tmp_path, count=2, devices=4)
    assert "finished at step 6/6" in outputs[0][0] and "Sample:" in outputs[0][0]
    assert outputs[1][0] == ""
    notes = json.loads((tmp_path / "together" / "plan.json").read_text())["notes"]
    assert "the fastest of 3 run on cpu:" in notes[-1]
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "together"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for name in ("loss", "val_loss", "grad_norm"):
        values = [[line[name] for line in lines if name in line] for lines in (one, two)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_data_that_differs_between_processes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "exchange", lambda what, value: [value, value, "another"])
    with pytest.raises(ConfigError, match="^the data: not the same in process 2 as in process 0"):
        distributed.check_same("the data", "one")


def test_incomplete_environment_variables_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES, JAX_PROCESS_ID is not: set all three or none"):
        initialize()


@pytest.mark.parametrize(
    ("before", "count", "explicit", "after"),
    [
        ("", 8, False, "--xla_force_host_platform_device_count=8"),
        ("--other", 8, False, "--other --xla_force_host_platform_device_count=8"),
        ("--xla_force_host_platform_device_count=4", 8, False, "--xla_force_host_platform_device_count=4"),
        ("--xla_force_host_platform_device_count=4", 8, True, "--xla_force_host_platform_device_count=8"),
        ("--other", None, True, "--other"),
    ],
)
def test_virtual_devices(
    monkeypatch: pytest.MonkeyPatch, before: str, count: int | None, explicit: bool, after: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", before)
    set_virtual_devices(count, explicit)
    assert os.environ["XLA_FLAGS"] == after


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_state_of_the_optimizer_waits_on_the_hosts_of_two_processes(
    make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """One process begins a run and two processes continue it. The losses equal those of one process without offload."""
    shape = dict(gpt=dict(heads=4, width=64), ema_decay=0.5, steps=6, checkpoint_every=3, sample_tokens=0)
    config = make_config(run_dir=tmp_path / "run", offload="optimizer", **shape)
    run_together(config, tmp_path, count=1, devices=8, until=3)
    outputs = run_together(replace(config, resume=True), tmp_path, count=2, devices=4)
    assert "moved to host memory in each step, before sharding: optimizer" in outputs[0][0]
    train(make_config(run_dir=tmp_path / "plain", **shape))
    losses = [
        [line[name] for name in ("loss", "val_loss") for line in read_metrics(run / "metrics.jsonl") if name in line]
        for run in (tmp_path / "run", tmp_path / "plain")
    ]
    assert len(losses[0]) >= 7
    np.testing.assert_allclose(losses[0][:6], losses[1][:6], rtol=1e-5)
    np.testing.assert_allclose(losses[0][-1], losses[1][-1], rtol=1e-5)
