"""Time a train step under its plan against the same step under a hand-written `jax.jit`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard._shown import shown
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.prefetch import place_batch
from autoshard.train.program.build import fit_tokenizer, make_program_of, train_step_of
from autoshard.train.program.offloading import with_offload
from autoshard.train.program.planned_step import place_step, search_variants


@shown
@dataclass(frozen=True)
class Timing:
    """Median step times and the median of their paired ratios.

    Attributes:
        planned_seconds: Step time under `auto_shard`, in seconds.
        by_hand_seconds: Step time under `jax.jit` with the same input and state shardings and no constraint inside,
            in seconds. All of its state is in device memory, also with `offload`.
        ratio: Median over pairs of planned time divided by by-hand time.
        tokens: Tokens per step.
        plan: Name of the plan.
    """

    planned_seconds: float
    by_hand_seconds: float
    ratio: float
    tokens: int
    plan: str

    def __str__(self) -> str:
        """Return a table with one line for each of the two steps."""
        lines = (("auto_shard", self.planned_seconds), ("jax.jit by hand", self.by_hand_seconds))
        rows = [f"{name:<16}{1e3 * s:10.2f} ms per step{self.tokens / s:14,.0f} tokens/s" for name, s in lines]
        return "\n".join([f"plan: {self.plan}", *rows, f"ratio (median of pairs): {self.ratio:.3f}"])


def time_steps(config: TrainConfig, rounds: int) -> Timing:
    """Time both steps in alternation, so that other load on the machine affects both equally.

    Args:
        config: The run whose step is timed.
        rounds: Number of pairs of steps.
    """
    config, searched = with_offload(fit_tokenizer(config)), None
    if config.searches_variants:
        config, searched = search_variants(config)
    program = make_program_of(config)
    train_step = train_step_of(config, program)
    placed = place_step(train_step, program, config, searched)
    # `jax.jit` runs the step as it is written, so its state is in device memory.
    shardings = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(None), placed.state_shapes)
    by_hand = jax.jit(
        train_step,
        in_shardings=(shardings, placed.batch_shardings),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    tokens = np.random.default_rng(config.seed).integers(0, config.gpt.vocab, (config.batch_size, config.gpt.context))
    rows = {"inputs": tokens, "targets": tokens, "mask": np.ones(tokens.shape)}
    batch = place_batch(
        lambda part: {name: rows[name][part.start : part.stop] for name in rows},
        placed.batch_shapes,
        placed.batch_shardings,
    )
    ours, theirs = (
        SteppedState(step, placed.step.init(program.create_state, jax.random.key(config.seed)), batch)
        for step in (placed.step, by_hand)
    )
    theirs.state = jax.device_put(theirs.state, shardings)
    ours_seconds, theirs_seconds = paired_times(ours.once, theirs.once, rounds=rounds, warm_up=1)
    return Timing(
        planned_seconds=float(np.median(ours_seconds)),
        by_hand_seconds=float(np.median(theirs_seconds)),
        ratio=float(np.median(ours_seconds / theirs_seconds)),
        tokens=tokens.size,
        plan=placed.plan.chosen,
    )


class SteppedState:
    """A step function with its current state and a batch."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        """Store the arguments; no step is run."""
        self.step, self.state, self.batch = step, state, batch

    def once(self) -> float:
        """Run one step to completion and return its time in seconds."""
        begin = time.perf_counter()
        metrics = self.metrics()
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - begin

    def metrics(self) -> Any:
        """Run one step and return its metrics, without waiting for its completion."""
        self.state, metrics = self.step(self.state, self.batch)
        return metrics


def paired_times(
    first: Callable[[], float], second: Callable[[], float], *, rounds: int, warm_up: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Time two actions in alternation. Their order is swapped each round, so that drift affects both equally.

    Args:
        first: Runs the first action once and returns its time in seconds.
        second: Runs the second action once and returns its time in seconds.
        rounds: Number of timed pairs.
        warm_up: Number of untimed pairs before them.

    Returns:
        The times of the first and of the second action in seconds, each `[rounds]`.
    """
    times = []
    for number in range(warm_up + rounds):
        if number % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        times.append((a, b))
    pairs = np.asarray(times[warm_up:])
    return pairs[:, 0], pairs[:, 1]
