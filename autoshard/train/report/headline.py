"""The top of a run's page: its state and its main figures."""

from __future__ import annotations

from html import escape

import numpy as np

from autoshard._html.card import Card
from autoshard._units import bytes_text, duration_text, percent_text, time_text
from autoshard.sharding.report.page.compiled import compiled_audit
from autoshard.sharding.report.summary import mesh_text
from autoshard.train.report.attempts import CAUSES, attempts_of, spent, when
from autoshard.train.report.run_files import Run
from autoshard.train.report.series import smoothed
from autoshard.train.run.goodput import STEPS


def headline(run: Run) -> str:
    """The name of the run, its state, its main figures."""
    cards = "".join(card.html for card in _cards(run))
    problems = "".join(f'<p class="failed">{escape(problem)}</p>' for problem in run.problems)
    name = _name(run.place)
    place = f'<p class="remark">{escape(run.place)}</p>' if run.place != name else ""
    return f'<header><h1>{escape(name)}</h1>{place}{_state(run)}{problems}</header><div class="cards">{cards}</div>'


def _name(place: str) -> str:
    return place.rstrip("/").rpartition("/")[2] or place


def done(run: Run) -> int:
    """Return the steps that the run has done, as far as its files say."""
    return max([run.metrics.last_step, *(attempt.last for attempt in attempts_of(run.attempts)[-1:])])


def _state(run: Run) -> str:
    attempts = attempts_of(run.attempts)
    of = f" of {run.steps:,}" if run.steps is not None else ""
    progress = f"step {done(run):,}{of}"
    if not attempts:
        return f'<p class="state"><b>Not begun</b> {progress}. No attempt to train is recorded.</p>'
    last = attempts[-1]
    words = {"finished": "Finished", "stopped": "Stopped", "failed": "Failed", "open": "In progress, or killed"}
    began = f"Began {when(attempts[0].begin)}"
    again = f", {len(attempts)} attempts" if len(attempts) > 1 else ""
    since = f"; last recorded event {when(run.attempts[-1]['time'])}"
    why = f'<p class="failed">{escape(last.ending)}</p>' if last.kind == "failed" else ""
    how = f" by {escape(last.reason or '')}" if last.kind == "stopped" else ""
    return f'<p class="state"><b>{words[last.kind]}{how}</b> {progress}</p><p>{escape(began + since + again)}.</p>{why}'


def _cards(run: Run) -> list[Card]:
    cards = [*_loss_cards(run), *_rate_cards(run)]
    seconds = spent(run.attempts)
    if whole := sum(seconds.values()):
        lost = max((item for item in seconds.items() if item[0] != STEPS), key=lambda item: item[1], default=None)
        rest = (f"most of the rest: {CAUSES.get(lost[0], lost[0])}, {duration_text(lost[1])}",) if lost else ()
        cards.append(Card("goodput", percent_text(seconds.get(STEPS, 0.0), whole), f"of {duration_text(whole)}", rest))
    if memory := _memory_card(run):
        cards.append(memory)
    return cards


def _loss_cards(run: Run) -> list[Card]:
    cards = []
    steps, values = run.metrics.get("loss").finite
    if len(values):
        cards.append(
            Card(f"loss, nats per {run.per}", f"{smoothed(values)[-1]:.4f}", f"moving average at step {steps[-1]:,.0f}",
                 (f"{values[-1]:.4f} in the last record", f"{values[0]:.4f} at step {steps[0]:,.0f}"))
        )  # fmt: skip
    steps, values = run.metrics.get("val_loss").finite
    if len(values):
        best = int(values.argmin())
        bits = run.metrics.get("val_bits_per_byte").finite[1]
        remarks = [f"smallest {values[best]:.4f}, at step {steps[best]:,.0f}"]
        remarks += [f"{bits[-1]:.4f} bits per byte"] if len(bits) else []
        cards.append(Card("held-out loss", f"{values[-1]:.4f}", f"at step {steps[-1]:,.0f}", tuple(remarks)))
    return cards


def _rate_cards(run: Run) -> list[Card]:
    _, rates = run.metrics.get("tokens_per_second").finite
    if not len(rates):
        return []
    _, mfu = run.metrics.get("mfu").finite
    rate = float(np.median(rates))
    cards = [Card("tokens per second", f"{rate:,.0f}", "median of the records", (f"{rates[-1]:,.0f} in the last",))]
    if len(mfu):
        last = f"{mfu[-1]:.1%} in the last"
        cards.append(Card("MFU", f"{float(np.median(mfu)):.1%}", "median of the records", (last,)))
    plan = run.plans[-1].plan if run.plans else None
    if run.tokens_per_step and rate > 0:
        planned = (f"planned {time_text(plan.estimate.step_time_us)}",) if plan is not None else ()
        cards.append(Card("step time", time_text(1e6 * run.tokens_per_step / rate), "from the throughput", planned))
    return cards


def _memory_card(run: Run) -> Card | None:
    plan = run.plans[-1].plan if run.plans else None
    _, measured = run.metrics.get("memory_bytes").finite
    if plan is None:
        return None
    audit = compiled_audit(plan)
    planned = (audit.peak_bytes if audit else None) or plan.estimate.peak_memory_bytes
    limit = (f"limit {bytes_text(plan.limit_bytes)}",) if plan.limit_bytes else ()
    if len(measured):
        peak = float(measured.max())
        return Card("memory per device", bytes_text(peak), "peak, measured",
                    (f"planned {bytes_text(planned)}", *limit))  # fmt: skip
    return Card("memory per device", bytes_text(planned), "planned", (mesh_text(plan), *limit))
