"""The charts of a run's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from autoshard._html.parts import folded, table
from autoshard._units import bytes_text, percent_text
from autoshard.train.report.attempts import attempts_of
from autoshard.train.report.constants import EVALUATIONS_LISTED, MARKS_DRAWN, OTHER_CHARTS
from autoshard.train.report.headline import done
from autoshard.train.report.line_chart import Curve, Marks, chart, curves_of
from autoshard.train.report.run_files import Run
from autoshard.train.report.series import Series

# Metrics that have a place of their own on the page, or that say the same as another one.
_PLACED = frozenset(
    "loss val_loss val_bits_per_byte learning_rate grad_norm tokens_per_second mfu eta_seconds goodput "
    "memory_bytes".split()
)


def marks_of(run: Run) -> list[tuple[int, str, str]]:
    """Return the lines that all charts have: where an attempt after the first began, and incidents."""
    marks = [
        (attempt.first, "", f"attempt {attempt.number} continued from step {attempt.first}")
        for attempt in attempts_of(run.attempts)[1:]
    ]
    incidents = [(record["step"], str(record.get("incident"))) for record in run.metrics.incidents]
    return marks + [(step, "bad", f"{kind} at step {step}") for step, kind in incidents[-MARKS_DRAWN:]]


def loss_section(run: Run) -> str:
    """Training loss and held-out loss, and the table of evaluations."""
    training = curves_of("training", "c-one", run.metrics.get("loss"), smooth=True)
    held_out = curves_of("held-out", "c-two", run.metrics.get("val_loss"), dots=True)
    drawn = _chart(run, f"loss, nats per {run.per}", [*training, *held_out], "{:.4g}".format)
    return f"{drawn}{_not_finite(run)}{_evaluations(run)}"


def optimizer_section(run: Run) -> str:
    """Learning rate and gradient norm, side by side."""
    rate = _chart(run, "learning rate", curves_of("learning rate", "c-one", run.metrics.get("learning_rate")), _short,
                  from_zero=True)  # fmt: skip
    norm = curves_of("gradient norm", "c-one", run.metrics.get("grad_norm"), smooth=True)
    return _side_by_side(rate, _chart(run, "gradient norm", norm, _short))


def throughput_section(run: Run) -> str:
    """Tokens per second and MFU, side by side."""
    tokens = curves_of("tokens per second", "c-one", run.metrics.get("tokens_per_second"), smooth=True)
    mfu = curves_of("MFU", "c-one", run.metrics.get("mfu"), smooth=True)
    return _side_by_side(
        _chart(run, "tokens per second", tokens, _short, from_zero=True),
        _chart(run, "model FLOPs utilization", mfu, lambda x: percent_text(x, 1.0), from_zero=True),
    )


def memory_section(run: Run) -> str:
    """Measured peak memory per device; empty if the devices do not report it."""
    peak = curves_of("peak so far", "c-one", run.metrics.get("memory_bytes"))
    return _chart(run, "memory of the fullest device", peak, bytes_text, from_zero=True)


def other_section(run: Run) -> str:
    """Metrics without a place of their own."""
    names = [name for name in sorted(run.metrics.series) if name not in _PLACED and not name.startswith("seconds_")]
    charts = [
        _chart(run, name, curves_of(name, "c-one", run.metrics.get(name), smooth=True), _short)
        for name in names[:OTHER_CHARTS]
    ]
    more = f'<p class="remark">{len(names) - OTHER_CHARTS} more are in metrics.jsonl.</p>'
    return _side_by_side(*charts) + (more if len(names) > OTHER_CHARTS else "")


def _chart(
    run: Run, title: str, curves: Sequence[Curve], text: Callable[[float], str], *, from_zero: bool = False
) -> str:
    marks: Marks = marks_of(run)
    last = max([done(run), *(step for step, _, _ in marks)])
    return chart(title, curves, text, marks=marks, from_zero=from_zero, last_step=last)


def _side_by_side(*charts: str) -> str:
    drawn = [f"<div>{each}</div>" for each in charts if each]
    return f'<div class="pair">{"".join(drawn)}</div>' if drawn else ""


def _short(value: float) -> str:
    """Format a value with few characters: `1.5e-05`, `0.003`, `4,000`, `42k`."""
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _not_finite(run: Run) -> str:
    """A line for each metric with values that are not finite: a curve cannot show them."""
    lines = []
    for name, series in run.metrics.series.items():
        gone = len(series.values) - len(series.finite[1])
        if gone:
            steps, values = series.arrays
            first = next(n for n, value in enumerate(values.tolist()) if value - value != 0)
            count = f"1 value of {name} is" if gone == 1 else f"{gone} values of {name} are"
            lines.append(f"{count} not finite, the first at step {steps[first]:,.0f}: {values[first]}.")
    return "".join(f'<p class="failed">{escape(line)}</p>' for line in lines)


def _evaluations(run: Run) -> str:
    """Every evaluation, as a folded table."""
    columns = {name: _by_step(run.metrics.series[name]) for name in sorted(run.metrics.series)
               if name.startswith("val_")}  # fmt: skip
    steps = sorted({step for values in columns.values() for step in values})
    if not steps:
        return '<p class="remark">The run has no evaluation yet.</p>' if "loss" in run.metrics.series else ""
    names = ["val_loss", *(name for name in columns if name != "val_loss")] if "val_loss" in columns else [*columns]
    rows = [
        [f"{step:,}", *(f"{columns[name][step]:.5g}" if step in columns[name] else "-" for name in names)]
        for step in steps[::-1]
    ]
    head = ["step", *(escape(name.removeprefix("val_").replace("_", " ")) for name in names)]
    listed = table(head, rows[:EVALUATIONS_LISTED], range(1, len(head)), wide=())
    count = f"{len(rows)} evaluation{'s' * (len(rows) > 1)}"
    newest = f", the newest {EVALUATIONS_LISTED} of which are shown" if len(rows) > EVALUATIONS_LISTED else ""
    return folded(count + newest, listed)


def _by_step(series: Series) -> Mapping[int, float]:
    return {int(step): value for step, value in zip(series.steps, series.values, strict=True)}
