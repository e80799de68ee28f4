"""Records of `kernels=`: what it replaced in a program, and what it found but did not replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from autoshard._shown import shown
from autoshard._typed import short_repr
from autoshard.errors import PlanError

KernelWord = Literal["off", "auto", "require"]
"""A word of `kernels=`."""
WORDS: tuple[KernelWord, ...] = get_args(KernelWord)


@shown
@dataclass(frozen=True)
class KernelRecord:
    """One operator that was found in the user's code.

    Attributes:
        kernel: the kernel that computes it now, or that would: `splash`, `cudnn`, `blockwise`, `megablox`, `triton`.
        line: the user's line, `models/gpt.py:12 (function)`.
        replaced: whether the kernel takes its place.
        reason: what was proven if it was replaced; else why it was left.
        count: how many places of the program come from this line, such as unrolled layers.
        operator: what was found: `attention` or `grouped product`.
    """

    kernel: str
    line: str
    replaced: bool
    reason: str
    count: int = 1
    operator: str = "attention"

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        what = f"{self.kernel} takes its place" if self.replaced else "left as it is"
        return f"{self.operator} at {self.line}{times}: {what}: {self.reason}"


def read_word(value: Any) -> KernelWord:
    """Check `kernels=`.

    Raises:
        PlanError: it is none of the words.
    """
    if value not in WORDS:
        raise PlanError(f"kernels is {short_repr(value)}; it must be 'off', 'auto' or 'require'")
    return value
