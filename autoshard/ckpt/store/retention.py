"""When to save a step, and which steps to keep."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autoshard._shown import shown
from autoshard._typed import short_repr
from autoshard.ckpt.store.argument_checks import is_integer
from autoshard.errors import CheckpointError


@shown
@dataclass(frozen=True)
class RetentionPolicy:
    """Which committed steps stay: the union of `last`, `best` and `every`. The newest step always stays.

    Attributes:
        last: how many of the newest steps stay; None for all.
        best: how many of the best steps by `metric` stay. Only steps with a finite value of the metric count.
        metric: a name in the `metrics` of `save`.
        mode: whether smaller (`min`) or larger (`max`) values are better. Of equal values the newer step stays.
        every: multiples of this number stay forever; 0 for none.

    Example:
        >>> losses = {10: {"loss": 2.0}, 20: {"loss": 1.0}, 30: {"loss": 1.5}, 40: {}}
        >>> sorted(RetentionPolicy(last=1, best=1, metric="loss", every=30).of(losses))
        [20, 30, 40]
    """

    last: int | None = 3
    best: int = 0
    metric: str = ""
    mode: Literal["min", "max"] = "min"
    every: int = 0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            CheckpointError: naming each invalid setting.
        """
        numbers = {name: getattr(self, name) for name in ("last", "best", "every")}
        wrong = [
            f"{name} is {value!r}; it must be an integer"
            for name, value in numbers.items()
            if not is_integer(value) and not (name == "last" and value is None)
        ]
        if not isinstance(self.metric, str):
            wrong.append(f"metric is {self.metric!r}; it must be the name of a metric")
        if wrong:
            raise CheckpointError(f"{'; '.join(wrong)}.")
        if self.last is not None and self.last < 1:
            wrong.append(f"last is {self.last}; it must be at least 1, or None to keep all steps")
        wrong += [
            f"{name} is {getattr(self, name)}; it must be at least 0"
            for name in ("best", "every")
            if getattr(self, name) < 0
        ]
        if self.best > 0 and not self.metric:
            wrong.append(f"best is {self.best}, but no metric is given; give metric= the name of one")
        if self.mode not in ("min", "max"):
            wrong.append(f"mode is {self.mode!r}; it must be 'min' or 'max'")
        if wrong:
            raise CheckpointError(f"{'; '.join(wrong)}.")

    def of(self, steps: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return which of `steps`, a mapping step -> metrics, stay."""
        ordered = sorted(steps)
        if self.last is None:
            return set(ordered)
        kept = set(ordered[-self.last :])
        if self.every:
            kept |= {step for step in ordered if step % self.every == 0}
        if self.best:
            sign = 1 if self.mode == "min" else -1
            scored = [(sign * value, -step) for step in ordered if math.isfinite(value := self._value(steps[step]))]
            kept |= {-negative for _, negative in sorted(scored)[: self.best]}
        return kept

    def _value(self, metrics: Mapping[str, float]) -> float:
        return metrics.get(self.metric, math.nan)


@shown
@dataclass
class SaveEvery:
    """When a training loop saves: every `steps` steps or every `minutes` minutes, whichever comes first.

    Attributes:
        steps: training steps between two saves; 0 for no such rule.
        minutes: minutes between two saves; 0 for no such rule.
        now: a clock in seconds.
        agreed: maps the answer of this process to one answer for all processes, whose clocks differ.
        asked_every: steps between checks of the clock. With several processes each check is a round trip.
    """

    steps: int = 0
    minutes: float = 0.0
    now: Callable[[], float] = time.monotonic
    agreed: Callable[[bool], bool] = bool
    asked_every: int = 1
    _since: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._since = self.now()

    def due(self, step: int) -> bool:
        """Return whether to save after this step. All processes must call this at the same steps."""
        if self.steps and step % self.steps == 0:
            return True
        if not self.minutes or step % self.asked_every:
            return False
        return self.agreed(self.now() - self._since >= 60.0 * self.minutes)

    def saved(self) -> None:
        """Restart the clock."""
        self._since = self.now()


def expired_steps(
    keep: RetentionPolicy,
    steps: Sequence[int],
    metrics_of: Callable[[int], Mapping[str, float]],
    own: Container[int] = (),
) -> list[int]:
    """Return the steps that do not stay.

    Args:
        keep: the policy.
        steps: all committed steps.
        metrics_of: returns the metrics of a step; called only if the policy needs them.
        own: the steps that this run saved. The policy also applies to them alone: after a run went back to an earlier
            step, they have lower numbers than steps that were saved before.

    Raises:
        CheckpointError: `keep` is not a policy.
    """
    if not isinstance(keep, RetentionPolicy):
        raise CheckpointError(f"keep is {short_repr(keep)}; give a policy such as RetentionPolicy(last=2).")
    metrics = {step: metrics_of(step) if keep.best else {} for step in steps}
    kept = keep.of(metrics) | keep.of({step: values for step, values in metrics.items() if step in own})
    return [step for step in steps if step not in kept]
