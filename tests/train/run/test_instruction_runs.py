"""Runs on rows of instruction data: packed documents, and the same run on more processes or after a stop."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.cli import main
from autoshard.train.config.pretrained_config import PretrainedConfig
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.run.loop import Trainer, train
from autoshard.train.run.metrics import read_metrics
from tests.train.data.rows.templates import make_chat_folder
from tests.train.data.rows.test_row_source import ROWS, write_rows

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a tiny model with a chat template."""
    return make_chat_folder(tmp_path / "model")


def of_rows(make_config: MakeConfig, folder: Path, rows: list[Any] = ROWS, **changes: Any) -> TrainConfig:
    """Makes the config of a run on rows."""
    data = str(write_rows(folder.parent / "rows.jsonl", rows))
    return make_config(pretrained=PretrainedConfig(folder), data=data, **changes)


@pytest.mark.slow
def test_a_run_trains_on_packed_answers_and_resumes_with_the_same_batches(
    make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    config = of_rows(make_config, folder, steps=4, checkpoint_every=2, optimizer=dict(warmup_steps=1))
    whole = Trainer(config)
    assert {*whole.placed.batch_shapes} == {"inputs", "targets", "mask", "positions", "segment_ids"}
    source, run = whole.source, whole.run()
    weights = [source.batch(step, range(8))["mask"].sum() for step in range(4)]
    assert 0 < min(weights) < 8 * 16
    assert run.evaluation is not None and run.evaluation.tokens == source.held_out_batch(0, range(8))["mask"].sum()
    shutil.copytree(run.run_dir, tmp_path / "again")
    (last,) = (tmp_path / "again" / "checkpoints").glob("*4")
    shutil.rmtree(last)
    train(dataclasses.replace(config, run_dir=tmp_path / "again", resume=True))
    one, two = (load_trained(folder).state.params for folder in (run.run_dir, tmp_path / "again"))
    np.testing.assert_allclose(one["embed"], two["embed"], rtol=1e-6, atol=1e-7)
    losses = [line["loss"] for line in read_metrics(run.run_dir / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < losses[0]


def test_the_command_names_bad_rows_and_settings_without_rows(
    folder: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [*ROWS, {"prompt": "hi"}])
    own = ["train", "--from", str(folder), "--run-dir", str(tmp_path / "run"), "--gpt.context", "16"]
    assert main([*own, "--data", str(bad)]) == 2
    assert "bad.jsonl line 11: it has prompt" in capsys.readouterr().err
    assert main([*own, "--data", str(text_file), "--rows.no-pack"]) == 2
    assert "rows.* are for rows of instruction data" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert main([*own, "--data", str(write_rows(tmp_path / "rows.jsonl", ROWS))]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 32
