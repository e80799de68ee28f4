"""The attempts of a run: where each began, what it saved and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autoshard._shown import shown
from autoshard.train.report.constants import REASON_LENGTH
from autoshard.train.run.cloud.maintenance import NOTICE
from autoshard.train.run.goodput import BETWEEN, LOST, STEPS, account

FINISHED = "finished"
CAUSES = {STEPS: "steps that count", LOST: "lost work", BETWEEN: "between attempts"}


@shown
@dataclass(frozen=True)
class AttemptRecord:
    """One attempt.

    Attributes:
        number: Its number, from 1.
        begin: When it began, as text.
        first: The step from which it began.
        saves: The steps that it saved.
        last: The last step that is known of it.
        devices: Number of devices; None if unknown.
        processes: Number of processes; None if unknown.
        reason: The recorded reason of its end; None without a recorded end.
        seconds: Seconds until its last event.
        is_last: Whether no later attempt began.
    """

    number: int
    begin: str
    first: int
    saves: tuple[int, ...]
    last: int
    devices: int | None
    processes: int | None
    reason: str | None
    seconds: float
    is_last: bool

    @property
    def kind(self) -> str:
        """How it ended: `finished`, `stopped` by a signal or notice, `failed`, `killed`; `open` if nothing says how."""
        if self.reason is None:
            return "open" if self.is_last else "killed"
        if self.reason == FINISHED:
            return "finished"
        return "stopped" if self.reason.startswith(("SIG", NOTICE)) else "failed"

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return {
            "finished": "finished",
            "stopped": f"{self.reason}: saved and stopped",
            "failed": f"failed: {(self.reason or '')[:REASON_LENGTH]}",
            "killed": "left no reason: killed, or its machine was lost",
            "open": "no end is recorded: in progress, or killed",
        }[self.kind]


def attempts_of(events: Sequence[Mapping[str, Any]]) -> list[AttemptRecord]:
    """Group the events of `attempts.jsonl` by attempt, oldest first."""
    begins = [n for n, event in enumerate(events) if event["event"] == "begin"]
    found = []
    for index, n in enumerate(begins):
        until = begins[index + 1] if index + 1 < len(begins) else len(events)
        begin, own = events[n], [event for event in events[n:until] if event["attempt"] == events[n]["attempt"]]
        ends = [event for event in own if event["event"] == "end"]
        found.append(
            AttemptRecord(
                number=begin["attempt"],
                begin=begin["time"],
                first=begin["step"],
                saves=tuple(event["step"] for event in own if event["event"] == "save"),
                last=max(event["step"] for event in own),
                devices=begin.get("devices"),
                processes=begin.get("processes"),
                reason=str(ends[-1].get("reason", "")) if ends else None,
                seconds=sum(_seconds(begin)) + _time(own[-1]) - _time(begin),
                is_last=index + 1 == len(begins),
            )
        )
    return found


def spent(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of a run by cause, up to its last event; empty without attempts."""
    return account(events) if any(event["event"] == "begin" for event in events) else {}


def when(text: str) -> str:
    """Format a time as `2026-11-26 20:03:48`; other text unchanged.

    Example:
        >>> when("2026-11-26T20:03:48.197+00:00")
        '2026-11-26 20:03:48'
    """
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text


def _time(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def _seconds(event: Mapping[str, Any]) -> list[float]:
    return list(event.get("seconds", {}).values())
