"""The words of `schedule=`: a name, or `interleaved:V` with the number of chunks of layers of each stage."""

from __future__ import annotations

from typing import Any

from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.sharding.pipeline.schedules import (
    FORWARD_ONLY,
    INTERLEAVED,
    LEAN,
    SCHEDULES,
    Schedule,
    forward_only,
    interleaved,
)

DEFAULT = "1f1b"
SEARCHED = (*(word for word in SCHEDULES if word not in (DEFAULT, *LEAN)), f"{INTERLEAVED}:2", f"{INTERLEAVED}:4")
"""The schedules that a search tries where a pipeline is best with the default one.

Those that keep inputs of stages take longer, so they are tried only if nothing fits. The numbers of chunks are chosen:
more of them save little more idle time, and a stage has few layers."""


def read_schedule(schedule: Any) -> str:
    """Return the word of a schedule; the default for None.

    Raises:
        PlanError: it is none of the words.

    Example:
        >>> read_schedule("interleaved:2")
        'interleaved:2'
    """
    if schedule is None:
        return DEFAULT
    if isinstance(schedule, str):
        if schedule in (*SCHEDULES, FORWARD_ONLY):
            return schedule
        name, _, number = schedule.partition(":")
        if name == FORWARD_ONLY and number.isascii() and number.isdigit() and int(number) > 1:
            return f"{name}:{int(number)}"
        if name == INTERLEAVED:
            if number.isascii() and number.isdigit() and int(number) > 1:
                return f"{name}:{int(number)}"
            raise PlanError(
                f"schedule is {short_repr(schedule)}; give the number of chunks of layers of each stage, at least 2, "
                f"such as '{INTERLEAVED}:2'. With one chunk a stage, use '1f1b'"
            )
    words = ", ".join(map(repr, SCHEDULES))
    raise PlanError(f"schedule is {short_repr(schedule)}; it must be one of {words}, '{INTERLEAVED}:2'")


def chunks_of(schedule: str) -> int:
    """Return the number of chunks of layers that a schedule gives to each stage.

    Example:
        >>> chunks_of("interleaved:3"), chunks_of("zb")
        (3, 1)
    """
    name, _, number = schedule.partition(":")
    return int(number) if name in (INTERLEAVED, FORWARD_ONLY) and number else 1


def make_schedule(schedule: str, stages: int, microbatches: int) -> Schedule:
    """Return the table of a schedule.

    Args:
        schedule: a word that `read_schedule` has checked.
        stages: number of stages.
        microbatches: number of microbatches.
    """
    chunks = chunks_of(schedule)
    if schedule.partition(":")[0] == FORWARD_ONLY:
        return forward_only(make_schedule(f"{INTERLEAVED}:{chunks}" if chunks > 1 else DEFAULT, stages, microbatches))
    return interleaved(stages, microbatches, chunks) if chunks > 1 else SCHEDULES[schedule](stages, microbatches)
