"""Locks on single steps: a step that is being read is not removed.

A reader takes a shared lock on the step's folder. A process that removes the step takes an exclusive one. The system
releases the locks of a process that ends, so a lock never outlives its reader. Nothing is written, so steps on a
read-only disk are locked too. Object stores, Windows and some network file systems have no such locks. There a step can
be removed while it is read, and the reader has to try again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None


class ReadLock:
    """Keeps a step from being removed until `release`, the end of a `with` block, or the end of this object."""

    _descriptor: int | None = None

    def __init__(self, path: Any) -> None:
        """Lock a step, if it can be locked.

        Raises:
            FileNotFoundError: the step was removed.
        """
        self._descriptor = _open(path)
        # Waits for a remover that renames the step at this moment.
        if self._descriptor is None or not _lock(self._descriptor, alone=False, wait=True):
            return
        if not _is_open(path, self._descriptor):
            self.release()
            raise FileNotFoundError(f"{path} was removed")

    def release(self) -> None:
        """Release the lock, so that the step may be removed."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _close(descriptor)

    def __enter__(self) -> ReadLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


@contextlib.contextmanager
def unread(path: Any) -> Iterator[bool]:
    """Keep readers out of a step and yield True; yield False if it is being read. If nothing can be locked, yield True.

    Raises:
        FileNotFoundError: the step does not exist.
    """
    descriptor = _open(path)
    try:
        yield descriptor is None or _lock(descriptor, alone=True, wait=False) is not False
    finally:
        if descriptor is not None:
            _close(descriptor)


def _open(path: Any) -> int | None:
    """Return a descriptor of a folder, or None if it cannot be locked."""
    if fcntl is None or "://" in str(path):
        return None
    try:
        return os.open(os.fspath(path), os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError:
        return None


def _lock(descriptor: int, *, alone: bool, wait: bool) -> bool | None:
    """Return whether a folder was locked; None if its file system has no locks."""
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_open(path: Any, descriptor: int) -> bool:
    """Return whether a path is still the folder that was opened."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close(descriptor: int) -> None:
    # A forked process has the descriptor as well, so closing it here would not release the lock.
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
