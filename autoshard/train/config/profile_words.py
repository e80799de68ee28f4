"""The words of the setting `profile`: which steps are recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.errors import ConfigError


@shown
@dataclass(frozen=True)
class Window:
    """The steps of a trace, as the log numbers them: from 1, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def read_profile(text: str | None, steps: int) -> Window | None:
    """Read the words of the setting `profile`; None stays None.

    Args:
        text: `10` or `10:12`.
        steps: Steps of the run.

    Raises:
        ConfigError: The text has another form, or the run has no such steps.

    Example:
        >>> print(read_profile("10:12", 100))
        steps 10 to 12
    """
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", text.strip())
    if not found:
        raise ConfigError(f"profile is {text!r}; write a step, such as 10, or the first and last, such as 10:12")
    window = Window(int(found[1]), int(found[2] or found[1]))
    if window.first < 1 or window.last < window.first:
        raise ConfigError(f"profile is {text!r}; steps are numbered from 1, and the last is not before the first")
    if window.last > steps:
        raise ConfigError(f"profile is {text!r}, but the run ends at step {steps}: give steps up to {steps}")
    return window


def profile_problems(text: str | None, steps: int) -> list[str]:
    """Return why the setting `profile` is not valid."""
    try:
        read_profile(text, steps)
    except ConfigError as error:
        return [str(error)]
    return []
