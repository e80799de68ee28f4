"""The errors and the warning that a user of the package can meet."""

import copyreg
from collections.abc import Sequence


class AutoshardError(ValueError):
    """Something that the caller can mend; the command line prints it as one line and exits with code 2."""

    def __reduce__(self):  # for copies and pickles: not every error is made from its text alone
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # pyright: ignore[reportAttributeAccessIssue]


class ConfigError(AutoshardError):
    """A setting, an option or a combination of them that cannot be used."""


class DataError(AutoshardError):
    """Training data that is missing, empty or unreadable."""


class AutoshardWarning(UserWarning):
    """Something that works, but not as well as its author probably expects."""


class CheckpointError(AutoshardError):
    """A checkpoint cannot be written or read as requested. Nothing on disk was changed."""


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
    """A run removed a step while another process read it. The run keeps only some of its steps. Nothing is damaged.

    Attributes:
        step: the removed step.
    """

    def __init__(self, step: int, directory: object) -> None:
        super().__init__(
            f"step {step} in {directory} was removed while it was read, by a run that saves there and keeps only some "
            "steps. Read a newer step, or let the run keep more steps."
        )
        self.step = step


class CheckpointWarning(AutoshardWarning):
    """A damaged step: an earlier one is restored or kept instead."""


class PlanError(AutoshardError):
    """A plan that cannot be made, read or used."""


class PlanRequestError(AutoshardError):
    """A requested plan cannot be parsed or cannot be satisfied."""
