"""Load a trained model from the folder of its run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from autoshard._shown import shown
from autoshard.ckpt import Checkpointer
from autoshard.errors import ConfigError
from autoshard.train.config import run_directory
from autoshard.train.config.stored_config import checkpoint_config, from_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.build import make_program_of
from autoshard.train.step.train_state import Program, TrainState


@shown
@dataclass(frozen=True)
class Trained:
    """The model of a run at one of its checkpoints.

    Attributes:
        config: Settings of the run.
        program: The model, without arrays.
        state: The arrays, on one device.
        step: Step of the checkpoint.
    """

    config: TrainConfig
    program: Program
    state: TrainState
    step: int


def open_checkpoints(run_dir: Path) -> Checkpointer:
    """Open the checkpoints of a run for reading.

    Raises:
        ConfigError: The folder has no run, or the run has no checkpoint.
    """
    run_directory.read_config(run_dir)
    checkpoints = Checkpointer(run_dir / run_directory.CHECKPOINTS, keep=None)
    if checkpoints.latest() is None:
        raise ConfigError(f"{str(run_dir)!r} has no checkpoint yet: wait for the first save, or give another folder")
    return checkpoints


def load_trained(run_dir: Path, step: int | None = None) -> Trained:
    """Restore a run's state onto the first device, by default from the newest checkpoint.

    Raises:
        AutoshardError: The run or the step does not exist, or the checkpoint is damaged.
    """
    config = replace(from_dict(run_directory.read_config(run_dir), str(run_dir)), run_dir=run_dir)
    program = make_program_of(config)
    with contextlib.closing(open_checkpoints(run_dir)) as checkpoints:
        state = checkpoints.restore(step, program.abstract_state(), config=checkpoint_config(config))
    return Trained(config, program, state, int(state.step))
