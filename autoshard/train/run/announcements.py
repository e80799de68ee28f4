"""Prints a run's lines at its start and its end, draws its sample of text, and plots its loss."""

from __future__ import annotations

from pathlib import Path

import jax

from autoshard.ckpt import Restored
from autoshard.errors import ConfigError
from autoshard.train.config import run_directory
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.tokenizer import load_codec
from autoshard.train.inference.text_generation import sample_text
from autoshard.train.program.build import loss_item
from autoshard.train.program.planned_step import PlacedStep
from autoshard.train.run import distributed
from autoshard.train.run.metrics import Reporter, read_metrics
from autoshard.train.step.train_state import Program, TrainState


def report_start(
    reporter: Reporter,
    config: TrainConfig,
    placed: PlacedStep,
    run_dir: Path,
    start: int,
    restored: Restored | None,
    planned_anew: str | None,
) -> None:
    """Print the plan, what was restored, the number of parameters and the run's folder.

    Args:
        reporter: Prints.
        config: The run.
        placed: Its planned step.
        run_dir: Its folder.
        start: Steps done before.
        restored: The checkpoint that was restored; None without one.
        planned_anew: Why the plan differs from the checkpoint's; None if it does not.
    """
    reporter.print(str(placed.plan))
    if planned_anew is not None:
        reporter.print(planned_anew)
    leaves = jax.tree.leaves((placed.state_shapes.params, placed.state_shapes.frozen))
    origin = f"continues from step {start}" if config.resume else "starts"
    complete = start >= config.steps
    if restored is not None:
        reporter.print(f"restored {restored}")
    reporter.print(
        f"{sum(leaf.size for leaf in leaves):,} parameters on {placed.plan.mesh.size} {jax.devices()[0].platform} "
        f"devices; the run {origin} in {run_dir}"
        + (f", and has all its steps already; to train further, give more --steps than {start}" if complete else "")
    )
    saves = config.checkpoint_every or config.checkpoint_minutes
    if "rollback" in (config.guard.non_finite, config.guard.spikes) and not saves:
        reporter.print(
            f"a rollback goes back to step {start}, because no step is saved before the end: set --checkpoint-every or "
            "--checkpoint-minutes"
        )


def conclude(
    reporter: Reporter,
    config: TrainConfig,
    program: Program,
    run_dir: Path,
    state: TrainState,
    step: int,
    interrupted_by: str | None,
) -> None:
    """Sample a text from the trained model, plot the loss, and print how the run ended and where its files are.

    Args:
        reporter: Prints.
        config: The run.
        program: Its model and optimizer.
        run_dir: Its folder.
        state: The state at the end.
        step: Steps done.
        interrupted_by: Name of the signal that stopped the run; None if it finished.
    """
    if interrupted_by is None and config.sample_tokens:
        text, shown = _sample(config, program, state)
        reporter.print(shown)
        if text is not None and distributed.is_main():
            (run_dir / run_directory.SAMPLE).write_text(text)
    if distributed.is_main():
        lines = read_metrics(run_dir / run_directory.METRICS)
        # Imported here, because importing Matplotlib takes a second, and no run needs it before its end.
        from autoshard.train.run.loss_plot import plot_loss

        plot_loss(lines, run_dir / run_directory.PLOT, loss_item(config))
    ended = f"{interrupted_by}: saved and stopped" if interrupted_by else "finished"
    more = f"; continue with --run-dir {run_dir} --resume" if interrupted_by else ""
    reporter.print(
        f"{ended} at step {step}/{config.steps}. Checkpoint, metrics and {run_directory.PLOT} are in {run_dir}{more}"
    )


def _sample(config: TrainConfig, program: Program, state: TrainState) -> tuple[str | None, str]:
    """Return a sample if there is one, and what to print: the sample, or why there is none."""
    codec, count = load_codec(config.tokenizer_file), config.sample_tokens
    try:
        text = sample_text(program, state, codec, config.prompt, count, use_ema=config.use_ema)
    except ConfigError as error:  # a tokenizer may have no token for the prompt
        return None, f"No sample: {error}"
    return text, f"Sample:\n{text}" if text is not None else "No sample: the model is not a built-in one."
