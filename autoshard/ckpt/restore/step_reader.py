"""Reading the steps of one directory while a run writes and removes steps there."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax

from autoshard.ckpt.restore.constants import MIN_READ_TRIES, READ_PATIENCE_S, READ_PAUSE_S, STEPS_SHOWN
from autoshard.ckpt.restore.restore import damaged_leaves, read_manifest, restore_step
from autoshard.ckpt.restore.restore_request import Restored, RestoreRequest
from autoshard.ckpt.store.argument_checks import step_number
from autoshard.ckpt.store.directory import StepDirectory
from autoshard.ckpt.store.step_lock import ReadLock
from autoshard.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, MismatchError, RemovedStepError

T = TypeVar("T")


class StepReader:
    """Reads steps by number or the newest one, and skips damaged steps on request.

    Attributes:
        damaged: the damaged steps for which `restore` returned an earlier step.
        metrics: the metrics of steps, as far as they are known.
    """

    def __init__(self, directory: StepDirectory) -> None:
        self.damaged: set[int] = set()
        self.metrics: dict[int, Mapping[str, float]] = {}
        self._directory = directory

    def read(self, step: int | None, action: Callable[[Any, int], T]) -> T:
        """Return `action(path, step)`, by default of the newest step.

        A step is not removed while it is read, as far as files can be locked. If another process removes the newest
        step before it is locked, or it cannot be locked, try again with the step that is newest then.

        Raises:
            CheckpointError: the step does not exist.
            RemovedStepError: the given step was removed, or the newest one was removed in each of many tries.
        """
        start_s = time.monotonic()
        for tries in itertools.count(1):
            number = self._existing(step)
            try:
                return self._locked(number, action)
            except RemovedStepError:
                # Several processes may see different steps, so they do not try again.
                enough = tries >= MIN_READ_TRIES and time.monotonic() - start_s > READ_PATIENCE_S
                if step is not None or enough or jax.process_count() > 1:
                    raise
                time.sleep(READ_PAUSE_S)
        raise AssertionError

    def _locked(self, step: int, action: Callable[[Any, int], T]) -> T:
        """Return `action(path, step)`. Nobody removes the step meanwhile.

        Raises:
            RemovedStepError: the step was removed.
        """
        path = self._directory.step_path(step)
        try:
            lock = ReadLock(path)
        except FileNotFoundError as error:
            raise RemovedStepError(step, path.parent) from error
        with lock:
            return action(path, step)

    def set_damaged_aside(self) -> None:
        """Rename the damaged steps that `restore` skipped, with a warning for each."""
        for step in sorted(self.damaged & set(self._directory.steps())):
            name = self._directory.set_aside(step)
            text = f"step {step} in {self._directory.path} is damaged: it was renamed to {name}"
            warnings.warn(text, CheckpointWarning, stacklevel=7)

    def restore(self, step: int | None, request: RestoreRequest, fallback: bool) -> tuple[Any, Restored]:
        """Return the state of a step and a record of the restore; see `Checkpointer.restore`."""
        return self.read(step, lambda path, number: self._restore(path, number, request, fallback))

    def removable(self, expired: Sequence[int]) -> list[int]:
        """Return the expired steps without the newest intact step.

        Reads steps from the newest on until one is intact; reads nothing if no step is expired.

        Raises:
            CheckpointError: no step is intact.
        """
        if not expired:
            return []
        damaged: list[int] = []
        for step in reversed(self._directory.steps()):
            if self._is_intact(step):
                break
            damaged.append(step)
        else:
            raise CheckpointError(f"no step in {self._directory.path} is intact: nothing is removed.")
        if damaged:
            warnings.warn(
                f"steps {_last_few(damaged[::-1])} in {self._directory.path} are damaged. "
                f"The newest intact step, {step}, stays",
                CheckpointWarning,
                stacklevel=3,
            )
        return [one for one in expired if one != step]

    def warn_of_readers(self, steps: Sequence[int]) -> None:
        """Warn of steps that were to be removed and are being read."""
        if steps:
            text = f"steps {_last_few(steps)} in {self._directory.path} are being read and stay: prune again later"
            warnings.warn(text, CheckpointWarning, stacklevel=3)

    def metrics_of(self, step: int) -> Mapping[str, float]:
        """Return the metrics of a step; none if the step cannot be read."""
        if step not in self.metrics:
            try:
                self.metrics[step] = read_manifest(self._directory.step_path(step), step).metrics
            except CheckpointError:
                self.metrics[step] = {}
        return self.metrics[step]

    def _existing(self, step: int | None) -> int:
        step = None if step is None else step_number(step)
        steps = self._directory.steps()
        if not steps:
            raise CheckpointError(
                f"there is no checkpoint in {self._directory.path}: save a step first, or use another directory."
            )
        if step is not None and step not in steps:
            raise CheckpointError(f"there is no step {step} in {self._directory.path}. Its steps: {_last_few(steps)}.")
        return steps[-1] if step is None else step

    def _restore(self, path: Any, step: int, request: RestoreRequest, fallback: bool) -> tuple[Any, Restored]:
        try:
            return restore_step(path, step, request)
        except DamagedCheckpointError as error:
            earlier = self._restore_intact_before(step, request)
            if earlier is None:
                raise _with_advice(error, "No earlier step is intact.") from error
            state, restored, skipped = earlier
            if not fallback:
                del state, earlier
                advice = f"Step {restored.step} is intact: restore that, or pass fallback=True."
                raise _with_advice(error, advice) from error
            restored = replace(restored, damaged=tuple(sorted([*skipped, step])))
            self.damaged |= {*skipped, step}
            warnings.warn(f"{error}\nStep {restored.step} is restored instead.", CheckpointWarning, stacklevel=6)
            return state, restored

    def _restore_intact_before(self, step: int, request: RestoreRequest) -> tuple[Any, Restored, list[int]] | None:
        """Return the state of the newest intact step before `step`, its record, and the damaged steps between."""
        skipped: list[int] = []
        for earlier in reversed([one for one in self._directory.steps() if one < step]):
            try:
                state, restored = self._locked(earlier, lambda path, number: restore_step(path, number, request))
                return state, restored, skipped
            except DamagedCheckpointError:
                skipped.append(earlier)
            except (MismatchError, RemovedStepError):
                continue
        return None

    def _is_intact(self, step: int) -> bool:
        try:
            return not damaged_leaves(self._directory.step_path(step), step)
        except (DamagedCheckpointError, RemovedStepError):
            return False


def _with_advice(error: DamagedCheckpointError, advice: str) -> DamagedCheckpointError:
    gap = "\n" if "\n" in str(error) else ". "  # on a new line after a list of leaves
    return DamagedCheckpointError(f"{error}{gap}{advice}", step=error.step, cause=error.cause, leaves=error.leaves)


def _last_few(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[-STEPS_SHOWN:]))
    return f"..., {shown}" if len(steps) > STEPS_SHOWN else shown
