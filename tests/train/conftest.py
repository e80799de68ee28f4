"""Fixtures: a small text, and the settings of a run that takes a second."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.models import GPTConfig
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.step.optimizer import OptimizerConfig


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with about 6 kB of words."""
    words = np.random.default_rng(0).choice(["the", "cat", "sat", "on", "a", "mat", *string.ascii_lowercase], 2400)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture
def make_config(text_file: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Make the config of a tiny run in a new folder: `make_config(steps=3, gpt=dict(layers=2))`."""

    def make(gpt: dict | None = None, optimizer: dict | None = None, **changes) -> TrainConfig:
        shape: dict[str, Any] = dict(vocab=256, layers=1, heads=2, width=16, context=16) | (gpt or {})
        rates: dict[str, Any] = dict(learning_rate=1e-2, warmup_steps=2) | (optimizer or {})
        defaults: dict[str, Any] = dict(
            data=str(text_file), run_dir=tmp_path / "run", steps=6, batch_size=8, log_every=1
        )
        defaults |= dict(sample_tokens=0, plan="fsdp:8")
        return TrainConfig(gpt=GPTConfig(**shape), optimizer=OptimizerConfig(**rates), **(defaults | changes))

    return make
