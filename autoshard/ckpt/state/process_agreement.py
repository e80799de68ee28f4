"""Actions that succeed or fail in all `jax.distributed` processes together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import jax

from autoshard._processes import exchange, processes_text
from autoshard.errors import CheckpointError

T = TypeVar("T")


def in_all_processes(what: str, action: Callable[[], T], otherwise: Callable[[str], CheckpointError]) -> T:
    """Run `action` in every process. If it fails in one process, it fails in all, so none waits for another.

    Args:
        what: the name of the action and its step, for errors.
        action: the action; other processes learn only of its `CheckpointError`s.
        otherwise: makes the error for a process whose own action succeeded; called with a text that names the failed
            processes.

    Raises:
        CheckpointError: the action failed in some process.
        MissingProcessError: another process did not arrive in time.
    """
    if jax.process_count() == 1:
        return action()
    result, error = None, None
    try:
        result = action()
    except CheckpointError as caught:
        error = caught
    outcomes = exchange(what, "failed" if error is not None else "done")
    failed = [process for process, outcome in enumerate(outcomes) if outcome == "failed"]
    if error is not None:
        raise error
    if failed:
        raise otherwise(f"{processes_text(failed)} failed: see its message")
    return cast(T, result)  # there was no error, so the action returned it
