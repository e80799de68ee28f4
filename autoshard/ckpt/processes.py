"""What several `jax.distributed` processes have to agree on around a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import numpy as np

from autoshard.ckpt.errors import CheckpointError

T = TypeVar("T")


def together(action: Callable[[], T], otherwise: Callable[[str], CheckpointError]) -> T:
    """Runs `action` in every process; where it fails in one, it fails in all and none waits.

    Args:
        action: what to do; only its `CheckpointError`s are shared.
        otherwise: the error for a process that had none of its own, from a text naming those that had.
    """
    if jax.process_count() == 1:
        return action()
    result, error = None, None
    try:
        result = action()
    except CheckpointError as caught:
        error = caught
    failed = np.flatnonzero(gathered(np.array([error is not None])))
    if error is not None:
        raise error
    if failed.size:
        raise otherwise(f"process {', '.join(map(str, failed))} failed: see its message")
    return cast(T, result)  # no error here: the action returned it


def gathered(value: np.ndarray) -> np.ndarray:
    """The arrays of all processes, [processes, ...]."""
    if jax.process_count() == 1:
        return value[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(value)).reshape(-1, *value.shape)
