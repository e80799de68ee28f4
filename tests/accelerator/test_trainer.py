"""A run of the trainer on the device: training, a checkpoint, and the rest of the run from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from autoshard.cli import main

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore::autoshard.errors.AutoshardWarning")]

SIZES = (
    "--gpt.layers 2 --gpt.width 64 --gpt.heads 2 --gpt.context 32 --batch-size 8 --optimizer.warmup-steps 2 "
    "--optimizer.learning-rate 1e-2 --optimizer.min-learning-rate 1e-2 --eval-every 0 --sample-tokens 0 --log-every 1"
).split()


def train(folder: Path, *options: str) -> None:
    text = folder.parent / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 100)
    assert main(["train", "--data", str(text), "--run-dir", str(folder), *SIZES, *options]) == 0


def losses(folder: Path) -> dict[int, float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.usefixtures("full_precision")
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, capsys):
    train(tmp_path / "whole", "--steps", "12")
    train(tmp_path / "parts", "--steps", "6")
    train(tmp_path / "parts", "--steps", "12", "--resume")
    printed = capsys.readouterr().out
    assert f"on 1 {jax.default_backend()} device" in printed and "the run continues from step 6" in printed
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert list(parts) == list(range(1, 13)) and whole[12] < 0.7 * whole[1]
    # Gradients of the embedding are summed by atomic additions, whose order differs between runs.
    np.testing.assert_allclose([parts[n] for n in whole], [*whole.values()], rtol=1e-3)
    assert main(["ckpt", "verify", str(tmp_path / "parts")]) == 0
    assert re.search(r"step 12 +intact", capsys.readouterr().out)


@pytest.mark.usefixtures("on_gpu")
def test_a_bfloat16_run_with_the_kernel_and_offload_trains(tmp_path):
    sizes = "--gpt.context 1024 --gpt.dtype bfloat16 --offload residual+qkv".split()
    train(tmp_path / "run", "--steps", "6", *sizes)
    train(tmp_path / "run", "--steps", "12", "--resume", *sizes)
    found = losses(tmp_path / "run")
    assert found[12] < 0.7 * found[1]
    assert main(["generate", str(tmp_path / "run"), "--prompt", "to ", "--tokens", "5"]) == 0
