"""Reading one step: matching it with the template, reading its arrays, comparing their digests."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard import _compat
from autoshard._columns import listing
from autoshard._gc import paused
from autoshard._processes import gather
from autoshard._shown import shown
from autoshard.ckpt.restore.expert_remapping import dims_from_patterns, expert_changes
from autoshard.ckpt.restore.restore_request import Match, Restored, RestoreRequest, casts, check_leaves, match_paths
from autoshard.ckpt.state import array_digest
from autoshard.ckpt.state.array_packing import pack_target, unpack_leaves
from autoshard.ckpt.state.named_leaves import PACKS, Key, LeafSpec, as_tree, named_leaves, rebuild_leaf, target_struct
from autoshard.ckpt.state.process_agreement import in_all_processes
from autoshard.ckpt.state.snapshot import group_by_mesh, host_digest_rows
from autoshard.ckpt.state.target_shardings import with_shardings
from autoshard.ckpt.store import orbax_storage
from autoshard.ckpt.store.directory import is_committed
from autoshard.ckpt.store.manifest import Manifest, check_config
from autoshard.errors import CheckpointError, DamagedCheckpointError, RemovedStepError


@paused()
def restore_step(path: Any, step: int, request: RestoreRequest) -> tuple[Any, Restored]:
    """Return the state of a step, on the requested shardings, and the record of the restore. Compares all digests.

    Raises:
        MismatchError: the step is of another model.
        DamagedCheckpointError: the step is damaged.
        RemovedStepError: the step was removed while it was read.
        CheckpointError: the template cannot be placed, or the files cannot be read.
    """
    start_s = time.perf_counter()
    manifest = read_manifest(path, step)
    match = _match_leaves(manifest, request, f"step {step} in {path.parent}")
    with _compat.no_mesh():  # leaves may be on other devices than those of the current mesh
        return _restore(path, step, manifest, match, start_s)


def _restore(path: Any, step: int, manifest: Manifest, match: Match, start_s: float) -> tuple[Any, Restored]:
    targets = {key: target_struct(match.read_like(key), spec) for key, spec in match.saved.items() if spec.stored}
    packs = _requested_packs(manifest, match, targets)
    packed = {key for pack in packs.values() for key in pack.leaves.values()}
    single = {key: target for key, target in targets.items() if key not in packed}
    saved, arrays, stacks = in_all_processes(
        f"restore step {step}",
        lambda: _read(path, step, manifest, match, single, packs),
        lambda who: damage_error(path, step, who),
    )
    jax.block_until_ready([*arrays.values(), *stacks.values()])
    read_s = time.perf_counter()
    wrong = [key for key, array in arrays.items() if not _has_type_of(array, targets[key], match.saved[key])]
    wrong += [key for name, pack in packs.items() if not pack.fits(stacks[name]) for key in pack.leaves.values()]
    expected = _sum_digests(path, step, manifest, saved)
    if not wrong:
        digests = _digests(arrays) | _pack_digests(packs, stacks)
        wrong = [key for key, value in digests.items() if value != expected[match.saved[key].key]]
    if wrong:
        raise damage_error(path, step, "values differ from the saved ones", [match.saved[key].key for key in wrong])
    digest_seconds = time.perf_counter() - read_s
    for name, pack in packs.items():
        leaves = unpack_leaves(stacks.pop(name), {index: targets[key] for index, key in pack.leaves.items()})
        arrays |= {pack.leaves[index]: leaf for index, leaf in leaves.items()}
    for key, change in match.changes.items():
        if key in arrays:
            arrays[key] = change.apply(arrays[key], match.leaves[key])
    state = [
        rebuild_leaf(leaf, match.specs[key], arrays.pop(key, None)) if key in match.specs else match.kept(key)
        for key, leaf in match.leaves.items()
    ]
    restored = Restored(
        step,
        nbytes=sum(spec.nbytes for spec in match.saved.values()),
        seconds=time.perf_counter() - start_s,
        digest_seconds=digest_seconds,
        kept=tuple("/".join(key) for key in match.leaves if key not in match.specs),
        unread=tuple(spec.name for spec in match.unread),
        cast=casts(match.specs, match.leaves),
    )
    return jax.tree.unflatten(match.structure, state), restored


def _match_leaves(manifest: Manifest, request: RestoreRequest, where: str) -> Match:
    """Match saved and requested leaves.

    Raises:
        MismatchError: the step is of another model.
        CheckpointError: the state cannot be placed.
    """
    if request.config is not None:
        check_config(manifest.config, request.config, where)
    dims = dict(manifest.expert_dims)
    if request.expert_dims:
        dims |= dims_from_patterns(request.expert_dims, manifest.leaves)
    by_key = {spec.key: spec for spec in manifest.leaves}
    template = request.template
    if template is None:
        changes = expert_changes(by_key, dims, {}, request.experts, {}, where)
        template = as_tree([changes[key].of(spec) if key in changes else spec for key, spec in by_key.items()])
    given = dict(named_leaves(template))
    if request.shardings is not None:
        template = with_shardings(template, request.shardings)
    leaves = dict(named_leaves(template))
    origin = match_paths(by_key, leaves, request.rename, where)
    saved = {key: by_key[origin[key]] for key in leaves if key in origin}
    saved_dims = {key: dims[spec.key] for key, spec in saved.items() if spec.key in dims}
    changes = expert_changes(saved, saved_dims, leaves, request.experts, request.upcycle, where)
    read = {spec.key for spec in saved.values()}
    unread = tuple(spec for spec in manifest.leaves if spec.key not in read)
    specs = {key: changes[key].of(spec) if key in changes else spec for key, spec in saved.items()}
    check_leaves(specs, leaves, given, unread, request, where)
    return Match(leaves, given, saved, specs, changes, unread, jax.tree.structure(template))


@shown
@dataclass(frozen=True)
class _Pack:
    """A pack that contains requested leaves.

    Attributes:
        leaves: index in the pack -> requested path.
        target: the type with which the pack is read.
        shape: `[leaves, *shape]`.
        dtype: the dtype of the pack.
    """

    leaves: dict[int, Key]
    target: Any
    shape: tuple[int, ...]
    dtype: Any

    def fits(self, pack: Any) -> bool:
        return pack.shape == self.shape and pack.dtype == self.dtype


def _requested_packs(manifest: Manifest, match: Match, targets: Mapping[Key, Any]) -> dict[str, _Pack]:
    """Return the packs with requested leaves."""
    requested: dict[str, dict[int, Key]] = {}
    for key in targets:
        if match.saved[key].key in manifest.places:
            name, index = manifest.places[match.saved[key].key]
            requested.setdefault(name, {})[index] = key
    packs = {}
    for name, leaves in requested.items():
        members = manifest.packs[name]
        bits = next(iter(members.values())).bits()
        target = pack_target(len(members), [targets[key] for key in leaves.values()])
        packs[name] = _Pack(leaves, target, (len(members), *bits.shape), bits.dtype)
    return packs


def _read(
    path: Any,
    step: int,
    manifest: Manifest,
    match: Match,
    targets: Mapping[Key, Any],
    packs: Mapping[str, _Pack],
) -> tuple[dict[str, np.ndarray], dict[Key, Any], dict[str, Any]]:
    """Return the saved digest rows, the arrays by requested path, and the packs by name."""
    with reading(path, step):
        saved = orbax_storage.read_digest_rows(path, manifest)
    stored = sum(spec.stored for spec in manifest.leaves)
    partial = len(targets) + len(packs) < stored - len(manifest.places) + len(manifest.packs)
    wanted = {match.saved[key].key: target for key, target in targets.items()}
    wanted |= {(PACKS, name): pack.target for name, pack in packs.items()}
    with reading(path, step, lambda: _find_damaged_alone(path, step, manifest, saved)):
        values = orbax_storage.read_arrays(path, wanted, partial=partial)
        arrays = {key: values[match.saved[key].key] for key in targets}
        return saved, arrays, {name: values[PACKS, name] for name in packs}


def read_manifest(path: Any, step: int) -> Manifest:
    """Return the manifest of a step.

    Raises:
        DamagedCheckpointError: it cannot be read, or belongs to another step.
    """
    with reading(path, step):
        manifest = orbax_storage.read_manifest(path)
    if manifest.step != step:
        raise damage_error(path, step, f"its manifest is of step {manifest.step}, so the directory was renamed")
    return manifest


def damaged_leaves(path: Any, step: int) -> list[str]:
    """Return the paths of a step's leaves that cannot be read or differ from their digests. Reads leaves one by one.

    Raises:
        DamagedCheckpointError: the manifest or the digests are damaged.
        RemovedStepError: the step was removed while it was read.
    """
    manifest = read_manifest(path, step)
    wrong = _find_damaged(path, step, manifest, expected_digests(path, step, manifest))
    if wrong and not is_committed(path):
        raise RemovedStepError(step, path.parent)
    return ["/".join(key) for key in wrong]


def expected_digests(path: Any, step: int, manifest: Manifest) -> dict[Key, int]:
    """Return the saved digest of each leaf with elements.

    Raises:
        DamagedCheckpointError: the digests are damaged.
    """
    with reading(path, step):
        saved = orbax_storage.read_digest_rows(path, manifest)
    return _sum_digests(path, step, manifest, saved)


def damage_error(path: Any, step: int, cause: str, leaves: list[Key] | None = None) -> CheckpointError:
    """Return the error for a damaged step, or for a step that was removed while it was read."""
    if not is_committed(path):
        return RemovedStepError(step, path.parent)
    names = ["/".join(key) for key in leaves or []]
    where = f" in {len(names)} leaves:\n{listing(names)}" if names else ""
    return DamagedCheckpointError(
        f"step {step} in {path.parent} is damaged: {cause}{where}", step=step, cause=cause, leaves=names
    )


@contextlib.contextmanager
def reading(path: Any, step: int, find_leaves: Callable[[], list[Key]] = list) -> Iterator[None]:
    """Convert errors of Orbax and TensorStore to errors of checkpoints. `find_leaves` returns the damaged leaves."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except PermissionError as error:
        raise CheckpointError(f"step {step} in {path.parent} cannot be read: {error}") from error
    except Exception as error:  # damage raises any error of the decoders: JSON, zstd, zarr, protobuf, ...
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise damage_error(path, step, _cause(error, path), find_leaves()) from error


def _cause(error: BaseException, path: Any) -> str:
    file, text = orbax_storage.root_cause(error, path)
    return f"file {file} cannot be read ({text[:300]})" if file else f"it cannot be read ({text[:300]})"


def _find_damaged_alone(path: Any, step: int, manifest: Manifest, saved: Mapping[str, np.ndarray]) -> list[Key]:
    """Return the damaged leaves; none with several processes, because the others do not take part in the search."""
    if jax.process_count() > 1:
        return []
    return _find_damaged(path, step, manifest, _sum_digests(path, step, manifest, saved))


def _find_damaged(path: Any, step: int, manifest: Manifest, expected: Mapping[Key, int]) -> list[Key]:
    """Return the leaves that cannot be read by themselves or differ from their digests."""
    with reading(path, step):
        leaves = orbax_storage.LeafReader(path, manifest)
    wrong: set[Key] = set()
    for spec in leaves.in_order(manifest.leaves):
        try:
            with reading(path, step):
                intact = not spec.stored or array_digest.host_digest(leaves.read(spec.key)) == expected[spec.key]
        except RemovedStepError:
            raise
        except CheckpointError:
            intact = False
        if not intact:
            wrong.add(spec.key)
    return [spec.key for spec in manifest.leaves if spec.key in wrong]


def _has_type_of(array: Any, target: Any, spec: LeafSpec) -> bool:
    if target is np.ndarray:
        return array.shape == spec.shape and array.dtype.name == ("uint8" if spec.is_text else spec.dtype)
    return array.shape == target.shape and array.dtype == target.dtype


def _sum_digests(path: Any, step: int, manifest: Manifest, saved: Mapping[str, np.ndarray]) -> dict[Key, int]:
    """Return the saved digests from their rows."""
    totals = {group: array_digest.total(rows) for group, rows in saved.items()}
    intact = {group: digests for group, digests in totals.items() if digests is not None}
    if len(intact) < len(totals):
        raise damage_error(path, step, "the file of digests has a wrong checksum")
    return {key: int(intact[group][column]) for key, (group, column) in manifest.digests.items()}


def _digests(arrays: Mapping[Key, Any]) -> dict[Key, int]:
    """Return the digests of arrays, computed on their devices."""
    result: dict[Key, int] = {}
    for keys in group_by_mesh(dict(arrays)):
        leaves = [arrays[key] for key in keys]
        parts = (
            _sum_over_devices(array_digest.digests(leaves))
            if isinstance(leaves[0], jax.Array)
            else host_digest_rows(leaves)[0]
        )
        result |= zip(keys, parts[:-1].tolist(), strict=True)
    return result


def _pack_digests(packs: Mapping[str, _Pack], stacks: Mapping[str, Any]) -> dict[Key, int]:
    """Return the digests of the requested leaves of packs."""
    result: dict[Key, int] = {}
    for names in group_by_mesh({(name,): stack for name, stack in stacks.items()}):
        group = {name: stacks[name] for (name,) in names}
        if isinstance(next(iter(group.values())), jax.Array):
            parts = iter(_sum_over_devices(array_digest.digests([], list(group.values()))).tolist())
            rows = {name: list(itertools.islice(parts, stack.shape[0])) for name, stack in group.items()}
            result |= {key: rows[name][index] for name in group for index, key in packs[name].leaves.items()}
        else:
            result |= {
                key: array_digest.host_digest(stack[index])
                for name, stack in group.items()
                for index, key in packs[name].leaves.items()
            }
    return result


def _sum_over_devices(rows: jax.Array) -> np.ndarray:
    """Return the sum over all devices of the rows of `array_digest.digests`, including their checksums."""
    parts = np.zeros(rows.shape[1], np.uint32)
    for shard in rows.addressable_shards:
        if shard.replica_id == 0:
            parts[shard.index[1]] += np.asarray(shard.data).sum(axis=0, dtype=np.uint32)
    if not rows.is_fully_addressable:  # else each process has all rows
        parts = gather("compare digests", parts).sum(axis=0, dtype=np.uint32)
    return parts
