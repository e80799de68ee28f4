"""Suppresses the tracebacks and warnings of reads that Orbax abandons.

Orbax reads all arrays of a step at once. If one of them cannot be read, it raises that error, closes its event loop
and abandons the other reads. Each of those would print a traceback when it ends or is freed, which can be seconds
later, and a warning if it was not started. The raised error says all that a user needs, so these tracebacks are
dropped, and no others, and the reads that were not started are closed.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any

_LOGGER = logging.getLogger("asyncio")
_READ = re.compile(r"deserialize|\bread|_get_array_metadatas")  # in the names of Orbax's coroutines that read
_failed = False  # whether a read has failed, so that tracebacks can come at any time
_hook: Callable[[Any], Any] | None = None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drop the tracebacks of abandoned reads in a block, and from then on if the block fails. For one thread only."""
    global _failed
    before = sys.unraisablehook
    _LOGGER.addFilter(_keep_record)  # adding a filter again has no effect
    _install_hook()
    try:
        yield
    except BaseException:
        _failed = True
        _close_unstarted()
        raise
    finally:
        if not _failed:
            _LOGGER.removeFilter(_keep_record)
            if sys.unraisablehook is _hook:  # otherwise somebody has installed another one, which may call this one
                sys.unraisablehook = before


def _close_unstarted() -> None:
    """Close Orbax's reads that nobody will await, so that Python does not warn when they are freed. Keep its writes."""
    for found in gc.get_objects():
        # Not `isinstance`: some objects are proxies, and it would run their code.
        if type(found) is not CoroutineType or inspect.getcoroutinestate(found) != inspect.CORO_CREATED:
            continue
        if _is_of_orbax(found.cr_code.co_filename) and _READ.search(found.cr_code.co_qualname):
            found.close()


def _install_hook() -> None:
    global _hook
    previous = sys.unraisablehook
    if previous is _hook:
        return

    def report(unraisable: Any) -> None:
        if not _is_of_abandoned_read(unraisable):
            previous(unraisable)

    _hook = sys.unraisablehook = report


def _is_of_abandoned_read(unraisable: Any) -> bool:
    """Return whether an error that Python cannot raise is that of an abandoned read."""
    error, source = unraisable.exc_value, unraisable.object
    if source is None:  # a thread of TensorStore reports the end of a read to the event loop that is closed
        return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return inspect.iscoroutine(source) and _is_of_orbax(source.cr_code.co_filename)


def _keep_record(record: logging.LogRecord) -> bool:
    """Keep a record of asyncio unless it, or its error, names Orbax or TensorStore."""
    error = record.exc_info[1] if record.exc_info else None
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)] if error is not None else []
    return not any(map(_is_of_orbax, [record.getMessage(), *files]))


def _is_of_orbax(text: str) -> bool:
    return "orbax" in text or "tensorstore" in text
