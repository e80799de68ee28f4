"""A train step under its plan, timed against the same step under a hand-written `jax.jit`."""

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
from autoshard.train.program.planned_step import place_step


@shown
@dataclass(frozen=True)
class Timing:
    """Median times of a step in seconds, and their paired ratio.

    Attributes:
        planned_seconds: Through `auto_shard`.
        by_hand_seconds: Through `jax.jit` with the same input and state shardings, and no constraint inside.
        ratio: Median over pairs of planned by by-hand.
        tokens: Tokens in a step.
        plan: Name of the plan.
    """

    planned_seconds: float
    by_hand_seconds: float
    ratio: float
    tokens: int
    plan: str

    def __str__(self) -> str:
        """One line for each way."""
        lines = (("auto_shard", self.planned_seconds), ("jax.jit by hand", self.by_hand_seconds))
        rows = [f"{name:<16}{1e3 * s:10.2f} ms a step{self.tokens / s:14,.0f} tokens/s" for name, s in lines]
        return "\n".join([f"plan: {self.plan}", *rows, f"ratio (median of pairs): {self.ratio:.3f}"])


def time_steps(config: TrainConfig, rounds: int) -> Timing:
    """Time both in turn, so that what else the machine does meets both alike.

    Args:
        config: The run whose step is timed.
        rounds: Pairs of steps.
    """
    config = fit_tokenizer(config)
    program = make_program_of(config)
    train_step = train_step_of(config, program)
    placed = place_step(train_step, program, config)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, placed.state_shapes)
    by_hand = jax.jit(
        train_step,
        in_shardings=(shardings, placed.batch_shardings),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    tokens = np.random.default_rng(config.seed).integers(0, config.gpt.vocab, (config.batch_size, config.gpt.context))
    rows = {"inputs": tokens, "targets": tokens, "mask": np.ones(tokens.shape)}
    batch = place_batch(
        lambda wanted: {name: rows[name][wanted.start : wanted.stop] for name in rows},
        placed.batch_shapes,
        placed.batch_shardings,
    )
    ours, theirs = (
        Loop(step, placed.step.init(program.create_state, jax.random.key(config.seed)), batch)
        for step in (placed.step, by_hand)
    )
    ours_seconds, theirs_seconds = paired(ours.once, theirs.once, rounds=rounds, warm_up=1)
    return Timing(
        planned_seconds=float(np.median(ours_seconds)),
        by_hand_seconds=float(np.median(theirs_seconds)),
        ratio=float(np.median(ours_seconds / theirs_seconds)),
        tokens=tokens.size,
        plan=placed.plan.chosen,
    )


class Loop:
    """A step function and the state that it goes on from."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        """Nothing is run yet."""
        self.step, self.state, self.batch = step, state, batch

    def once(self) -> float:
        """Seconds of one step, with everything that it started."""
        begin = time.perf_counter()
        metrics = self.metrics()
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - begin

    def metrics(self) -> Any:
        """What one step reports."""
        self.state, metrics = self.step(self.state, self.batch)
        return metrics


def paired(
    first: Callable[[], float], second: Callable[[], float], *, rounds: int, warm_up: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Times of two things measured in turn, first and second swapped each round: drift meets both alike.

    Args:
        first: Does one of them once and returns its seconds.
        second: The same of the other.
        rounds: Pairs.
        warm_up: Pairs that do not count.
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
