"""A directory of steps: whose it is, which steps are committed, who may write, what is removed.

DIR/autoshard.json        says that the directory is ours, and its format
DIR/step_00000100/        one committed step, as Orbax writes it
DIR/step_...-tmp...       a save that never finished; removed by the next run that writes here
DIR/copy.step_...         a copy that never finished; removed as well
DIR/damaged.step_...      a step that a run found damaged and went on without; nothing removes it
DIR/removed.step_...      a step on its way out, renamed first so that half a step never looks like a whole
one
DIR/try.step_...          folders that were made to see whether any can be made; removed as well
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from typing import Any

from etils import epath

from autoshard.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

_MARKER = "autoshard.json"
_FORMAT = {"format": "autoshard checkpoints", "version": 1}
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"step_\d{8,}\.orbax-checkpoint-tmp.*|(removed|copy|try)\.step_\d{8,}")


class StepDirectory:
    """Names, lists, claims and prunes; never reads or writes a step's contents."""

    def __init__(self, path: Any) -> None:
        self.path = epath.Path(os.path.abspath(path) if "://" not in str(path) else path)
        self._lock: int | None = None
        self.check()

    def step_path(self, step: int) -> epath.Path:
        """Where a step is or would be."""
        return self.path / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        if not self.path.exists():
            return []
        found = [int(match[1]) for entry in self.path.iterdir() if (match := _STEP.fullmatch(entry.name))]
        # Once each: a copy of step_00000003 may be called step_000000003.
        return [step for step in sorted(set(found)) if is_committed(self.step_path(step))]

    def check(self) -> None:
        """Refuses what is not a directory of ours. Writes nothing.

        Raises:
            CheckpointError: it is a file, holds something else, or a newer version wrote it.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: name a directory for the checkpoints.")
        marker = self.path / _MARKER
        if not marker.exists():
            if (step := _STEP.fullmatch(self.path.name)) and (self.path.parent / _MARKER).exists():
                raise CheckpointError(
                    f"{self.path} is a single step: name {self.path.parent}, and step {int(step[1])} of it."
                )
            foreign = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith(f".{_MARKER}"))
            steps = [name for name in foreign if _STEP.fullmatch(name)]
            if steps:
                raise CheckpointError(
                    f"{self.path} has {', '.join(steps[-3:])}{', ...' if len(steps) > 3 else ''} and no {_MARKER}, "
                    "which says that they are autoshard's: it was removed, or left out of a copy. If a run "
                    f"of autoshard saved them, write {json.dumps(_FORMAT)} into {marker}; else name another directory."
                )
            if foreign:
                raise CheckpointError(
                    f"{self.path} is not a checkpoint directory of autoshard: it holds "
                    f"{', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''} and no {_MARKER}. "
                    "Name one that a run has saved to, or to save, a new or an empty one."
                )
            return
        try:
            found = json.loads(marker.read_text())
            version = found["version"] if found["format"] == _FORMAT["format"] else None
        except (ValueError, KeyError, TypeError):
            version = None
        if not isinstance(version, int):
            raise CheckpointError(
                f"{marker} is not as autoshard writes it. If {self.path} is a checkpoint directory of "
                f"autoshard, write {json.dumps(_FORMAT)} into it; else name another directory."
            )
        if version > _FORMAT["version"]:
            raise CheckpointError(
                f"{self.path} was written by a newer version of autoshard (format {version}): upgrade."
            )

    def claim(self) -> None:
        """Makes the directory ours and this process its writer; removes what killed saves left behind.

        Raises:
            CheckpointError: another process writes here, or the directory cannot be written.
        """
        if self._lock is not None:
            return
        self.check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            marker = self.path / _MARKER
            if not marker.exists():
                draft = self.path / f".{_MARKER}.{os.getpid()}"
                draft.write_text(json.dumps(_FORMAT) + "\n")
                draft.rename(marker)
            self._lock = _lock(marker)
            for entry in self.path.iterdir():
                if _LEFTOVER.fullmatch(entry.name):
                    entry.rmtree(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written to {self.path}: {error}") from error

    def release(self) -> None:
        """Lets another process write."""
        if self._lock is not None and self._lock >= 0:
            os.close(self._lock)
        self._lock = None

    def check_writable(self, step: int) -> None:
        """Refuses a disk on which no folder for a step can be made: read-only, or full.

        Orbax would say so as well, but its threads wait for that folder for minutes, and the process with them.

        Raises:
            CheckpointError: it is such a disk.
        """
        probe = self.path / f"try.step_{step:08d}"
        try:
            for part in "abcd":
                (probe / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"step {step} cannot be written to {self.path}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                probe.rmtree(missing_ok=True)

    def draft_path(self, step: int) -> epath.Path:
        """Where a copy of a step is made before it gets its name."""
        return self.path / f"copy.step_{step:08d}"

    def commit(self, draft: epath.Path, step: int) -> None:
        """Gives a whole draft its name."""
        draft.rename(self.step_path(step))

    def set_aside(self, step: int) -> str:
        """Takes a damaged step its name, so that the run can save that step anew; returns what it is called now.

        Raises:
            CheckpointError: it cannot be renamed.
        """
        names = (f"damaged.step_{step:08d}{f'.{n}' if n else ''}" for n in itertools.count())
        free = next(name for name in names if not (self.path / name).exists())
        try:
            self.step_path(step).rename(self.path / free)
        except OSError as error:
            raise CheckpointError(f"damaged step {step} of {self.path} cannot be renamed: {error}") from error
        return free

    def remove(self, step: int) -> None:
        """Removes a step; renamed first, so that half of it never looks like a whole one."""
        doomed = self.path / f"removed.step_{step:08d}"
        self.step_path(step).rename(doomed)
        doomed.rmtree(missing_ok=True)


def is_committed(path: epath.Path) -> bool:
    """Whether a step is there, whole: a local one has its name only then; object stores have a file that says so."""
    return (path / "commit_success.txt" if "://" in str(path) else path).exists()


def _lock(marker: epath.Path) -> int:
    """A lock on the marker that ends with the process; -1 where files cannot be locked."""
    if fcntl is None:
        return -1
    try:
        descriptor = os.open(os.fspath(marker), os.O_RDWR)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            f"another run is writing checkpoints to {marker.parent}: stop it, or name another directory."
        ) from None
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor
