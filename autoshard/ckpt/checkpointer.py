"""The checkpoints of one run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax

from autoshard.ckpt.directory import StepDirectory
from autoshard.ckpt.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, MismatchError
from autoshard.ckpt.manifest import Manifest, plain_config, written_by
from autoshard.ckpt.processes import together
from autoshard.ckpt.restore import damaged_leaves, read_manifest, restore_step
from autoshard.ckpt.snapshot import take_snapshot
from autoshard.ckpt.storage import Pending, Writer


class Checkpointer:
    """Saves and restores the whole state of a run, by step, in one directory.

    A step is there entirely or not at all; one that is there is never overwritten. Every leaf is saved with a
    digest that does not depend on the mesh, and is compared with it when it comes back. All processes of a
    run call every method, in the same order. Not for several threads.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from autoshard.ckpt import Checkpointer
        >>> state = {"w": jnp.arange(4.0), "step": jnp.int32(7)}
        >>> with tempfile.TemporaryDirectory() as directory, Checkpointer(directory) as checkpoints:
        ...     checkpoints.save(7, state, config={"model": {"width": 4}})
        ...     checkpoints.wait()
        ...     int(checkpoints.restore(state)["step"])
        7
    """

    def __init__(self, directory: Any, *, keep: int | None = 3) -> None:
        """Looks at the directory, and writes nothing.

        Args:
            directory: a path; a new or empty directory, or one that a Checkpointer made.
            keep: how many of the newest steps stay; None for all.

        Raises:
            CheckpointError: the directory holds something else, or `keep` is not positive.
        """
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep}: at least one step must stay, or None for all.")
        self.keep = keep
        self.restored_step: int | None = None
        self._directory = StepDirectory(directory)
        self._writer = Writer()
        self._pending: tuple[int, Pending] | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def directory(self) -> Any:
        """Where the steps are."""
        return self._directory.path

    def steps(self) -> list[int]:
        """Committed steps, ascending; the one that is being written is not among them."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """The newest step, None where there is none; one that is being written is waited for.

        Raises:
            CheckpointError: it could not be written.
        """
        self.wait()
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, *, config: Mapping[str, Any], block: bool = False) -> None:
        """Saves a state, in the background unless told otherwise.

        The state may be donated as soon as this returns: what is written is a copy, made on the devices (with
        `block`, nothing is copied, and this returns when the step is committed). A save that is still being
        written is waited for first. Errors of the background are raised by the next `save`, `wait` or
        `close`.

        Args:
            step: the number of the step, not negative and not there yet.
            state: a pytree of arrays, typed or raw RNG keys and numbers.
            config: what to keep with it, as JSON; the section `model` is what `restore` compares.
            block: whether to wait until it is committed.

        Raises:
            CheckpointError: the step exists, the directory is not ours or is being written by another run, a
                leaf cannot be saved, or the previous save failed.
        """
        self.wait()
        if isinstance(step, bool) or not hasattr(step, "__index__") or step.__index__() < 0:
            raise CheckpointError(f"step={step!r}: a step is an integer, 0 or more.")
        step = step.__index__()
        together(lambda: self._begin(step), lambda who: CheckpointError(f"step {step} cannot be saved: {who}"))
        snapshot = take_snapshot(state, copy=not block)
        manifest = Manifest(
            step=step,
            config=plain_config(config),
            leaves=snapshot.specs,
            digests=snapshot.digests,
            written_by=written_by(jax.device_count(), jax.process_count()),
        )
        self._pending = (step, self._writer.write(self._directory.step_path(step), snapshot, manifest))
        if block:
            self.wait()

    def _begin(self, step: int) -> None:
        if jax.process_index() == 0:
            self._directory.claim()
        if self._directory.step_path(step).exists():
            raise CheckpointError(
                f"{self._directory.path} has step {step} already, and a committed step is never "
                "overwritten. Continue from it, remove it yourself, or name another directory."
            )

    def wait(self) -> None:
        """Waits until what was saved is committed, and removes the steps beyond `keep`.

        Raises:
            CheckpointError: it could not be written; steps committed before are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, write = pending
        try:
            write.result()
        except Exception as error:  # disk, Orbax, TensorStore and other processes have no error in common
            raise CheckpointError(
                f"step {step} could not be written to {self._directory.path}: {error}\n"
                f"Committed steps are untouched: {self.steps() or 'none'}."
            ) from error
        if jax.process_index() == 0:
            self._directory.prune(self.keep)

    def close(self) -> None:
        """Waits for the background and lets another process write here."""
        try:
            self.wait()
        finally:
            self._directory.release()

    def config(self, step: int | None = None) -> dict[str, Any]:
        """The configuration that a step was saved with, the newest by default.

        Raises:
            CheckpointError: there is no such step, or it is damaged.
        """
        step = self._existing(step)
        return read_manifest(self._directory.step_path(step), step).config

    def verify(self, step: int | None = None) -> list[str]:
        """Paths of the damaged leaves of a step, read on the host one by one; empty where all is well.

        Raises:
            CheckpointError: there is no such step, or nothing of it can be read.
        """
        step = self._existing(step)
        return damaged_leaves(self._directory.step_path(step), step)

    def restore(
        self,
        template: Any,
        *,
        step: int | None = None,
        config: Mapping[str, Any] | None = None,
        fallback: bool = False,
    ) -> Any:
        """Reads a state back, straight onto the template's shardings, whatever mesh it was saved from.

        Args:
            template: a pytree of arrays, or of `jax.ShapeDtypeStruct` with shardings (without one: on the
                first device). Structure, shapes and dtypes must be the saved ones. NumPy arrays and numbers
                come back as such.
            step: which, the newest by default.
            config: compared with the saved one; if it has a section `model`, that section alone is.
            fallback: take the newest earlier step that is intact where the wanted one is damaged, with a
                warning.

        Returns:
            The state; `restored_step` says which step it is.

        Raises:
            MismatchError: it is a checkpoint of another model; every difference is listed.
            DamagedCheckpointError: its values are not the ones that were saved; names the newest step that is
                intact.
            CheckpointError: there is no such step, or the template cannot be placed.
        """
        self.wait()
        step = self._existing(step)
        try:
            state = restore_step(self._directory.step_path(step), step, template, config)
        except DamagedCheckpointError as error:
            found = self._intact_before(step, template, config)
            if found is None:
                raise _advised(error, "No earlier step is intact.") from error
            earlier, state = found
            if not fallback:
                del state, found
                raise _advised(error, f"Step {earlier} is intact: restore that, or pass fallback=True.") from error
            warnings.warn(f"{error}\nStep {earlier} is restored instead.", CheckpointWarning, stacklevel=2)
            step = earlier
        self.restored_step = step
        return state

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self._directory.path}.")
        if step is not None and step not in steps:
            raise CheckpointError(f"there is no step {step} in {self._directory.path}: it has {_few(steps)}.")
        return steps[-1] if step is None else step

    def _intact_before(self, step: int, template: Any, config: Mapping[str, Any] | None) -> tuple[int, Any] | None:
        for earlier in reversed([one for one in self.steps() if one < step]):
            try:
                return earlier, restore_step(self._directory.step_path(earlier), earlier, template, config)
            except (DamagedCheckpointError, MismatchError):
                continue
        return None


def _advised(error: DamagedCheckpointError, advice: str) -> DamagedCheckpointError:
    gap = "\n" if "\n" in str(error) else ". "  # below a list of leaves, else on the same line
    return DamagedCheckpointError(f"{error}{gap}{advice}", step=error.step, cause=error.cause, leaves=error.leaves)


def _few(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-10:]))
    return f"..., {shown}" if len(steps) > 10 else shown
