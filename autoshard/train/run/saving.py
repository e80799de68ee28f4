"""Save the state of a run: only a good one, with its config, its plan and its evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from autoshard._shown import shown
from autoshard.ckpt import Checkpointer, RetentionPolicy
from autoshard.errors import AutoshardError
from autoshard.train.config import run_directory
from autoshard.train.config.stored_config import checkpoint_config
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.exported_model import write_inference
from autoshard.train.program.evaluation import Evaluation
from autoshard.train.program.planned_step import PlacedStep
from autoshard.train.run import distributed
from autoshard.train.run.attempts import Attempt
from autoshard.train.step.train_state import Program, TrainState


@shown
class Saver:
    """Saves the states of one run."""

    def __init__(
        self,
        config: TrainConfig,
        program: Program,
        placed: PlacedStep,
        digest: str | None,
        run_dir: Path,
        checkpoints: Checkpointer,
        attempt: Attempt,
    ) -> None:
        """Store what every checkpoint of the run contains.

        Args:
            config: The run.
            program: Its model and optimizer.
            placed: Its planned step.
            digest: Digest of its data; None if unknown.
            run_dir: Its folder.
            checkpoints: Where the states are saved.
            attempt: Measures the time of saves, and records them.
        """
        self.checkpoints = checkpoints
        self._config, self._program, self._run_dir, self._attempt = config, program, run_dir, attempt
        self._kept_config = checkpoint_config(config) | {"data": digest}
        self._plan_text = placed.plan.to_json()  # once, because it takes longer than a save

    def save(
        self,
        step: int,
        state: TrainState,
        metrics: Mapping[str, jax.Array],
        evaluation: Evaluation | None,
        block: bool = False,
    ) -> None:
        """Save a state; every process must call this.

        Args:
            step: Steps done.
            state: The state after them.
            metrics: Metrics of the last step; empty before the first.
            evaluation: The evaluation of this state; None without one.
            block: Whether to wait until the state is on disk.

        Raises:
            AutoshardError: The loss or the gradient norm of the last step is not finite.
        """
        check_finite(step, jax.device_get(metrics), self._config, self._run_dir)
        with self._attempt.goodput.spent_on("save"):
            self.checkpoints.save(
                step,
                state,
                config=self._kept_config,
                metrics=evaluation.metrics() if evaluation is not None else {},
                plan=self._plan_text,
                block=block,
            )
        self._attempt.saved(step)
        if distributed.is_main():
            write_inference(self._run_dir / run_directory.CHECKPOINTS, self._config, self._program)


def check_finite(step: int, metrics: Mapping[str, Any], config: TrainConfig, run_dir: Path) -> None:
    """Stop a run that has diverged, before its state is saved and replaces an earlier checkpoint.

    Raises:
        AutoshardError: The loss or the gradient norm of the last step is not finite.
    """
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        if not math.isfinite(value := float(metrics.get(name, 0.0))):
            raise AutoshardError(
                f"the {what} is {value} at step {step}: try a lower --optimizer.learning-rate "
                f"(it is {config.optimizer.learning_rate}); checkpoints are in {run_dir}"
            )


def retention_policy(config: TrainConfig) -> RetentionPolicy:
    """Return the policy that decides which checkpoints of a run are kept."""
    return RetentionPolicy(
        config.keep_checkpoints or None, best=config.keep_best, metric="val_loss", every=config.keep_every
    )
