"""The checkpoints of one run."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax

from autoshard import _compat
from autoshard.ckpt.exchange.export import SHARD_BYTES, Exported, Model, copy_step, model_of, write_model
from autoshard.ckpt.restore.checkpoint_info import Description, describe_step
from autoshard.ckpt.restore.expert_remapping import dims_by, dims_of
from autoshard.ckpt.restore.restore import damaged_leaves, read_manifest, restore_step
from autoshard.ckpt.restore.restore_request import Restored, RestoreRequest
from autoshard.ckpt.state.named_leaves import Key, LeafSpec
from autoshard.ckpt.state.process_agreement import together
from autoshard.ckpt.state.snapshot import check_alike, savable, take_snapshot
from autoshard.ckpt.store.argument_checks import is_integer, no_dims, no_mapping, plan_json, refuse, step_number
from autoshard.ckpt.store.directory import StepDirectory
from autoshard.ckpt.store.manifest import Manifest, plain, plain_metrics, written_by
from autoshard.ckpt.store.orbax_storage import Pending, Writer
from autoshard.ckpt.store.retention import RetentionPolicy, expired_steps
from autoshard.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, MismatchError, RemovedStepError

T = TypeVar("T")

_TRIES = 10  # newest steps that may be removed while they are read, until a writer is too fast for this reader


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
        ...     int(checkpoints.restore(like=state)["step"])
        7
    """

    def __init__(self, directory: Any, *, keep: int | RetentionPolicy | None = 3) -> None:
        """Looks at the directory, and writes nothing.

        Args:
            directory: a path; a new or empty directory, or one that a Checkpointer made.
            keep: how many of the newest steps stay, None for all; or a `RetentionPolicy`, which can say more.

        Raises:
            CheckpointError: the directory holds something else, or `keep` keeps nothing.
        """
        if not isinstance(keep, RetentionPolicy) and keep is not None and not (is_integer(keep) and keep > 0):
            raise CheckpointError(f"keep={keep!r}: at least one step must stay, or None for all.")
        self.keep = keep if isinstance(keep, RetentionPolicy) else RetentionPolicy(last=keep)
        self.restored: Restored | None = None
        self._directory = StepDirectory(directory)
        self._writer = Writer()
        self._pending: tuple[int, Pending] | None = None
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._saved: set[int] = set()  # by this one
        self._damaged: set[int] = set()  # known to be, since they were passed over

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

    def claim(self) -> None:
        """Makes this the run that saves here, which the first `save` would do; until `close`.

        Raises:
            CheckpointError: the directory is not ours, is being written by another run, or cannot be written.
        """
        together(
            f"claim {self._directory.path}",
            self._claim,
            lambda who: CheckpointError(f"checkpoints cannot be written to {self._directory.path}: {who}"),
        )

    def _claim(self) -> None:
        if jax.process_index() == 0:
            self._directory.claim()

    def steps(self) -> list[int]:
        """Committed steps, ascending; the one that is being written is not among them."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """The newest step, None where there is none; one that is being written is waited for.

        Damaged ones that `restore` has passed over do not count.

        Raises:
            CheckpointError: it could not be written.
        """
        self.wait()
        return max((step for step in self.steps() if step not in self._damaged), default=None)

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
        """Saves a state, in the background unless told otherwise.

        The state may be donated as soon as this returns: what is written is a copy, made on the devices (with
        `block`, nothing is copied, and this returns when the step is committed). A save that is still being
        written is waited for first. Errors of the background are raised by the next `save`, `wait` or
        `close`.

        Args:
            step: the number of the step, not negative and not there yet.
            state: a pytree of arrays, typed or raw RNG keys, numbers, str and bytes.
            config: what to keep with it, as JSON; the section `model` is what `restore` compares.
            metrics: numbers to keep with it, by which the best steps can be kept (`RetentionPolicy`).
            plan: the plan that it is trained under: a `Plan`, or its JSON.
            expert_dims: patterns of paths (`*/experts/w_*`) -> dimension of experts, where no plan says it.
            block: whether to wait until it is committed.

        Raises:
            CheckpointError: the step exists, the directory is not ours or is being written by another run, a
                leaf or an argument cannot be saved (nothing on disk changes then), or the previous save failed.
        """
        self.wait()
        step = step_number(step)
        config, metrics, expert_dims = ({} if one is None else one for one in (config, metrics, expert_dims))
        wrong = no_mapping("config", config, "{'model': {'width': 64}}")
        wrong += no_mapping("metrics", metrics, "{'val_loss': 1.9}")
        refuse(wrong + no_dims("expert_dims", expert_dims))
        told = plain(config, "config"), plain_metrics(metrics), plan_json(plan)
        leaves, by_pattern = self._together(step, lambda: _savable(state, expert_dims))
        with _compat.no_mesh():
            snapshot = take_snapshot(leaves, copy=not block)
        check_alike(step, snapshot)
        self._together(step, lambda: self._make_room(step))
        self._damaged.clear()

        def described() -> Manifest:
            return Manifest(
                step=step,
                config=told[0],
                leaves=snapshot.specs,
                digests=snapshot.digests,
                written_by=written_by(jax.device_count(), jax.process_count(), snapshot.meshes),
                metrics=told[1],
                plan=told[2],
                layouts=snapshot.layouts,
                places=snapshot.places,
                expert_dims=dims_of(told[2], snapshot.specs) | by_pattern,
            )

        with _compat.no_mesh():
            self._pending = (step, self._writer.write(self._directory.step_path(step), snapshot, described))
        self._metrics[step] = told[1]
        if block:
            self.wait()

    def _together(self, step: int, action: Callable[[], T]) -> T:
        return together(f"save step {step}", action, lambda who: CheckpointError(f"step {step} cannot be saved: {who}"))

    def _make_room(self, step: int) -> None:
        """Claims the directory, for a step that is not there yet; nothing is changed where it cannot be written.

        Damaged steps that were passed over make room for the run that goes on before them.
        """
        self._claim()
        if step not in self._damaged and self._directory.step_path(step).exists():
            raise CheckpointError(
                f"{self._directory.path} has step {step} already, and a committed step is never "
                "overwritten. Continue from it, remove it yourself, or name another directory."
            )
        if jax.process_index() == 0:
            self._directory.check_writable(step)
            for damaged in sorted(self._damaged & set(self.steps())):
                name = self._directory.set_aside(damaged)
                warnings.warn(f"step {damaged} in {self.directory} is damaged: it is {name} now", CheckpointWarning, 6)

    def wait(self) -> None:
        """Waits until what was saved is committed, and removes the steps that do not stay (`keep`).

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
        self._saved.add(step)
        if jax.process_index() == 0:  # the step that was just written is intact, and stays
            self._remove(expired_steps(self.keep, self.steps(), self._metrics_of, self._saved))

    def prune(self, keep: RetentionPolicy) -> list[int]:
        """Removes the steps that do not stay, and returns them; the newest that is intact always stays.

        To know it, the newest step is read and compared with its digests, as `verify` does, where something is to go;
        earlier ones only where that is damaged.

        Raises:
            CheckpointError: no step is intact, or the directory is being written by another run or cannot be written.
        """
        self._directory.claim()
        gone = self.would_prune(keep)
        self._remove(gone)
        return gone

    def _remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            try:
                self._directory.remove(step)
            except OSError as error:
                raise CheckpointError(f"step {step} cannot be removed from {self.directory}: {error}") from error

    def would_prune(self, keep: RetentionPolicy) -> list[int]:
        """The steps that `prune` would remove; reads what it would.

        Raises:
            CheckpointError: steps would go, and none is intact.
        """
        steps = self.steps()
        gone = expired_steps(keep, steps, self._metrics_of, self._saved)
        if not gone:
            return []
        damaged: list[int] = []
        for step in reversed(steps):
            if self._is_intact(step):
                break
            damaged.append(step)
        else:
            raise CheckpointError(f"no step in {self.directory} is intact: nothing is removed.")
        if damaged:
            said = f"damaged in {self.directory}: steps {_few(damaged[::-1])}. The newest that is intact, {step}, stays"
            warnings.warn(said, CheckpointWarning, stacklevel=2)
        return [one for one in gone if one != step]

    def _is_intact(self, step: int) -> bool:
        try:
            return not damaged_leaves(self._directory.step_path(step), step)
        except (DamagedCheckpointError, RemovedStepError):
            return False

    def copy(self, step: int | None, directory: Any) -> None:
        """Copies a step as it is to another directory, the newest by default, and compares the copy with its digests.

        Raises:
            CheckpointError: there is no such step, the other directory has it already, is not ours, is being written
                by another run, or cannot be written.
            DamagedCheckpointError: the step is damaged; nothing of it is in the other directory.
        """
        target = StepDirectory(directory)
        try:
            self._read(step, lambda number: copy_step(self._directory, number, target))
        finally:
            target.release()

    def export(
        self,
        step: int | None,
        folder: Any,
        *,
        use_ema: bool = False,
        dtype: str | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> Exported:
        """Writes the model of a step, the newest by default, as safetensors files with a `config.json`.

        A folder that says how text is sampled (the trainer's `inference.json`) adds a `generation_config.json`.

        Of a train state the parts `params`, `frozen` and `variables` are the model's; of another state all is. One
        tensor is in memory at a time.

        Args:
            step: which.
            folder: a new one, on this machine.
            use_ema: take the parameters' moving average.
            dtype: of floating-point tensors; as they are saved by default.
            shard_bytes: of tensors in a file at most; where there are more, several files and an index are written.

        Raises:
            CheckpointError: there is no such step, the folder holds something, or there is no moving average.
            DamagedCheckpointError: a tensor is not the one that was saved; nothing is left of what was written.
        """
        model = self.model(step, use_ema=use_ema, dtype=dtype)
        return write_model(model, Path(folder), shard_bytes=shard_bytes)

    def model(self, step: int | None = None, *, use_ema: bool = False, dtype: str | None = None) -> Model:
        """The model of a step, as tensors that are read one at a time; see `export`."""
        path = self._directory.step_path
        return self._read(step, lambda number: model_of(path(number), number, use_ema=use_ema, dtype=dtype))

    def _metrics_of(self, step: int) -> Mapping[str, float]:
        if step not in self._metrics:
            try:
                self._metrics[step] = read_manifest(self._directory.step_path(step), step).metrics
            except CheckpointError:  # a step that cannot be read is not among the best
                self._metrics[step] = {}
        return self._metrics[step]

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
        return self._read(step, lambda number: read_manifest(self._directory.step_path(number), number)).config

    def verify(self, step: int | None = None) -> list[str]:
        """Paths of the damaged leaves of a step, read on the host one by one; empty where all is well.

        Raises:
            CheckpointError: there is no such step, or nothing of it can be read.
        """
        return self._read(step, lambda number: damaged_leaves(self._directory.step_path(number), number))

    def describe(self, step: int | None = None) -> Description:
        """What a step is, the newest by default: leaves, sizes, meshes, metrics, plan, versions; prints as a page.

        Raises:
            CheckpointError: there is no such step, or it is damaged.
        """
        return self._read(step, lambda number: describe_step(self._directory.step_path(number), number))

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
        """Reads a state back, straight onto the wanted shardings, whatever mesh it was saved from.

        Args:
            step: which, the newest by default.
            like: a pytree of arrays, or of `jax.ShapeDtypeStruct` with shardings (without one: on the first
                device). Structure, shapes and dtypes must be the saved ones. NumPy arrays, numbers, str and bytes
                come back as such. None: all that was saved, as nested dicts.
            shardings: where the leaves go instead: one sharding for all, or a tree of them that is `like`'s
                or a prefix of it. A device will do, and a `PartitionSpec` on the mesh of `jax.set_mesh`.
            config: compared with the saved one; if it has a section `model`, that section alone is.
            allow_cast: cast leaves that were saved in another dtype, integers to integers and floats to
                floats; a value that does not fit is an error.
            partial: leaves of `like` that were not saved keep their values, and saved ones that `like` lacks
                are left out. One at least must have been saved.
            rename: `/`-joined paths, or the first levels of paths, that `like` calls otherwise: saved ->
                wanted. With `*/` before both, levels in the middle of paths: `*/mlp` -> `*/experts`.
            experts: only these experts, by their numbers, in this order; one that is named several times is
                copied. Optimizer state, average and router follow. None: all.
            upcycle: patterns of paths in `like` (`*/experts/w_*`) -> dimension of experts: a saved leaf
                without that dimension is copied for each expert.
            expert_dims: patterns of saved paths -> dimension of experts, where the checkpoint does not say it.
            fallback: take the newest earlier step that is intact where the wanted one is damaged, with a
                warning. By default where no step is named.

        Returns:
            The state; `restored` says which step it is and how it went.

        Raises:
            MismatchError: it is a checkpoint of another model; every difference is listed.
            DamagedCheckpointError: its values are not the ones that were saved; names the newest step that is
                intact.
            RemovedStepError: it was removed while it was read, as all readers raise it; without a number they go on
                with the newest step then.
            CheckpointError: there is no such step, or the state cannot be placed.
        """
        self.wait()
        fall_back = step is None if fallback is None else fallback
        wanted = RestoreRequest(
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
        return self._read(step, lambda number: self._restore(number, wanted, fall_back))

    def _restore(self, step: int, wanted: RestoreRequest, fallback: bool) -> Any:
        try:
            state, self.restored = restore_step(self._directory.step_path(step), step, wanted)
        except DamagedCheckpointError as error:
            earlier = self._intact_before(step, wanted)
            if earlier is None:
                raise _advised(error, "No earlier step is intact.") from error
            state, told, passed = earlier
            if not fallback:
                del state, earlier
                raise _advised(error, f"Step {told.step} is intact: restore that, or pass fallback=True.") from error
            self.restored = replace(told, damaged=tuple(sorted([*passed, step])))
            self._damaged |= {*passed, step}
            warnings.warn(f"{error}\nStep {told.step} is restored instead.", CheckpointWarning, stacklevel=5)
        return state

    def _read(self, step: int | None, action: Callable[[int], T]) -> T:
        """What `action` makes of a step, the newest by default; where that is removed meanwhile, of the newest then.

        Raises:
            RemovedStepError: the step was named, or run after run the newest is removed.
        """
        for tried in itertools.count(1):
            number = self._existing(step)
            try:
                return action(number)
            except RemovedStepError:
                if step is not None or tried == _TRIES or jax.process_count() > 1:  # which may see other steps
                    raise
        raise AssertionError

    def _existing(self, step: int | None) -> int:
        step = None if step is None else step_number(step)
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self._directory.path}.")
        if step is not None and step not in steps:
            raise CheckpointError(f"there is no step {step} in {self._directory.path}: it has {_few(steps)}.")
        return steps[-1] if step is None else step

    def _intact_before(self, step: int, wanted: RestoreRequest) -> tuple[Any, Restored, list[int]] | None:
        """The newest intact state before a step, how it went, and the damaged steps on the way."""
        passed: list[int] = []
        for earlier in reversed([one for one in self.steps() if one < step]):
            try:
                return *restore_step(self._directory.step_path(earlier), earlier, wanted), passed
            except DamagedCheckpointError:
                passed.append(earlier)
            except (MismatchError, RemovedStepError):
                continue
        return None


def _savable(state: Any, expert_dims: Mapping[str, int]) -> tuple[list[tuple[LeafSpec, Any]], dict[Key, int]]:
    """The leaves of a state, where all can be saved, and the dimensions of experts that patterns give them."""
    leaves = savable(state)
    return leaves, dims_by(expert_dims, [spec for spec, _ in leaves]) if expert_dims else {}


def _advised(error: DamagedCheckpointError, advice: str) -> DamagedCheckpointError:
    gap = "\n" if "\n" in str(error) else ". "  # below a list of leaves, else on the same line
    return DamagedCheckpointError(f"{error}{gap}{advice}", step=error.step, cause=error.cause, leaves=error.leaves)


def _few(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-10:]))
    return f"..., {shown}" if len(steps) > 10 else shown
