"""Which steps are saved, and which of them stay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autoshard._shown import shown
from autoshard.ckpt.store.argument_checks import is_integer
from autoshard.errors import CheckpointError


@shown
@dataclass(frozen=True)
class RetentionPolicy:
    """Which committed steps stay: the union of what each of these asks for; the newest one always does.

    Attributes:
        last: so many of the newest; None for all of them.
        best: so many of the best by `metric`, among the steps that were saved with it and a finite value.
        metric: a name in `save`'s `metrics`.
        mode: whether a smaller (`min`) or a larger value (`max`) is better; of equal ones the newer stays.
        every: steps that this divides stay for ever; 0 for none.

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
        """Refuse what keeps nothing, or cannot be told.

        Raises:
            CheckpointError: naming each setting that is wrong.
        """
        numbers = {name: getattr(self, name) for name in ("last", "best", "every")}
        wrong = [
            f"{name}={value!r} is no integer"
            for name, value in numbers.items()
            if not is_integer(value) and not (name == "last" and value is None)
        ]
        if not isinstance(self.metric, str):
            wrong.append(f"metric={self.metric!r} is no name")
        if wrong:
            raise CheckpointError(f"{'; '.join(wrong)}.")
        if self.last is not None and self.last < 1:
            wrong.append(f"last={self.last}: at least one step must stay, or None for all")
        wrong += [f"{name}={getattr(self, name)} is negative" for name in ("best", "every") if getattr(self, name) < 0]
        if self.best > 0 and not self.metric:
            wrong.append(f"best={self.best} needs the name of a metric")
        if self.mode not in ("min", "max"):
            wrong.append(f"mode={self.mode!r} is neither 'min' nor 'max'")
        if wrong:
            raise CheckpointError(f"{'; '.join(wrong)}.")

    def of(self, steps: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps that stay, of these with their metrics."""
        ordered = sorted(steps)
        if self.last is None:
            return set(ordered)
        kept = set(ordered[-self.last :])
        if self.every:
            kept |= {step for step in ordered if step % self.every == 0}
        if self.best:
            sign = 1 if self.mode == "min" else -1
            scored = [(sign * value, -step) for step in ordered if math.isfinite(value := self._value(steps[step]))]
            kept |= {-newest_first for _, newest_first in sorted(scored)[: self.best]}
        return kept

    def _value(self, metrics: Mapping[str, float]) -> float:
        return metrics.get(self.metric, math.nan)


@shown
@dataclass
class SaveEvery:
    """When a training loop saves: every so many steps, or after so many minutes, whichever comes first.

    Attributes:
        steps: of training between two saves; 0 for no such rule.
        minutes: between two saves; 0 for no such rule.
        now: a clock in seconds.
        agreed: makes one answer of those of all processes, whose clocks differ: usually the first process's.
        asked_every: steps between looks at the clock, which cost a round trip where there are several processes.
    """

    steps: int = 0
    minutes: float = 0.0
    now: Callable[[], float] = time.monotonic
    agreed: Callable[[bool], bool] = bool
    asked_every: int = 1
    _since: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """The clock starts."""
        self._since = self.now()

    def due(self, step: int) -> bool:
        """Whether to save after this step. All processes ask at the same steps."""
        if self.steps and step % self.steps == 0:
            return True
        if not self.minutes or step % self.asked_every:
            return False
        return self.agreed(self.now() - self._since >= 60.0 * self.minutes)

    def saved(self) -> None:
        """The minutes count from here."""
        self._since = self.now()


def expired_steps(
    keep: RetentionPolicy,
    steps: Sequence[int],
    metrics_of: Callable[[int], Mapping[str, float]],
    own: Container[int] = (),
) -> list[int]:
    """The steps that do not stay; metrics are asked for only where they decide.

    Args:
        keep: the rule.
        steps: all that there are.
        metrics_of: the metrics of one.
        own: those that were saved just now. They stay by the same rule among themselves: a run that went back to an
            earlier step has lower numbers than what it left behind.
    """
    known = {step: metrics_of(step) if keep.best else {} for step in steps}
    kept = keep.of(known) | keep.of({step: told for step, told in known.items() if step in own})
    return [step for step in steps if step not in kept]
