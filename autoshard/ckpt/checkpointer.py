"""Full-state checkpoints of one run in one directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax

from autoshard import _compat
from autoshard.ckpt.exchange.constants import SHARD_BYTES
from autoshard.ckpt.exchange.export import Exported, Model, copy_step, step_model, write_model
from autoshard.ckpt.restore.checkpoint_info import Description, describe_step
from autoshard.ckpt.restore.expert_remapping import dims_from_patterns, dims_from_plan
from autoshard.ckpt.restore.restore import damaged_leaves, read_manifest
from autoshard.ckpt.restore.restore_request import Restored, RestoreRequest
from autoshard.ckpt.restore.step_reader import StepReader
from autoshard.ckpt.state import snapshot as snapshots
from autoshard.ckpt.state.named_leaves import Key, LeafSpec
from autoshard.ckpt.state.process_agreement import in_all_processes
from autoshard.ckpt.store.argument_checks import is_integer, save_arguments, step_number
from autoshard.ckpt.store.directory import StepDirectory
from autoshard.ckpt.store.manifest import Manifest, manifest_of
from autoshard.ckpt.store.orbax_storage import Pending, Writer
from autoshard.ckpt.store.retention import RetentionPolicy, expired_steps
from autoshard.errors import CheckpointError

T = TypeVar("T")


class Checkpointer:
    """Saves and restores the full state of a run, by step, in one directory.

    A step is either complete or absent, and a committed step is never overwritten. Each leaf is saved with a digest
    that does not depend on the mesh; `restore` compares it with the restored values. All processes of a run must call
    the same methods in the same order. Not thread-safe.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from autoshard.ckpt import Checkpointer
        >>> state = {"w": jnp.arange(4.0), "step": jnp.int32(7)}
        >>> with tempfile.TemporaryDirectory() as directory, Checkpointer(directory) as checkpoints:
        ...     checkpoints.save(7, state, config={"model": {"width": 4}})
        ...     int(checkpoints.restore(like=state)["step"])
        7
    """

    def __init__(self, directory: Any, *, keep: int | RetentionPolicy | None = 3) -> None:
        """Check the directory; write nothing.

        Args:
            directory: a path to a new or empty directory, or to one that a Checkpointer created.
            keep: how many of the newest steps to keep, None for all, or a `RetentionPolicy`.

        Raises:
            CheckpointError: the directory contains something else, or `keep` is not positive.
        """
        if not isinstance(keep, RetentionPolicy) and keep is not None and not (is_integer(keep) and keep > 0):
            raise CheckpointError(f"keep is {keep!r}; it must be an integer of at least 1, or None to keep all steps.")
        self.keep = keep if isinstance(keep, RetentionPolicy) else RetentionPolicy(last=keep)
        self.restored: Restored | None = None
        self._directory = StepDirectory(directory)
        self._reader = StepReader(self._directory)
        self._writer = Writer()
        self._pending: tuple[int, Pending] | None = None
        self._saved: set[int] = set()  # steps that this object saved

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        return self._directory.path

    def claim(self) -> None:
        """Make this run the only writer of the directory until `close`; the first `save` does this too.

        Raises:
            CheckpointError: the directory belongs to another program, another run is writing to it, or it is read-only.
        """
        in_all_processes(
            f"claim {self._directory.path}",
            self._claim,
            lambda failed: CheckpointError(f"checkpoints cannot be written to {self._directory.path}: {failed}"),
        )

    def _claim(self) -> None:
        if jax.process_index() == 0:
            self._directory.claim()

    def prepare(self, state: Any) -> None:
        """Compile, in the background, the programs that saves of such a state need, so that the first save is short.

        Call it before or after the first train step; the state may be donated at once. An early save waits for it.

        Raises:
            CheckpointError: a leaf cannot be saved.
        """
        with _compat.no_mesh():
            self._writer.prepare(snapshots.compilation(snapshots.savable_leaves(state)))

    def steps(self) -> list[int]:
        """Return the committed steps, ascending; a step that is still being written is not among them."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """Return the newest step, or None; wait for a step that is still being written.

        Damaged steps that `restore` skipped do not count.

        Raises:
            CheckpointError: the step could not be written.
        """
        self.wait()
        return max((step for step in self.steps() if step not in self._reader.damaged), default=None)

    def save(
        self,
        step: int,
        state: Any,
        *,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        plan: Any = None,
        expert_dims: Mapping[str, int] | None = None,
        block: bool = False,
    ) -> None:
        """Save a state, by default in the background.

        The state may be donated as soon as this returns: it is copied on the devices, and the copy is written. With
        `block=True` nothing is copied, and this returns when the step is committed. First waits for the previous save.
        The next `save`, `wait` or `close` raises the errors of the save in the background.

        Args:
            step: the number of the step, not negative. It must not exist yet.
            state: a pytree of arrays, typed or raw RNG keys, numbers, str and bytes.
            config: a JSON-serializable dict to save with the step. `restore` compares its section `model`.
            metrics: numbers to save with the step; `RetentionPolicy` can keep the best steps by one of them.
            plan: the plan of the train step: a `Plan`, or its JSON.
            expert_dims: path patterns (`*/experts/w_*`) -> dimension of experts, for leaves for which `plan` does not
                give it.
            block: whether to wait until the step is committed.

        Raises:
            CheckpointError: the step exists, the directory belongs to another program, another run is writing to it, a
                leaf or an argument cannot be saved (nothing on disk changes then), or the previous save failed.
        """
        self.wait()
        step = step_number(step)
        arguments = save_arguments(config, metrics, plan, expert_dims)
        leaves, pattern_dims = self._in_all_processes(step, lambda: _savable(state, arguments.expert_dims))
        with _compat.no_mesh():
            snapshot = snapshots.take_snapshot(leaves, copy=not block)
        snapshots.check_same_in_all_processes(step, snapshot)
        self._in_all_processes(step, lambda: self._prepare_directory(step))
        self._reader.damaged.clear()

        def manifest() -> Manifest:
            dims = dims_from_plan(arguments.plan, snapshot.specs) | pattern_dims
            config, metrics, plan, _ = arguments
            return manifest_of(step, snapshot, config=config, metrics=metrics, plan=plan, expert_dims=dims)

        with _compat.no_mesh():
            write = self._writer.write(
                self._directory.step_path(step), snapshot, manifest, lambda: self._directory.check_writable(step)
            )
        self._pending = (step, write)
        self._reader.metrics[step] = arguments.metrics
        if block:
            self.wait()

    def _in_all_processes(self, step: int, action: Callable[[], T]) -> T:
        return in_all_processes(
            f"save step {step}", action, lambda failed: CheckpointError(f"step {step} cannot be saved: {failed}")
        )

    def _prepare_directory(self, step: int) -> None:
        """Claim the directory and rename the damaged steps that `restore` skipped, so that `step` can be written.

        Change nothing if `step` exists or the disk cannot be written.
        """
        self._claim()
        if step not in self._reader.damaged:
            self._directory.check_free(step)
        if jax.process_index() == 0:
            if jax.process_count() > 1:  # else in the background
                self._directory.check_writable(step)
            self._reader.set_damaged_aside()

    def wait(self) -> None:
        """Wait until the last save is committed, then remove the steps that `keep` does not retain and nobody reads.

        Raises:
            CheckpointError: the step could not be written; the committed steps are unchanged.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, write = pending
        try:
            write.result()
        except CheckpointError:
            raise
        except Exception as error:  # disk, Orbax, TensorStore and other processes raise unrelated types
            raise CheckpointError(
                f"step {step} could not be written to {self._directory.path}: {error}\n"
                f"Committed steps are untouched: {self.steps() or 'none'}."
            ) from error
        self._saved.add(step)
        if jax.process_index() == 0:  # the step just written is intact, and stays
            self._directory.remove(*self._expired(self.keep))

    def prune(self, keep: RetentionPolicy) -> list[int]:
        """Remove and return the steps that `keep` does not retain, except the newest intact step and steps in use.

        If there are steps to remove, reads the newest step and compares its digests, as `verify` does. Reads earlier
        steps only if that one is damaged.

        Raises:
            CheckpointError: no step is intact, another run writes to it, it cannot be written, or `keep` is invalid.
        """
        self._directory.claim()
        removable = self.would_prune(keep)
        removed = self._directory.remove(*removable)
        self._reader.warn_of_readers([step for step in removable if step not in removed])
        return removed

    def would_prune(self, keep: RetentionPolicy) -> list[int]:
        """Return the steps that `prune` would remove. Reads the same steps as `prune`.

        Raises:
            CheckpointError: there are steps to remove, but no step is intact.
        """
        return self._reader.removable(self._expired(keep))

    def _expired(self, keep: RetentionPolicy) -> list[int]:
        return expired_steps(keep, self.steps(), self._reader.metrics_of, self._saved)

    def copy(self, step: int | None, directory: Any) -> None:
        """Copy a step, by default the newest, unchanged to another directory, and compare the copy with its digests.

        Raises:
            CheckpointError: the step does not exist, or the other directory has it already, was not created by a
                Checkpointer, is being written by another run, or cannot be written.
            DamagedCheckpointError: the step is damaged; the other directory has no part of it.
        """
        target = StepDirectory(directory)
        try:
            self._reader.read(step, lambda _, number: copy_step(self._directory, number, target))
        finally:
            target.release()

    def export(
        self,
        step: int | None,
        folder: Any,
        *,
        use_ema: bool | None = False,
        dtype: str | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> Exported:
        """Write the model of a step, by default of the newest, as safetensors files with a `config.json`.

        Also copies the trainer's `inference.json` and tokenizer, if any, and writes a `generation_config.json`.

        The model of a train state is its parts `params`, `frozen` and `variables`; the model of any other state is the
        whole state. Only one tensor is in memory at a time.

        Args:
            step: the number of the step.
            folder: a new folder on this machine.
            use_ema: whether to export the moving average of the parameters. None: do so if the run evaluated it.
            dtype: dtype of floating-point tensors; by default the saved one.
            shard_bytes: largest number of bytes of tensors in one file. A larger model is written as several files
                and an index.

        Raises:
            CheckpointError: the step does not exist, the folder is not empty, or there is no moving average.
            DamagedCheckpointError: a tensor differs from its digest; the files written so far are removed.
        """

        def write(path: Any, number: int) -> Exported:
            model = step_model(path, number, use_ema=use_ema, dtype=dtype)
            return write_model(model, Path(folder), shard_bytes=shard_bytes)

        return self._reader.read(step, write)

    def model(self, step: int | None = None, *, use_ema: bool | None = False, dtype: str | None = None) -> Model:
        """Return the model of a step, as tensors that are read one at a time while the step stays; see `export`."""
        return self._reader.read(step, lambda path, number: step_model(path, number, use_ema=use_ema, dtype=dtype))

    def close(self) -> None:
        """Wait for the save in the background and let another process write to the directory."""
        try:
            self.wait()
        finally:
            self._directory.release()

    def config(self, step: int | None = None) -> dict[str, Any]:
        """Return the config that was saved with a step, by default with the newest.

        Raises:
            CheckpointError: the step does not exist, or is damaged.
        """
        return self._reader.read(step, read_manifest).config

    def verify(self, step: int | None = None) -> list[str]:
        """Return the paths of the damaged leaves of a step. Reads the leaves one by one on the host.

        Raises:
            CheckpointError: the step does not exist, or its manifest or digests cannot be read.
        """
        return self._reader.read(step, damaged_leaves)

    def describe(self, step: int | None = None) -> Description:
        """Return the leaves, sizes, meshes, metrics, plan and versions of a step, by default of the newest.

        Raises:
            CheckpointError: the step does not exist, or is damaged.
        """
        return self._reader.read(step, describe_step)

    def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        shardings: Any = None,
        config: Mapping[str, Any] | None = None,
        allow_cast: bool = False,
        partial: bool = False,
        rename: Mapping[str, str] | None = None,
        experts: Sequence[int] | None = None,
        upcycle: Mapping[str, int] | None = None,
        expert_dims: Mapping[str, int] | None = None,
        fallback: bool | None = None,
    ) -> Any:
        """Read a state directly into the requested shardings, on any mesh.

        Args:
            step: the number of the step, by default the newest.
            like: the template: a pytree of arrays, or of `jax.ShapeDtypeStruct` with shardings (without one: on the
                first device). Its structure, shapes and dtypes must be the saved ones. NumPy arrays, numbers, str and
                bytes are restored as the same types. None: the whole saved state, as nested dicts.
            shardings: shardings that replace those of `like`: one for all leaves, or a tree with the structure of
                `like` or a prefix of it. May contain devices, and `PartitionSpec`s on the mesh of `jax.set_mesh`.
            config: the config to compare with the saved one. If it has a section `model`, only that section is
                compared.
            allow_cast: cast leaves that were saved in another dtype, integers to integers and floats to floats.
                Values out of range are an error.
            partial: leaves of `like` that were not saved keep their values, and saved leaves that `like` does not have
                are not read. At least one leaf must have been saved.
            rename: saved -> wanted `/`-joined path or path prefix. With `*/` before both, matches levels in the middle
                of paths: `*/mlp` -> `*/experts`.
            experts: the numbers of the experts to restore, in this order; a repeated number copies the expert. Also
                selects in optimizer state, moving average and router. None: all.
            upcycle: path patterns in `like` (`*/experts/w_*`) -> dimension of experts: a saved leaf without that
                dimension is copied for each expert.
            expert_dims: patterns of saved paths -> dimension of experts, for leaves for which the step has none.
            fallback: whether to restore the newest earlier intact step, with a warning, if the step is damaged. By
                default only if no step is given.

        Returns:
            The state. The attribute `restored` has the record of the restore.

        Raises:
            MismatchError: the step is of another model; lists every difference.
            DamagedCheckpointError: the values differ from the saved ones; names the newest intact step.
            RemovedStepError: the given step was removed while it was read. If no step is given, the step that is newest
                after the removal is read instead.
            CheckpointError: the step does not exist, or the state cannot be placed.
        """
        self.wait()
        request = RestoreRequest(
            template=like,
            shardings=shardings,
            config=config,
            allow_cast=allow_cast,
            partial=partial,
            rename=rename or {},
            experts=experts,
            upcycle=upcycle or {},
            expert_dims=expert_dims or {},
        )
        state, self.restored = self._reader.restore(step, request, step is None if fallback is None else fallback)
        return state


def _savable(state: Any, expert_dims: Mapping[str, int]) -> tuple[list[tuple[LeafSpec, Any]], dict[Key, int]]:
    """Return the leaves of a state and the dimensions of experts that `expert_dims` gives them."""
    leaves = snapshots.savable_leaves(state)
    return leaves, dims_from_patterns(expert_dims, [spec for spec, _ in leaves]) if expert_dims else {}
