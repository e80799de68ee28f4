r"""What a step does if its loss or gradient is not finite, or if its loss is a spike.

The step judges itself on the device. A bad step returns the state that it was given, with the step counter advanced, so
the parameters, the optimizer's state, the moving average and the model's variables stay those of the last good step.
The verdict and the sums of squares of all gradients are metrics, so every process reads the same ones.

A spike is a loss :math:`l` (or gradient norm) with

.. math:: l > m + (f - 1) |m|

where :math:`m` is the median of the last `spike_window` good steps and :math:`f` is `spike_factor`; for positive losses
that is :math:`l > f m`. No step is a spike before the window is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autoshard._shown import shown
from autoshard.errors import ConfigError

Tree = Any
Reaction = Literal["stop", "skip", "rollback"]

GOOD, NON_FINITE, SPIKE = 0, 1, 2
VERDICT, SQUARES = "verdict", "gradient_squares"
SKIPPED, IN_A_ROW = "skipped_steps", "skips_in_a_row"


@shown
@dataclass(frozen=True)
class GuardConfig:
    """What a run does after a bad step: one whose loss or gradient is not finite, or a spike."""

    non_finite: Reaction = "stop"
    """After a step whose loss or gradient is not finite: `stop` ends the run with an error, `skip` leaves the update
    out and goes on, `rollback` restores the newest checkpoint and goes on behind the bad batch."""
    spikes: Reaction = "stop"
    """The same for a spike. Needs spike_factor."""
    spike_factor: float = 0.0
    """A step is a spike if its loss exceeds this many times the median of the last good steps; 0 looks for none."""
    spike_of: Literal["loss", "grad_norm"] = "loss"
    """What is compared with its median: the loss, or the norm of the gradient before clipping."""
    spike_window: int = 128
    """Good steps that the median is taken over. No step is a spike before there are as many."""
    max_skips: int = 10
    """Skipped steps in a row that end the run. So many bad batches in a row are unlikely: the model has diverged."""
    max_rollbacks: int = 3
    """Rollbacks of a run; the next one ends it. Each of them trains again from a checkpoint, which costs time."""

    def __post_init__(self) -> None:
        """Refuse invalid values, and report all of them at once."""
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("spike_window", "max_skips", "max_rollbacks")
            if getattr(self, name) < 1
        ]
        if self.spike_factor and not 1 < self.spike_factor < float("inf"):
            problems.append(f"spike_factor is {self.spike_factor}; it must be above 1 and finite, or 0")
        if self.spikes != "stop" and not self.spike_factor:
            problems.append(f"spikes is {self.spikes!r}, but no step is a spike: give spike_factor, such as 3")
        if problems:
            raise ConfigError("; ".join(problems))

    def reaction(self, verdict: int) -> Reaction:
        """Return what to do after a bad step."""
        return self.non_finite if verdict == NON_FINITE else self.spikes

    def unused_settings(self) -> dict[str, str]:
        """Return the settings that have no effect with the others, and what each needs."""
        reactions = (self.non_finite, self.spikes)
        spikes = [] if self.spike_factor else ["spike_of", "spike_window"]
        unused = dict.fromkeys(spikes, "--guard.spike-factor")
        for setting, reaction in (("max_skips", "skip"), ("max_rollbacks", "rollback")):
            if reaction not in reactions:
                unused[setting] = f"--guard.non-finite {reaction} or --guard.spikes {reaction}"
        return unused

    @property
    def skips(self) -> bool:
        """Whether the run goes on behind a step without its update."""
        return "skip" in (self.non_finite, self.spikes)


def first_guard(config: GuardConfig | None) -> Tree:
    """Make the guard's part of the train state before the first step; None if it needs none.

    Returns:
        `skipped_steps` and `skips_in_a_row`, int32 `[]`, if steps may be skipped; `recent_loss` or `recent_grad_norm`,
        float32 `[spike_window]`, the values of the last good steps, and `seen`, int32 `[]`, their number so far, if
        spikes are looked for.
    """
    if config is None or not (config.skips or config.spike_factor):
        return None
    guard = {name: jnp.zeros((), jnp.int32) for name in (SKIPPED, IN_A_ROW)} if config.skips else {}
    if config.spike_factor:
        guard |= {_recent(config): jnp.zeros((config.spike_window,), jnp.float32), "seen": jnp.zeros((), jnp.int32)}
    return guard


def kept_guard(guard: Mapping[str, jax.Array], first: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the guard's part of a state for changed settings: counts are kept, the window of spikes begins anew.

    Args:
        guard: The part that was saved.
        first: The part that the changed settings need, before the first step.
    """
    return {**first, **{name: guard[name] for name in (SKIPPED, IN_A_ROW) if name in guard and name in first}}


def _recent(config: GuardConfig) -> str:
    """The name of the window, by what is in it: losses are never compared with norms if a run changes `spike_of`."""
    return f"recent_{config.spike_of}"


def updates_so_far(step: jax.Array, guard: Tree) -> jax.Array:
    """Return the number of updates before a step, int32 `[]`: its number without the skipped steps."""
    return step if guard is None or SKIPPED not in guard else step - guard[SKIPPED]


def gradient_squares(gradients: Tree) -> list[jax.Array]:
    """Return the sum of squares of each gradient, `[]`; it is not finite if the gradient is not."""
    return [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)]


def judge(config: GuardConfig, guard: Tree, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, Tree]:
    """Judge a step.

    Args:
        config: The settings.
        guard: The guard's part of the train state before the step.
        loss: The step's loss, float32 `[]`.
        norm: The norm of its gradient, `[]`.

    Returns:
        The verdict, int32 `[]`, and the guard's part of the state after the step.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    verdict = jnp.where(finite, GOOD, NON_FINITE).astype(jnp.int32)
    if guard is None:
        return verdict, None
    after = dict(guard)
    if config.spike_factor:
        value = (loss if config.spike_of == "loss" else norm).astype(jnp.float32)
        recent, seen = guard[_recent(config)], guard["seen"]
        median = jnp.sort(recent)[config.spike_window // 2]
        limit = median + (config.spike_factor - 1.0) * jnp.abs(median)
        spike = finite & (seen >= config.spike_window) & (value > limit)
        verdict = jnp.where(spike, SPIKE, verdict).astype(jnp.int32)
        here = jnp.arange(config.spike_window) == seen % config.spike_window
        good = verdict == GOOD
        after[_recent(config)] = jnp.where(here & good, value, recent)
        after["seen"] = seen + good.astype(jnp.int32)
    if config.skips:
        bad = (verdict != GOOD).astype(jnp.int32)
        after[SKIPPED] = guard[SKIPPED] + bad
        after[IN_A_ROW] = (guard[IN_A_ROW] + 1) * bad
    return verdict, after


def unless_bad(verdict: jax.Array, before: Tree, after: Tree) -> Tree:
    """Return the part of the state after a good step, or the one before a bad step."""
    return jax.tree.map(lambda old, new: jnp.where(verdict == GOOD, new, old), before, after)
