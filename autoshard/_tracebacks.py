"""Tracebacks of errors that a user causes, and places of warnings: they show the user's frames, not ours.

An error counts as the user's if it is an `AutoshardError`, or if it was raised in the user's own code, or by JAX below
it. Other errors keep all frames, because they may be faults of this package. `JAX_TRACEBACK_FILTERING=off` shows all
frames, as in JAX.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import jax

from autoshard.errors import AutoshardError

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
# The parts that run between a user's call and the user's function. The models and the trainer are users of these.
_OWN = tuple(f"{_PACKAGE / part}" for part in ("sharding", "spmdrules", "_compat", "_gc.py", "_tracebacks.py"))
_JAX = f"{Path(jax.__file__).parent}"
_HIDDEN = (*_OWN, contextlib.__file__)
_LIBRARIES = ("jax", "flax", "contextlib")


def hides_own_frames(fn: F) -> F:
    """Decorator of a public function: errors that the user causes leave it without our frames."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:  # of any type: only its traceback changes, and it is raised again
            hide_own_frames(error)
            raise

    return call  # pyright: ignore[reportReturnType]


def hide_own_frames(error: Exception) -> None:
    """Remove our frames from the traceback of an error that the user caused.

    The function that calls this is the one that the user called. It raises the error again with a bare `raise`, which
    adds no frame.
    """
    mode = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    if mode != "off" and _is_users(error):
        error.with_traceback(_without_own(error.__traceback__))


def users_stacklevel() -> int:
    """The `stacklevel` with which the caller's warning points to the user's line: the first frame that is not ours.

    Frames of JAX and Flax do not count as the user's.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_between(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_between(frame: FrameType) -> bool:
    """Whether a frame is ours, or of a library that calls us on behalf of the user."""
    library = str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES
    return library or frame.f_code.co_filename.startswith(_OWN)


def users_line(error: BaseException) -> str:
    """The innermost line of user code in an error's traceback, `file.py:12 (function)`; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    hidden = (*_HIDDEN, _JAX)
    own = (f for f in reversed(frames) if not f.filename.startswith(hidden) and "site-packages" not in f.filename)
    return next((f"{f.filename}:{f.lineno} ({f.name})" for f in own), "")


def call_users(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the user's function. If it does not take these arguments, that is the user's error."""
    return fn(*args, **kwargs)


def _is_users(error: Exception) -> bool:
    if isinstance(error, AutoshardError):
        return True
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    outside_jax = [code for code in codes if not code.co_filename.startswith(_JAX)]
    last = outside_jax[-1] if outside_jax else None
    return last is not None and (last is call_users.__code__ or not last.co_filename.startswith(_OWN))


def _without_own(tb: TracebackType | None) -> TracebackType | None:
    kept = None
    entries = []
    while tb is not None:
        entries.append(tb)
        tb = tb.tb_next
    for entry in reversed(entries):
        if not entry.tb_frame.f_code.co_filename.startswith(_HIDDEN):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
