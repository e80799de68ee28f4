"""Attempts to train a run: when each began and how it ended, and when to give up.

A launcher starts a run again after every loss of a process. If several attempts in a row save no new step, the cause
will not go away by itself, so another attempt is refused. Attempts are recorded in the run's folder, so every launcher
counts the same ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jax

from autoshard._processes import RESTARTS
from autoshard._shown import shown
from autoshard.errors import AutoshardError, ConfigError
from autoshard.train.config import run_directory
from autoshard.train.run import distributed
from autoshard.train.run.cloud.maintenance import NOTICE
from autoshard.train.run.goodput import Goodput, account


@shown
class Attempt:
    """This attempt to train a run. Only the main process writes.

    Attributes:
        goodput: Measures its time by cause.
        number: Its number, from 1; 0 before it begins.
        step: Steps done.
        reason: How the attempt ended: `finished`, the name of a signal or a notice; empty before.
    """

    def __init__(self, limit: int) -> None:
        """Store the limit; nothing is written before `begin`.

        Args:
            limit: Attempts in a row without a new checkpoint, after which `check` refuses another; 0 for no limit.
        """
        self.goodput = Goodput()
        self.number = 0
        self.step = 0
        self.reason = ""
        self._limit = limit
        self._path: Path | None = None
        self._steps_seconds: dict[int, float] = {}  # saved step -> seconds of the steps until then

    def check(self, run_dir: Path, step: int) -> None:
        """Refuse another attempt if too many saved no new step. Nothing is written; every process must call this.

        The first attempt after a launch by hand is never refused.

        Args:
            run_dir: Folder of the run.
            step: Step of the newest checkpoint.

        Raises:
            AutoshardError: As many attempts as the limit allows began at this step and saved no later one.
                Every process raises it.
        """
        failed: list[str] = []
        if distributed.is_main() and (restarts := restarts_so_far()) != 0:
            failed = fruitless(read_attempts(run_dir / run_directory.ATTEMPTS), step, restarts)
        if self._limit and distributed.value_of_main_process(len(failed)) >= self._limit:
            last = f"; the last one: {failed[-1]}" if failed else ""
            raise AutoshardError(
                f"{str(run_dir)!r}: {self._limit} attempts in a row began at step {step} and saved no later step{last}"
                ". It is not started again: find the cause, then launch it again, or continue with --resume"
            )

    def begin(self, run_dir: Path, step: int) -> None:
        """Record that this attempt begins.

        Args:
            run_dir: Folder of the run.
            step: Step of the newest checkpoint; 0 without one.
        """
        self._path = run_dir / run_directory.ATTEMPTS
        events = read_attempts(self._path) if distributed.is_main() else []
        self.step = step
        self.number = 1 + max((event["attempt"] for event in events), default=0)
        metrics = run_dir / run_directory.METRICS
        if distributed.is_main():
            run_directory.end_last_line(self._path)
        self._write(
            "begin",
            step=step,
            restarts=restarts_so_far() if self._limit else 0,
            processes=jax.process_count(),
            devices=jax.device_count(),
            alive=_time_text(metrics.stat().st_mtime) if metrics.exists() else None,
            seconds=_rounded(self.goodput.seconds()),
        )

    def saved(self, step: int) -> None:
        """Record that a checkpoint of a step was saved, with the time spent so far."""
        self._steps_seconds[step] = self.goodput.steps_seconds
        self._write("save", step=step, seconds=_rounded(self.goodput.seconds()))

    def rolled_back(self, step: int) -> None:
        """Count the steps after a restored one as lost work. The attempt began with it if it did not save it."""
        self.step = step
        self.goodput.lose_steps_after(self._steps_seconds.get(step, 0.0))

    def spent(self) -> dict[str, float]:
        """Return the seconds by cause over all attempts so far; in processes but the main one, only of this attempt."""
        if not distributed.is_main() or self._path is None:
            return self.goodput.seconds()
        events = [event for event in read_attempts(self._path) if event["attempt"] <= self.number]
        return account(
            [*events, {"attempt": self.number, "event": "now", "step": 0, "seconds": self.goodput.seconds()}]
        )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record at the end of the `with` block how the attempt ended: with `reason`, or with an error."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too; it is raised again
            self.reason = f"{type(error).__name__}: {error}".strip(": ")
            raise
        finally:
            with contextlib.suppress(OSError):  # such as a full disk, which must not hide the reason
                self._write("end", step=self.step, reason=self.reason, seconds=_rounded(self.goodput.seconds()))

    def _write(self, event: str, **values: object) -> None:
        if not distributed.is_main() or self._path is None:
            return
        line = {"attempt": self.number, "event": event, "time": _time_text(time.time()), **values}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {cause: round(each, 3) for cause, each in seconds.items()}


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """Read the events of a run's attempts. Lines that a crash left incomplete are skipped."""
    return run_directory.read_lines(path)


def fruitless(events: Sequence[Mapping[str, Any]], step: int, restarts: int | None) -> list[str]:
    """Return how each attempt since the last one that is not a failure ended, oldest first.

    An attempt is a failure if it began at the step of the newest checkpoint, so that it saved nothing, and no signal
    asked it to stop. An attempt that ended before it began to train left no event, but the launcher counted it.
    Attempts before the last launch by hand do not count.

    Args:
        events: Events of the run's attempts, oldest first.
        step: Step of the newest checkpoint.
        restarts: Number of restarts by the launcher so far; None if it does not say.
    """
    ends = {event["attempt"]: event["reason"] for event in events if event["event"] == "end"}
    failed: list[str] = []
    for event in reversed([event for event in events if event["event"] == "begin"]):
        before = event.get("restarts")
        if restarts is not None and before is not None:
            # The count grows within one launch. If it did not grow, this event belongs to an earlier launch.
            unseen = restarts - before - 1 if restarts > before else restarts
            failed += ["it ended before it began to train"] * unseen
            if restarts <= before:
                break
        reason = ends.get(event["attempt"], "it left no reason, as a killed process does")
        if event["step"] != step or reason == "finished" or reason.startswith(("SIG", NOTICE)):
            break
        failed.append(reason)
        if before == 0:
            break
        restarts = before
    return failed[::-1]


def restarts_so_far() -> int | None:
    """Return how often a launcher has started the run again; None if no launcher says so.

    Raises:
        ConfigError: The variable is not a number.
    """
    text = os.environ.get(RESTARTS)
    if text is not None and not text.isdigit():
        raise ConfigError(f"{RESTARTS}={text} must be a number")
    return None if text is None else int(text)


def check_first_start(limit: int) -> None:
    """Refuse another start if too many starts ended before the run began to train.

    A run cannot record attempts until its folder exists, so this relies on the launcher's own count.

    Args:
        limit: Attempts after which to give up; 0 for no limit.

    Raises:
        AutoshardError: The launcher has restarted the run as often as the limit allows.
        ConfigError: The variable is not a number.
    """
    restarts = restarts_so_far() or 0
    if limit and restarts >= limit:
        raise AutoshardError(
            f"the run was started {restarts} times before and never began to train: find the cause, then launch it "
            "again"
        )
