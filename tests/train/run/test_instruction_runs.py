"""Runs on rows of instruction data: packed documents, and the same run on more processes or after a stop."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from autoshard.cli import main
from autoshard.models.adapters import LoraConfig
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


PAIRS = [
    {"prompt": "hi why ", "chosen": " ".join(["so"] * n), "rejected": " ".join(["bye"] * m)}
    for n, m in ((1, 2), (3, 1), (2, 2), (4, 3), (1, 1), (5, 2), (2, 4), (3, 3))
]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_preferences_are_trained_with_adapters_and_without_under_a_plan(
    make_config: MakeConfig, folder: Path, tmp_path: Path, rank: int, capsys: pytest.CaptureFixture
) -> None:
    lora = LoraConfig(rank=rank, targets=("attention/*", "mlp/*"))
    config = of_rows(make_config, folder, PAIRS, loss="dpo", lora=lora, steps=4, microbatches=2, batch_size=16)
    trainer = Trainer(dataclasses.replace(config, plan="fsdp:4 tp:2"))
    assert trainer.placed.batch_shapes["inputs"].shape == (16, 2, 16)
    frozen, trained = (
        sum(leaf.size for leaf in jax.tree.leaves(part))
        for part in (trainer.placed.state_shapes.frozen, trainer.placed.state_shapes.params)
    )
    assert frozen == trained if rank == 0 else frozen > trained
    run = trainer.run()
    assert "nats per pair" in capsys.readouterr().out
    lines = [line for line in read_metrics(run.run_dir / "metrics.jsonl") if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-5) and lines[-1]["loss"] < lines[0]["loss"] - 1e-3
    out = tmp_path / "out"
    assert main(["ckpt", "export", str(run.run_dir), str(out), *(["--merge"] if rank else [])]) == 0
    before, after = (load_file(each / "model.safetensors") for each in (folder, out))
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)


def test_preferences_need_pairs(folder: Path, text_file: Path, capsys: pytest.CaptureFixture) -> None:
    own = ["train", "--from", str(folder), "--loss", "dpo", "--gpt.context", "16"]
    assert main([*own, "--data", str(text_file)]) == 2
    assert "needs --from and --data ROWS with prompt, chosen and rejected" in capsys.readouterr().err
    assert main([*own, "--data", str(write_rows(folder.parent / "rows.jsonl", ROWS))]) == 2
    assert "rows.jsonl line 1: it has no chosen and no rejected" in capsys.readouterr().err
