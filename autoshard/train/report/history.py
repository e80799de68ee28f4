"""What happened to a run: its time by cause, its attempts, incidents and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from autoshard._html.parts import folded, key, stack, table
from autoshard._units import bytes_text, duration_text, percent_text
from autoshard.train.report.attempts import CAUSES, AttemptRecord, attempts_of, spent, when
from autoshard.train.report.constants import (
    CHECKPOINTS_LISTED,
    CHECKPOINTS_SHOWN,
    INCIDENTS_LISTED,
    INCIDENTS_SHOWN,
    REASON_LENGTH,
    REASON_SHOWN,
)
from autoshard.train.report.run_files import Checkpoint, Run
from autoshard.train.run.goodput import BETWEEN, LOST, STEPS

_CLASSES = (STEPS, "compile", "evaluation", "save", "restore", "data", "plan", "start", LOST, BETWEEN)
_INCIDENTS = {
    "skip": "the step was skipped",
    "rollback": "went back to a checkpoint",
    "stop": "the run stopped",
}


def goodput_section(run: Run) -> str:
    """The time of the run by cause, as a bar and a table; empty without attempts."""
    seconds = {cause: each for cause, each in spent(run.attempts).items() if each > 0}
    whole = sum(seconds.values())
    if not whole:
        return ""
    ranked = sorted(seconds.items(), key=lambda item: (item[0] != STEPS, -item[1]))
    names = {cause: CAUSES.get(cause, cause) for cause in seconds}
    parts = [(_css(cause), f"{names[cause]}: {duration_text(each)}", each) for cause, each in ranked]
    label = f"time by cause, of {duration_text(whole)}: " + ", ".join(title for _, title, _ in parts)
    rows = [
        [key(_css(cause)) + escape(names[cause]), duration_text(each), percent_text(each, whole)]
        for cause, each in ranked
    ]
    share = percent_text(seconds.get(STEPS, 0.0), whole)
    figure = f"{share} <small>of {duration_text(whole)} in steps that count</small>"
    listed = table(["cause", "time", "share"], rows, (1, 2), wide=())
    attempts = attempts_of(run.attempts)
    until = ""
    if attempts[-1].kind == "open":
        until = '<p class="remark">Up to the last recorded event. The attempt in progress writes one at each save.</p>'
    return f'<p class="figure">{figure}</p>{stack(parts, whole, label)}{listed}{until}'


def _css(cause: str) -> str:
    return f"cause-{cause}" if cause in _CLASSES else "k-other"


def history_section(run: Run) -> str:
    """The attempts, and the incidents of the steps."""
    attempts = run_attempts(run)
    shown = [f"<h3>Attempts</h3>{_attempts(attempts)}"] if attempts else []
    shown += [f"<h3>Incidents</h3>{_incidents(run.metrics.incidents)}"] if run.metrics.incidents else []
    return "".join(shown)


def run_attempts(run: Run) -> list[AttemptRecord]:
    """Return the attempts; the last step of one in progress is that of its newest record of metrics."""
    attempts = attempts_of(run.attempts)
    if attempts and attempts[-1].kind == "open":
        attempts[-1] = replace(attempts[-1], last=max(attempts[-1].last, run.metrics.last_step))
    return attempts


def _attempts(attempts: Sequence[AttemptRecord]) -> str:
    rows, before = [], None
    for attempt in attempts:
        changed = before is not None and (before.devices, before.processes) != (attempt.devices, attempt.processes)
        rows.append([
            f"<b>{attempt.number}</b>", _time(attempt.begin),
            duration_text(attempt.seconds) if attempt.seconds else "-",
            f"{attempt.first:,}", f"{attempt.last:,}", _saves(attempt), _devices(attempt, changed), _ending(attempt),
        ])  # fmt: skip
        before = attempt
    head = ["attempt", "began", "lasted", "from step", "to step", "saved", "devices", "end"]
    return f'<div class="plain">{table(head, rows, (2, 3, 4))}</div>'


def _time(text: str) -> str:
    return f'<span class="nw">{escape(when(text))}</span>'


def _saves(attempt: AttemptRecord) -> str:
    return f'<span class="nw">{len(attempt.saves)} step{"s" * (len(attempt.saves) != 1)}</span>'


def _devices(attempt: AttemptRecord, changed: bool) -> str:
    processes = f" in {attempt.processes} processes" if (attempt.processes or 1) > 1 else ""
    text = escape(f"{attempt.devices if attempt.devices is not None else '?'}{processes}")
    return f'{text} <b class="bad">changed</b>' if changed else text


def _ending(attempt: AttemptRecord) -> str:
    """How it ended; a long reason is folded."""
    text = attempt.ending
    if len(text) > REASON_SHOWN:
        return folded(_coloured(attempt, text[:REASON_SHOWN] + "..."), f"<pre>{escape(text)}</pre>")
    return _coloured(attempt, text)


def _coloured(attempt: AttemptRecord, text: str) -> str:
    bad = attempt.kind in ("failed", "killed")
    return f'<span class="failed">{escape(text)}</span>' if bad else escape(text)


def _incidents(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for record in records[-INCIDENTS_LISTED:][::-1]:
        kind = str(record.get("incident"))
        why, leaf = (str(record.get(name) or "")[:REASON_LENGTH] for name in ("why", "leaf"))
        parameter = f"<code>{escape(leaf)}</code>" if leaf else ""
        batch = escape(str(record.get("batch", "")))
        rows.append([f"<b>{record['step']:,}</b>", escape(_INCIDENTS.get(kind, kind)), escape(why), parameter, batch])
    return _shown_and_folded(["step", "what", "why", "parameter", "batch"], rows, (), INCIDENTS_SHOWN, len(records))


def checkpoints_section(run: Run) -> str:
    """Every checkpoint that was saved, the newest first."""
    rows = [_row(checkpoint) for checkpoint in run.checkpoints[-CHECKPOINTS_LISTED:][::-1]]
    if not rows:
        return '<p class="remark">None yet.</p>' if run.attempts else ""
    kept = [each for each in run.checkpoints if each.file_bytes is not None]
    total = bytes_text(sum(each.file_bytes or 0 for each in kept))
    figure = f'<p class="figure">{total} <small>in {len(kept)} of {len(run.checkpoints)} that were saved</small></p>'
    head = ["step", "saved", "state", "files", "held-out loss", ""]
    return figure + _shown_and_folded(head, rows, (2, 3, 4), CHECKPOINTS_SHOWN, len(run.checkpoints))


def _row(checkpoint: Checkpoint) -> list[str]:
    fate = escape(checkpoint.fate)
    if checkpoint.fate.startswith("damaged"):
        fate = f'<span class="failed">{fate}</span>'
    elif checkpoint.fate == "removed":
        fate = f"<small>{fate}</small>"
    loss = checkpoint.metrics.get("val_loss")
    sizes = (checkpoint.state_bytes, checkpoint.file_bytes)
    return [
        f"<b>{checkpoint.step:,}</b>", _time(checkpoint.time),
        *("-" if size is None else bytes_text(size) for size in sizes), "-" if loss is None else f"{loss:.4f}", fate,
    ]  # fmt: skip


def _shown_and_folded(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], shown: int, total: int
) -> str:
    """A table of the first rows, the rest folded, and how many rows the page leaves out."""
    rest = folded(f"{len(rows) - shown} older", table(head, rows[shown:], right)) if len(rows) > shown else ""
    left_out = f'<p class="remark">{total - len(rows)} older ones are not listed.</p>' if total > len(rows) else ""
    return table(head, rows[:shown], right) + rest + left_out
