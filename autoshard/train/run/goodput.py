"""Where the time of a run goes: steps that count, and everything else by cause, over all attempts.

plan, compile, restore, data, evaluation, save      measured in this process
start                                               the rest of the time before the first step of an attempt
lost                                                steps that are done again: those after the last save of an attempt,
                                                    and those that a rollback undoes
between                                             from the end of an attempt to the beginning of the next
steps                                               the rest
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from autoshard._units import duration_text, percent_text

T = TypeVar("T")
STEPS, START, LOST, BETWEEN = "steps", "start", "lost", "between"
_NAMES = {LOST: "lost work", BETWEEN: "between attempts"}


class Goodput:
    """Measures the time of one attempt by cause, in seconds."""

    def __init__(self) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._inside = False
        self._steps_begun = False

    def begin_steps(self) -> None:
        """Count the time so far that has no cause as `start`, and from now on as `steps`."""
        self._spent[START] += self._rest()
        self._steps_begun = True

    @property
    def steps_seconds(self) -> float:
        """Seconds of the steps that count so far."""
        return self._rest() if self._steps_begun else 0.0

    def lose_steps_after(self, seconds: float) -> None:
        """Count the time of steps as `lost`, except the first `seconds` of it, because they are done again."""
        self._spent[LOST] += max(self._rest() - seconds, 0.0)

    @contextlib.contextmanager
    def spent_on(self, cause: str) -> Iterator[None]:
        """Count the time of the `with` block for a cause. Inside another such block it counts for the outer one."""
        if self._inside:
            yield
            return
        self._inside, begin = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside = False
            self._spent[cause] += time.perf_counter() - begin

    def waiting(self, items: Iterable[T], cause: str) -> Iterator[T]:
        """Yield the items; the time that each takes to arrive counts for a cause."""
        iterator, end = iter(items), object()
        while True:
            with self.spent_on(cause):
                item: Any = next(iterator, end)
            if item is end:
                return
            yield item

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each cause so far. Time without a cause is `start`, or `steps` after `begin_steps`."""
        return {STEPS if self._steps_begun else START: self._rest(), **self._spent}

    def _rest(self) -> float:
        return max(time.perf_counter() - self._begin - sum(self._spent.values()), 0.0)


def account(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Add up the time of a run over its attempts.

    Args:
        events: The events of `attempts.jsonl`, oldest first, with the seconds of their attempt so far.

    Returns:
        Seconds by cause, which add up to the time since the start of the first attempt. The time of an attempt after
        the step from which the next one continued is `lost`. Only times from one attempt to the next are read from the
        clock, which may jump.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    begins = [n for n, event in enumerate(events) if event["event"] == "begin"]
    for n, begin in enumerate(begins):
        until = begins[n + 1] if n + 1 < len(begins) else len(events)
        own = events[begin:until]
        if until < len(events):
            step = events[until]["step"]
            kept = [event for event in own if event["step"] <= step and event.get("attempt") == own[0]["attempt"]]
            _add(spent, kept[-1])
            alive = max(_time(events[until], "alive"), _time(own[-1]))
            started = _time(events[until]) - sum(events[until].get("seconds", {}).values())
            spent[LOST] += _between(kept[-1], own[-1]) + alive - _time(own[-1])
            spent[BETWEEN] += max(started - alive, 0.0)
        else:
            _add(spent, own[-1])
    return dict(spent)


def _between(event: Mapping[str, Any], later: Mapping[str, Any]) -> float:
    """Return the seconds between two events of an attempt."""
    if "seconds" in event and "seconds" in later:
        return max(sum(later["seconds"].values()) - sum(event["seconds"].values()), 0.0)
    return max(_time(later) - _time(event), 0.0)


def _add(spent: defaultdict[str, float], event: Mapping[str, Any]) -> None:
    for cause, seconds in event.get("seconds", {}).items():
        spent[cause] += seconds


def goodput_of(spent: Mapping[str, float]) -> float:
    """Return the share of the time that was spent in steps that count; 0 without any time."""
    whole = sum(spent.values())
    return spent.get(STEPS, 0.0) / whole if whole else 0.0


def goodput_text(spent: Mapping[str, float], attempts: int) -> str:
    """Return one line: the goodput and the time by cause, longest first.

    Example:
        >>> goodput_text({"steps": 90.0, "compile": 8.0, "save": 2.0}, 1)
        'goodput 90 % of 100 s: steps 90.0 s, compile 8.00 s, save 2.00 s'
    """
    whole = sum(spent.values())
    causes = sorted(spent.items(), key=lambda item: (item[0] != STEPS, -item[1]))
    parts = [f"{_NAMES.get(cause, cause)} {duration_text(seconds)}" for cause, seconds in causes if seconds > 0]
    times = f" in {attempts} attempts" if attempts > 1 else ""
    return f"goodput {percent_text(spent.get(STEPS, 0.0), whole)} of {duration_text(whole)}{times}: {', '.join(parts)}"


def _time(event: Mapping[str, Any], name: str = "time") -> float:
    """Return a time of an event in seconds since the epoch; 0 if it has none."""
    return datetime.fromisoformat(event[name]).timestamp() if event.get(name) else 0.0
