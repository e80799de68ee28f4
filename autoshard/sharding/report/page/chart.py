"""A chart of plans: time of a step against memory of a device, both on logarithmic scales.

It is made of positioned elements, not of a picture: text keeps its size in a narrow window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from autoshard._units import bytes_text, time_text

PAD = 0.05  # of the chart, free at its edges
TICKS = 5
FAR = 10  # times the chosen plan's time, or the limit: what is beyond would press the rest together


@dataclass(frozen=True)
class Point:
    """A plan: bytes, microseconds, its classes (`won`, `fit` or `unfit` first), its text."""

    nbytes: float
    time_us: float
    classes: str
    title: str


@dataclass(frozen=True)
class Scale:
    """A logarithmic scale."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Scale:
        """A scale that holds all of the values, and some room beside them."""
        low, high = math.log(min(values)), math.log(max(values))
        room = max((high - low) * PAD, 0.02)
        return cls(low - room, high + room)

    def at(self, value: float) -> float:
        """Where a value is, in percent."""
        return 100 * (math.log(value) - self.low) / (self.high - self.low)

    def ticks(self, base: float, steps: Sequence[float]) -> list[float]:
        """Round values on the scale, few enough to be read; `steps` are those of a decade of `base`."""
        first = math.floor(self.low / math.log(base))
        last = math.ceil(self.high / math.log(base))
        found = [base**k * s for k in range(first, last + 1) for s in steps]
        inside = [v for v in found if self.low <= math.log(v) <= self.high]
        return inside[:: -(-len(inside) // TICKS)] if inside else []


def scatter(points: Sequence[Point], limit: float, time_us: float) -> str:
    """The chart; empty where there is nothing that it could show.

    Args:
        points: the plans.
        limit: bytes that a device has, 0 if unknown.
        time_us: of the chosen plan.
    """
    far_us, far_bytes = FAR * time_us or math.inf, FAR * limit or math.inf
    drawn = [p for p in points if 0 < p.nbytes <= far_bytes and 0 < p.time_us <= far_us]
    drawn = [p for p in drawn if p.nbytes < math.inf and p.time_us < math.inf]
    if not drawn:
        return ""
    far = len(points) - len(drawn)
    beside = f"{far} that take over {FAR} times the time or the limit are not drawn" if far else ""
    edge = [limit] if 0 < limit < math.inf else []
    across = Scale.over([p.nbytes for p in drawn] + edge)
    up = Scale.over([p.time_us for p in drawn])
    dots = "".join(_dots(drawn, across, up))
    best = sum(p.classes.startswith(("fit", "won")) for p in drawn)
    label = (f"time of a step against memory of a device for {len(drawn)} plans, of which {best} fit; the table below "
             "lists them")  # fmt: skip
    beyond = ""
    if edge:
        at = across.at(limit)
        side = "left" if at < 70 else "right"
        beyond = (f'<i class="beyond" style="left:{at:.2f}%"></i><span class="limit {side}" style="left:{at:.2f}%">'
                  f"limit {bytes_text(limit)}</span>")  # fmt: skip
    return (
        f'<div class="chart" role="img" aria-label="{escape(label)}"><span class="y-name">time of a step</span>'
        f'<div class="plot">{_axes(across, up)}{beyond}{_front(drawn, across, up)}{dots}</div>'
        f'<span class="x-name">memory of a device</span></div>{_chart_key(drawn, beside)}'
    )


def _chart_key(points: Sequence[Point], beside: str) -> str:
    words = {"won": "chosen", "fit": "fits", "unfit": "does not fit"}
    here = {p.classes.split()[0] for p in points}
    keys = "".join(f'<span><i class="pt {c}"></i>{w}</span>' for c, w in words.items() if c in here)
    line = '<span><i class="front-key"></i>nothing is both faster and smaller</span>'
    return f'<p class="chart-key">{keys}{line}{f"<span>{beside}</span>" if beside else ""}</p>'


def _dots(points: Sequence[Point], across: Scale, up: Scale) -> Iterator[str]:
    """The points, the chosen one last and so on top; of those that would hide each other only the first."""
    taken = set()
    for p in sorted(points, key=lambda p: p.classes.startswith("won")):
        x, y = across.at(p.nbytes), up.at(p.time_us)
        place = (round(x * 3), round(y * 3), p.classes)
        if place not in taken:
            taken.add(place)
            yield f'<i class="pt {p.classes}" style="left:{x:.2f}%;bottom:{y:.2f}%" title="{escape(p.title)}"></i>'


def _axes(across: Scale, up: Scale) -> str:
    xs = across.ticks(2.0, [1.0])
    ys = up.ticks(10.0, [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0])
    lines = [f'<i class="gx" style="left:{across.at(x):.2f}%"><b>{_round(bytes_text(x))}</b></i>' for x in xs]
    lines += [f'<i class="gy" style="bottom:{up.at(y):.2f}%"><b>{_round(time_text(y))}</b></i>' for y in ys]
    return "".join(lines)


def _round(text: str) -> str:
    """`2.00 s` as `2 s`."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def _front(points: Sequence[Point], across: Scale, up: Scale) -> str:
    """A line through the plans of which none is both faster and smaller."""
    best, path = math.inf, []
    for p in sorted(points, key=lambda p: (p.nbytes, p.time_us)):
        if p.time_us < best:
            x, y = across.at(p.nbytes), 100 - up.at(p.time_us)
            path += [f"H{x:.2f}", f"V{y:.2f}"] if path else [f"M{x:.2f} {y:.2f}"]
            best = p.time_us
    return (f'<svg class="front" aria-hidden="true" viewBox="0 0 100 100" preserveAspectRatio="none">'
            f'<path vector-effect="non-scaling-stroke" d="{"".join(path)}"/></svg>')  # fmt: skip
