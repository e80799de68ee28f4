"""What several `jax.distributed` processes have to agree on around a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import jax

from autoshard._processes import exchange, named
from autoshard.errors import CheckpointError

T = TypeVar("T")


def together(what: str, action: Callable[[], T], otherwise: Callable[[str], CheckpointError]) -> T:
    """Runs `action` in every process; where it fails in one, it fails in all and none waits.

    Args:
        what: what is done, with its step; names it where another process does not come.
        action: what to do; only its `CheckpointError`s are shared.
        otherwise: the error for a process that had none of its own, from a text naming those that had.

    Raises:
        MissingProcessError: another process has not come in time.
    """
    if jax.process_count() == 1:
        return action()
    result, error = None, None
    try:
        result = action()
    except CheckpointError as caught:
        error = caught
    failed = [p for p, said in enumerate(exchange(what, "failed" if error is not None else "done")) if said == "failed"]
    if error is not None:
        raise error
    if failed:
        raise otherwise(f"{named(failed)} failed: see its message")
    return cast(T, result)  # no error here: the action returned it
