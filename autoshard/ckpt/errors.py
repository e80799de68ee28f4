"""What can go wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.errors import AutoshardError, AutoshardWarning

SHOWN = 10  # lines of a list in one message: enough to see the pattern, short enough to read


class CheckpointError(AutoshardError):
    """A checkpoint that cannot be written or read as asked; nothing on disk was changed by it."""


class MismatchError(CheckpointError):
    """A sound checkpoint of another model: structure, shapes, dtypes or configuration differ."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are missing, unreadable or hold other values than were saved.

    Attributes:
        step: the damaged step.
        leaves: paths of the leaves known to be damaged, empty where the damage has no single leaf.
        cause: what was found, one line or more.
    """

    def __init__(self, message: str, *, step: int, cause: str, leaves: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.cause = cause
        self.leaves = tuple(leaves)


class RemovedStepError(CheckpointError):
    """A step that was removed while it was read, as a run does that keeps some of its steps; nothing is damaged.

    Attributes:
        step: the removed step.
    """

    def __init__(self, step: int, directory: object) -> None:
        super().__init__(
            f"step {step} in {directory} was removed while it was read: a run that saves there keeps other steps. "
            "Take a newer one, or have the run keep more."
        )
        self.step = step


class CheckpointWarning(AutoshardWarning):
    """A damaged step: an earlier one is restored or kept instead."""


def listing(lines: Sequence[str]) -> str:
    """The first lines of a list, indented, and how many more there are."""
    shown = "\n".join(f"  {line}" for line in lines[:SHOWN])
    hidden = len(lines) - SHOWN
    return f"{shown}\n  and {hidden} more" if hidden > 0 else shown
