"""Two processes of four devices each train as one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autoshard.errors import ConfigError
from autoshard.train.config import to_dict
from autoshard.train.distributed import initialize, set_virtual_devices
from autoshard.train.loop import train
from autoshard.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_as_one(make_config, tmp_path: Path) -> None:
    shape = dict(gpt=dict(dropout=0.1), eval_every=3, sample_tokens=4, prompt="a")
    alone = make_config(run_dir=tmp_path / "alone", **shape)
    train(alone)
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(to_dict(make_config(run_dir=tmp_path / "together", plan=None, measure=3, **shape))))
    code = (
        "import json, sys; from autoshard.train.config import from_dict; from autoshard.train.loop import train\n"
        f"train(from_dict(json.load(open({str(settings)!r})), 'settings'))"
    )
    port = free_port()
    processes = []
    for process in range(2):
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(process),
        }
        command = [sys.executable, "-c", code]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "finished at step 6/6" in outputs[0][0] and "Sample:" in outputs[0][0]
    assert outputs[1][0] == ""
    notes = json.loads((tmp_path / "together" / "plan.json").read_text())["notes"]
    assert "the fastest of 3 run on cpu:" in notes[-1]
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "together"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for name in ("loss", "val_loss", "grad_norm"):
        values = [[line[name] for line in lines if name in line] for lines in (one, two)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
