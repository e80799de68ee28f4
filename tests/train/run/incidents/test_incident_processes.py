"""Bad steps of a run in two processes: both decide alike."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.train.config.stored_config import to_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.run.metrics import read_metrics
from autoshard.train.step.guard import GuardConfig
from tests.compiler_flags import xla_flags

ROOT = Path(__file__).resolve().parents[4]
TRAINING = """
import json, sys
import numpy as np
from autoshard.train.run import distributed
from autoshard.train.config.stored_config import from_dict
from autoshard.train.run.loop import Trainer

class Bad:
    def __init__(self, source):
        self.source = source
    def __getattr__(self, name):
        return getattr(self.source, name)
    def batch(self, step, rows):
        batch = self.source.batch(step, rows)
        return {**batch, "mask": batch["mask"] * np.float32(np.nan)} if step == 3 else batch

distributed.initialize()
trainer = Trainer(from_dict(json.loads(sys.argv[1]), "settings"))
trainer.source = Bad(trainer.source)
trainer.run()
"""


def run_in(count: int, config: TrainConfig) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(8 // count)}
    command = [sys.executable, "-c", TRAINING, json.dumps(to_dict(config))]
    places = [
        dict(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}", JAX_NUM_PROCESSES=str(count), JAX_PROCESS_ID=str(n))
        for n in range(count)
    ]
    started = [
        subprocess.Popen(command, env=env | (place if count > 1 else {}), stderr=subprocess.PIPE, text=True)
        for place in places
    ]
    try:
        errors = [process.communicate(timeout=400)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count, errors
    assert config.run_dir is not None
    found = [line for line in read_metrics(config.run_dir / "metrics.jsonl") if "incident" in line]
    return load_trained(config.run_dir).state.params, found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("reaction", ["skip", "rollback"])
def test_two_processes_do_as_one(make_config: Callable[..., TrainConfig], tmp_path: Path, reaction: Any) -> None:
    config = make_config(steps=6, checkpoint_every=2, guard=GuardConfig(reaction))
    alone, one = run_in(1, replace(config, run_dir=tmp_path / "alone"))
    together, two = run_in(2, replace(config, run_dir=tmp_path / "together"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), alone, together)
    assert [line["incident"] for line in one] == [reaction]
    assert one == two
