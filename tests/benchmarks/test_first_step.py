"""The two programs of the benchmark of the first step run the same step, and a program that fails makes none."""

import sys
from dataclasses import replace
from pathlib import Path

import first_step
import first_step_by_hand as by_hand
import jax
import pytest

from autoshard.train.config.presets import PRESETS
from autoshard.train.program.build import make_program_of, train_step_of
from autoshard.train.step.train_step import batch_shapes


def test_the_step_by_hand_is_the_step_of_the_preset():
    config = replace(PRESETS["quick"], steps=by_hand.STEPS)
    assert f"--steps {by_hand.STEPS} " in first_step.ARGUMENTS
    batch = batch_shapes(config.batch_size, config.gpt.context)
    assert batch["inputs"].shape == (by_hand.BATCH, by_hand.CONFIG.context)
    program = make_program_of(config)
    ours = jax.make_jaxpr(train_step_of(config, program))(program.abstract_state(), batch)
    program, step = by_hand.program_and_step()
    theirs = jax.make_jaxpr(step)(program.abstract_state(), batch)
    assert str(theirs) == str(ours)


def seconds(program: str, folder: Path) -> tuple[float, float]:
    """Run a Python program until it prints the loss of a step."""
    log = folder / "log.txt"
    command = [sys.executable, "-c", program]
    return first_step.seconds_until(lambda: log.exists() and first_step.has_loss(log.read_text()), command, folder)


def test_a_traceback_with_the_word_loss_is_no_step(tmp_path):
    with pytest.raises(SystemExit, match="made no step"):
        seconds("raise SystemExit('    loss, gradients = jax.value_and_grad(loss_of)(params)')", tmp_path)


def test_a_printed_loss_is_a_step(tmp_path):
    clock, cpu = seconds("import time; print('loss 5.627', flush=True); time.sleep(60)", tmp_path)
    assert 0 < clock < 60 and cpu >= 0


def test_the_step_by_hand_imports_no_planner(run_python):
    check = "import sys; assert not [name for name in sys.modules if name.startswith('autoshard.sharding')]"
    completed = run_python(f"import sys; sys.path.append('benchmarks'); import first_step_by_hand; {check}")
    assert completed.returncode == 0, completed.stderr
