"""A chart of curves over steps: an inline SVG, with HTML for its axes so that text keeps its size in a narrow window.

The page's script shows the values at the step under the pointer. It reads them from the attribute `data-curves`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from autoshard._html.scales import LinearScale, LogScale, grid
from autoshard._shown import shown
from autoshard.train.report.constants import BUCKETS, LOG_RATIO, SMOOTHED
from autoshard.train.report.series import Numbers, Series, runs, smoothed, thinned

Marks = Sequence[tuple[int, str, str]]  # step, CSS class, title


@shown
@dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        name: What it is.
        css: CSS class of its colour.
        steps: Its steps, `[records]`.
        values: Its finite values, `[records]`.
        dots: Whether each value has a dot.
        shown: Whether the script shows its values.
    """

    name: str
    css: str
    steps: Numbers
    values: Numbers
    dots: bool = False
    shown: bool = True


def curves_of(name: str, css: str, series: Series, *, smooth: bool = False, dots: bool = False) -> list[Curve]:
    """Return the curve of a metric; with `smooth`, a pale one of its values and one of their moving average."""
    steps, values = series.finite
    if not len(steps):
        return []
    if not smooth or len(steps) < SMOOTHED:
        return [Curve(name, css, steps, values, dots)]
    return [
        Curve(name, f"{css} raw", steps, values),
        Curve(f"{name}, moving average", css, steps, smoothed(values), shown=False),
    ]


def chart(
    title: str,
    curves: Sequence[Curve],
    text: Callable[[float], str],
    *,
    marks: Marks = (),
    from_zero: bool = False,
    last_step: int = 0,
) -> str:
    """Return the HTML of a chart; empty without values.

    Args:
        title: What the vertical axis is, with its unit.
        curves: The curves.
        text: Formats a value.
        marks: Vertical lines at steps.
        from_zero: Whether the vertical axis starts at zero.
        last_step: The last step of the run, so that all charts have the same horizontal axis.
    """
    drawn = [curve for curve in curves if len(curve.steps)]
    if not drawn:
        return ""
    values = np.concatenate([curve.values for curve in drawn])
    is_log = not from_zero and values.min() > 0 and values.max() > LOG_RATIO * np.median(values)
    up = LogScale.over(_ends(values)) if is_log else LinearScale.over([*_ends(values), *([0.0] if from_zero else [])])
    if from_zero and values.min() >= 0:
        up = LinearScale(0.0, up.high)
    firsts = [float(curve.steps.min()) for curve in drawn]
    across = LinearScale.over([min(firsts), max(last_step, *(float(c.steps.max()) for c in drawn))], pad=0.0)
    points = [_thinned(curve) for curve in drawn]
    paths = "".join(_path(c, p, across, up) for c, p in zip(drawn, points, strict=True))
    dots = "".join(_dots(c, p, across, up) for c, p in zip(drawn, points, strict=True) if c.dots)
    lines = "".join(
        f'<i class="when {css}" style="left:{across.at(step):.3f}%" title="{escape(words)}"></i>'
        for step, css, words in marks
        if across.low <= step <= across.high
    )
    data = [[c.name, [[[int(s), float(f"{v:.6g}")] for s, v in zip(*run, strict=True)] for run in p]]
            for c, p in zip(drawn, points, strict=True) if c.shown]  # fmt: skip
    key = "".join(f'<span><i class="line {c.css}"></i>{escape(c.name)}</span>' for c in drawn)
    axes = grid([(across.at(x), _step_text(x)) for x in across.ticks()], [(up.at(y), text(y)) for y in up.ticks()])
    label = f"{title} by step: " + "; ".join(_words(c, text) for c in drawn if c.shown)
    scale = ", logarithmic scale" if is_log else ""
    return (
        f'<div class="chart lines" role="img" aria-label="{escape(label)}"><span class="y-name">{escape(title + scale)}'
        f'</span><div class="plot" data-low="{across.low:g}" data-high="{across.high:g}" '
        f'data-curves="{escape(json.dumps(data, separators=(",", ":")))}">{axes}{lines}'
        f'<svg aria-hidden="true" viewBox="0 0 1000 1000" preserveAspectRatio="none">{paths}</svg>{dots}'
        f'<i class="cross" hidden></i></div><span class="x-name">step</span></div>'
        f'<p class="chart-key">{key}<output></output></p>'
    )


def _ends(values: Numbers) -> list[float]:
    return [float(values.min()), float(values.max())]


def _thinned(curve: Curve) -> list[tuple[Numbers, Numbers]]:
    parts = runs(curve.steps)
    share = max(BUCKETS // len(parts), 2)
    return [thinned(curve.steps[part], curve.values[part], share) for part in parts]


def _path(
    curve: Curve, points: Sequence[tuple[Numbers, Numbers]], across: LinearScale, up: LinearScale | LogScale
) -> str:
    words = []
    for steps, values in points:
        pairs = [f"{10 * across.at(s):.1f} {1000 - 10 * up.at(v):.1f}" for s, v in zip(steps, values, strict=True)]
        words.append("M" + "L".join(pairs))
    return f'<path class="{curve.css}" vector-effect="non-scaling-stroke" d="{"".join(words)}"/>'


def _dots(
    curve: Curve, points: Sequence[tuple[Numbers, Numbers]], across: LinearScale, up: LinearScale | LogScale
) -> str:
    return "".join(
        f'<i class="dot {curve.css}" style="left:{across.at(s):.2f}%;bottom:{up.at(v):.2f}%"></i>'
        for steps, values in points
        for s, v in zip(steps, values, strict=True)
    )


def _step_text(step: float) -> str:
    return f"{step:,.0f}" if step < 10_000 else f"{step / 1000:,.4g}k" if step < 1e6 else f"{step / 1e6:,.4g}M"


def _words(curve: Curve, text: Callable[[float], str]) -> str:
    first, last = float(curve.values[0]), float(curve.values[-1])
    return f"{curve.name} {text(first)} at step {curve.steps[0]:.0f}, {text(last)} at step {curve.steps[-1]:.0f}"
