"""Scales of charts, with round values as ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from autoshard._shown import shown

PAD = 0.05  # margin at each edge, as a fraction of the chart; chosen
TICKS = 5  # largest number of ticks on an axis; chosen
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)  # steps between ticks, times a power of ten


@shown
@dataclass(frozen=True)
class LogScale:
    """A logarithmic scale between two logarithms."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> LogScale:
        """Return a scale over all values, which are positive, with a margin."""
        low, high = math.log(min(values)), math.log(max(values))
        margin = max((high - low) * PAD, 0.02)
        return cls(low - margin, high + margin)

    def at(self, value: float) -> float:
        """Return the position of a value, in percent."""
        return 100 * (math.log(value) - self.low) / (self.high - self.low)

    def ticks(self, base: float = 10.0, steps: Sequence[float] = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)) -> list[float]:
        """Return at most `TICKS` round values on the scale: powers of `base` times one of `steps`."""
        first = math.floor(self.low / math.log(base))
        last = math.ceil(self.high / math.log(base))
        values = [base**k * s for k in range(first, last + 1) for s in steps]
        inside = [v for v in values if self.low <= math.log(v) <= self.high]
        return inside[:: -(-len(inside) // TICKS)] if inside else []


@shown
@dataclass(frozen=True)
class LinearScale:
    """A linear scale between two values."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float], pad: float = PAD) -> LinearScale:
        """Return a scale over all values, with a margin of a fraction of their range."""
        low, high = min(values), max(values)
        if high == low:
            margin = abs(high) * PAD or 1.0
            return cls(low - margin, high + margin)
        return cls(low - (high - low) * pad, high + (high - low) * pad)

    def at(self, value: float) -> float:
        """Return the position of a value, in percent."""
        return 100 * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return at most `TICKS + 1` round values on the scale.

        Example:
            >>> LinearScale(0.0, 42.0).ticks()
            [0.0, 10.0, 20.0, 30.0, 40.0]
        """
        width = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(width))
        step = power * next((s for s in ROUND if s * power >= width * (1 - 1e-9)), ROUND[-1])
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def grid(across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]]) -> str:
    """Return the lines of a chart at the ticks of both axes, each with its text.

    Args:
        across: Position in percent and text of each tick of the horizontal axis.
        up: The same of the vertical axis.
    """
    lines = [f'<i class="gx" style="left:{at:.2f}%"><b>{escape(text)}</b></i>' for at, text in across]
    lines += [f'<i class="gy" style="bottom:{at:.2f}%"><b>{escape(text)}</b></i>' for at, text in up]
    return "".join(lines)
