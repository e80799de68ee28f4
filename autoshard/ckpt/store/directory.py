"""The directory of the steps: its format, the committed steps, the lock of its writer, removal of steps nobody reads.

DIR/autoshard.json        marks the directory as created by autoshard; has its format
DIR/step_00000100/        one committed step, as Orbax writes it
DIR/step_...-tmp...       an unfinished save; the next writer removes it
DIR/copy.step_...         an unfinished copy; the next writer removes it
DIR/damaged.step_...      a damaged step that a run skipped; never removed
DIR/removed.step_...      a step that is being removed. Renaming it first makes the removal atomic
DIR/try.step_...          tests whether folders can be created; the next writer removes it
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from typing import Any

from etils import epath

from autoshard._typed import short_repr
from autoshard.ckpt.store.step_lock import unread
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
    """Names, lists, locks and removes steps. Never reads or writes the contents of a step."""

    def __init__(self, path: Any) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise CheckpointError(f"the directory is {short_repr(path)}; give the path of a folder.")
        if str(path).startswith("s3://"):
            raise CheckpointError(f"'{path}': Orbax does not support s3://; give a folder, or a bucket gs://...")
        self.path = epath.Path(os.path.abspath(path) if "://" not in str(path) else path)
        self._lock: int | None = None
        self.check()

    def step_path(self, step: int) -> epath.Path:
        """Return the path of a step, which need not exist."""
        return self.path / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        if not self.path.exists():
            return []
        names = {entry.name for entry in self.path.iterdir()}
        numbers = {int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
        # step_000000003 has the number of step_00000003, but is not a step.
        steps = [step for step in sorted(numbers) if self.step_path(step).name in names]
        # On a local disk the name is enough. A second look could miss all steps, if a run replaces them meanwhile.
        return [step for step in steps if is_committed(self.step_path(step))] if "://" in str(self.path) else steps

    def check(self) -> None:
        """Check that the directory is new, empty or created by autoshard. Write nothing.

        Raises:
            CheckpointError: it is a file, contains something else, or was written by a newer version.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: use a directory for the checkpoints.")
        marker = self.path / _MARKER
        if not marker.exists():
            if (step := _STEP.fullmatch(self.path.name)) and (self.path.parent / _MARKER).exists():
                raise CheckpointError(
                    f"{self.path} is a single step: open {self.path.parent}, and step {int(step[1])} in it."
                )
            foreign = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith(f".{_MARKER}"))
            steps = [name for name in foreign if _STEP.fullmatch(name)]
            if steps:
                raise CheckpointError(
                    f"{self.path} has {', '.join(steps[-3:])}{', ...' if len(steps) > 3 else ''} but no {_MARKER}, "
                    "which marks the steps of autoshard: it was removed, or not copied. If autoshard "
                    f"saved them, write {json.dumps(_FORMAT)} into {marker}; else use another directory."
                )
            if foreign:
                raise CheckpointError(
                    f"{self.path} is not a checkpoint directory of autoshard: it contains "
                    f"{', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''} and no {_MARKER}. "
                    "Use the directory of a run, or to save, a new or empty one."
                )
            return
        try:
            content = json.loads(marker.read_text())
            version = content["version"] if content["format"] == _FORMAT["format"] else None
        except (ValueError, KeyError, TypeError):
            version = None
        if not isinstance(version, int):
            raise CheckpointError(
                f"{marker} is not as autoshard writes it. If {self.path} is a checkpoint directory of "
                f"autoshard, write {json.dumps(_FORMAT)} into it; else use another directory."
            )
        if version > _FORMAT["version"]:
            raise CheckpointError(
                f"{self.path} was written by a newer version of autoshard (format {version}): upgrade."
            )

    def claim(self) -> None:
        """Create the directory if needed, lock it for this process, and remove the leftovers of killed saves.

        Raises:
            CheckpointError: another process is writing to it, or it cannot be written.
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
        """Release the lock."""
        if self._lock is not None and self._lock >= 0:
            os.close(self._lock)
        self._lock = None

    def check_free(self, step: int) -> None:
        """Check that a step does not exist.

        Raises:
            CheckpointError: it exists.
        """
        if self.step_path(step).exists():
            raise CheckpointError(
                f"{self.path} has step {step} already, and a committed step is never "
                "overwritten. Continue from it, remove it yourself, or use another directory."
            )

    def check_writable(self, step: int) -> None:
        """Check that a folder for a step can be created.

        Orbax would fail on such a disk too, but its threads, and so the process, wait for the folder for minutes.

        Raises:
            CheckpointError: the disk is read-only or full.
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
        """Return the path under which a step is copied before it is committed."""
        return self.path / f"copy.step_{step:08d}"

    def commit(self, draft: epath.Path, step: int) -> None:
        """Commit a complete draft by renaming it."""
        draft.rename(self.step_path(step))

    def set_aside(self, step: int) -> str:
        """Rename a damaged step, so that the run can save that step again. Return the new name.

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

    def remove(self, *steps: int) -> list[int]:
        """Remove steps, except those that are being read. Return the removed ones.

        Raises:
            CheckpointError: a step cannot be removed.
        """
        return [step for step in steps if self._remove(step)]

    def _remove(self, step: int) -> bool:
        """Remove a step if nobody reads it, and return whether it was removed. Renaming it first makes this atomic."""
        path, renamed = self.step_path(step), self.path / f"removed.step_{step:08d}"
        try:
            with unread(path) as removable:
                if not removable:
                    return False
                path.rename(renamed)
            renamed.rmtree(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"step {step} cannot be removed from {self.path}: {error}") from error
        return True


def is_committed(path: epath.Path) -> bool:
    """Return whether a step is complete. On a local disk its name says so, in an object store a file."""
    return (path / "commit_success.txt" if "://" in str(path) else path).exists()


def _lock(marker: epath.Path) -> int:
    """Lock the marker until the process ends. Return a file descriptor, or -1 if files cannot be locked."""
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
            f"another run is writing checkpoints to {marker.parent}: stop it, or use another directory."
        ) from None
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor
