"""A chart of plans: step time against memory per device, both on logarithmic scales.

The chart is positioned HTML elements, not an image, so text keeps its size in a narrow window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from autoshard._html.scales import LogScale, grid
from autoshard._shown import shown
from autoshard._units import bytes_text, time_text
from autoshard.sharding.report.constants import FAR_FROM_CHOSEN


@shown
@dataclass(frozen=True)
class Point:
    """A plan in the chart.

    Attributes:
        nbytes: Memory per device, in bytes.
        time_us: Step time, in microseconds.
        classes: CSS classes; the first is `won`, `fit` or `unfit`.
        title: Its description.
    """

    nbytes: float
    time_us: float
    classes: str
    title: str


def scatter(points: Sequence[Point], limit: float, time_us: float) -> str:
    """Return the HTML of the chart; empty if no plan can be drawn.

    Args:
        points: The plans.
        limit: Memory of a device in bytes; 0 if unknown.
        time_us: Step time of the chosen plan, in microseconds.
    """
    far_us, far_bytes = FAR_FROM_CHOSEN * time_us or math.inf, FAR_FROM_CHOSEN * limit or math.inf
    drawn = [p for p in points if 0 < p.nbytes <= far_bytes and 0 < p.time_us <= far_us]
    drawn = [p for p in drawn if p.nbytes < math.inf and p.time_us < math.inf]
    if not drawn:
        return ""
    far = len(points) - len(drawn)
    omitted = f"not drawn: {far} with over {FAR_FROM_CHOSEN} times the step time or the limit" if far else ""
    edge = [limit] if 0 < limit < math.inf else []
    across = LogScale.over([p.nbytes for p in drawn] + edge)
    up = LogScale.over([p.time_us for p in drawn])
    dots = "".join(_dots(drawn, across, up))
    fitting = sum(p.classes.startswith(("fit", "won")) for p in drawn)
    label = f"step time against memory per device: {len(drawn)} plans, {fitting} of which fit; see the table below"
    beyond = ""
    if edge:
        at = across.at(limit)
        side = "left" if at < 70 else "right"
        beyond = (f'<i class="beyond" style="left:{at:.2f}%"></i><span class="limit {side}" style="left:{at:.2f}%">'
                  f"limit {bytes_text(limit)}</span>")  # fmt: skip
    return (
        f'<div class="chart" role="img" aria-label="{escape(label)}"><span class="y-name">step time</span>'
        f'<div class="plot">{_axes(across, up)}{beyond}{_front(drawn, across, up)}{dots}</div>'
        f'<span class="x-name">memory per device</span></div>{_chart_key(drawn, omitted)}'
    )


def _chart_key(points: Sequence[Point], omitted: str) -> str:
    words = {"won": "chosen", "fit": "fits", "unfit": "does not fit"}
    used = {p.classes.split()[0] for p in points}
    keys = "".join(f'<span><i class="pt {c}"></i>{w}</span>' for c, w in words.items() if c in used)
    line = '<span><i class="front-key"></i>Pareto front</span>'
    return f'<p class="chart-key">{keys}{line}{f"<span>{omitted}</span>" if omitted else ""}</p>'


def _dots(points: Sequence[Point], across: LogScale, up: LogScale) -> Iterator[str]:
    """Yield the points. The chosen one comes last, so it is on top. Of equal points at one place, only one is drawn."""
    taken = set()
    for p in sorted(points, key=lambda p: p.classes.startswith("won")):
        x, y = across.at(p.nbytes), up.at(p.time_us)
        place = (round(x * 3), round(y * 3), p.classes)
        if place not in taken:
            taken.add(place)
            yield f'<i class="pt {p.classes}" style="left:{x:.2f}%;bottom:{y:.2f}%" title="{escape(p.title)}"></i>'


def _axes(across: LogScale, up: LogScale) -> str:
    xs = across.ticks(2.0, [1.0])
    return grid(
        [(across.at(x), _round(bytes_text(x))) for x in xs], [(up.at(y), _round(time_text(y))) for y in up.ticks()]
    )


def _round(text: str) -> str:
    """Drop trailing zeros: `2.00 s` becomes `2 s`."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def _front(points: Sequence[Point], across: LogScale, up: LogScale) -> str:
    """Draw the Pareto front: no plan is both faster and smaller than one on it."""
    best, path = math.inf, []
    for p in sorted(points, key=lambda p: (p.nbytes, p.time_us)):
        if p.time_us < best:
            x, y = across.at(p.nbytes), 100 - up.at(p.time_us)
            path += [f"H{x:.2f}", f"V{y:.2f}"] if path else [f"M{x:.2f} {y:.2f}"]
            best = p.time_us
    return (f'<svg class="front" aria-hidden="true" viewBox="0 0 100 100" preserveAspectRatio="none">'
            f'<path vector-effect="non-scaling-stroke" d="{"".join(path)}"/></svg>')  # fmt: skip
