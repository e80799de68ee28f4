"""Reading one step back: is it this model's, is it whole, are its values the ones that were saved."""

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
from autoshard._processes import gathered
from autoshard.ckpt.restore.expert_remapping import changes, dims_by
from autoshard.ckpt.restore.restore_request import Match, Restored, RestoreRequest, casts, check_leaves, renamed
from autoshard.ckpt.state import array_digest
from autoshard.ckpt.state.array_packing import pack_target, taken
from autoshard.ckpt.state.named_leaves import PACKS, Key, LeafSpec, as_tree, named_leaves, rebuilt, target_struct
from autoshard.ckpt.state.process_agreement import together
from autoshard.ckpt.state.snapshot import grouped, host_rows
from autoshard.ckpt.state.target_shardings import with_shardings
from autoshard.ckpt.store import orbax_storage
from autoshard.ckpt.store.directory import is_committed
from autoshard.ckpt.store.manifest import Manifest, check_config
from autoshard.errors import CheckpointError, DamagedCheckpointError, RemovedStepError


@paused()
def restore_step(path: Any, step: int, wanted: RestoreRequest) -> tuple[Any, Restored]:
    """The state of one step, placed as is wanted and compared with the digests that were saved; and how it went.

    Raises:
        MismatchError: the step is another model's.
        DamagedCheckpointError: the step is not as it was written.
        RemovedStepError: it was removed meanwhile.
        CheckpointError: the template cannot be placed, or the files cannot be read.
    """
    begun = time.perf_counter()
    manifest = read_manifest(path, step)
    match = _matched(manifest, wanted, f"step {step} in {path.parent}")
    with _compat.no_mesh():  # leaves need not be on the devices of a mesh that is set
        return _restored(path, step, manifest, match, begun)


def _restored(path: Any, step: int, manifest: Manifest, match: Match, begun: float) -> tuple[Any, Restored]:
    """What `restore_step` returns; `begun` is when it began."""
    targets = {key: target_struct(match.read_like(key), spec) for key, spec in match.saved.items() if spec.stored}
    packs = _wanted_packs(manifest, match, targets)
    packed = {key for pack in packs.values() for key in pack.leaves.values()}
    single = {key: target for key, target in targets.items() if key not in packed}
    saved, arrays, stacks = together(
        f"restore step {step}",
        lambda: _read(path, step, manifest, match, single, packs),
        lambda who: damaged(path, step, who),
    )
    jax.block_until_ready([*arrays.values(), *stacks.values()])
    read_at = time.perf_counter()
    wrong = [key for key, array in arrays.items() if not _as_wanted(array, targets[key], match.saved[key])]
    wrong += [key for name, pack in packs.items() if not pack.fits(stacks[name]) for key in pack.leaves.values()]
    expected = _expected(path, step, manifest, saved)
    if not wrong:
        found = _digests(arrays) | _pack_digests(packs, stacks)
        wrong = [key for key, value in found.items() if value != expected[match.saved[key].key]]
    if wrong:
        raise damaged(path, step, "other values than were saved", [match.saved[key].key for key in wrong])
    digest_seconds = time.perf_counter() - read_at
    for name, pack in packs.items():
        leaves = taken(stacks.pop(name), {index: targets[key] for index, key in pack.leaves.items()})
        arrays |= {pack.leaves[index]: leaf for index, leaf in leaves.items()}
    for key, change in match.changes.items():
        if key in arrays:
            arrays[key] = change.applied(arrays[key], match.leaves[key])
    state = [
        rebuilt(leaf, match.specs[key], arrays.pop(key, None)) if key in match.specs else match.kept(key)
        for key, leaf in match.leaves.items()
    ]
    told = Restored(
        step,
        nbytes=sum(spec.nbytes for spec in match.saved.values()),
        seconds=time.perf_counter() - begun,
        digest_seconds=digest_seconds,
        kept=tuple("/".join(key) for key in match.leaves if key not in match.specs),
        unread=tuple(spec.name for spec in match.unread),
        cast=casts(match.specs, match.leaves),
    )
    return jax.tree.unflatten(match.structure, state), told


def _matched(manifest: Manifest, wanted: RestoreRequest, where: str) -> Match:
    """Which saved leaf is for which wanted one, and what has to be done with it.

    Raises:
        MismatchError: it is another model's.
        CheckpointError: it cannot be placed as is wanted.
    """
    if wanted.config is not None:
        check_config(manifest.config, wanted.config, where)
    dims = manifest.expert_dims | (dims_by(wanted.expert_dims, manifest.leaves) if wanted.expert_dims else {})
    by_key = {spec.key: spec for spec in manifest.leaves}
    template = wanted.template
    if template is None:
        own = changes(by_key, dims, {}, wanted.experts, {}, where)
        template = as_tree([own[key].of(spec) if key in own else spec for key, spec in by_key.items()])
    given = dict(named_leaves(template))
    if wanted.shardings is not None:
        template = with_shardings(template, wanted.shardings)
    leaves = dict(named_leaves(template))
    origin = renamed(by_key, leaves, wanted.rename, where)
    saved = {key: by_key[origin[key]] for key in leaves if key in origin}
    own_dims = {key: dims[spec.key] for key, spec in saved.items() if spec.key in dims}
    made = changes(saved, own_dims, leaves, wanted.experts, wanted.upcycle, where)
    taken = {spec.key for spec in saved.values()}
    unread = tuple(spec for spec in manifest.leaves if spec.key not in taken)
    specs = {key: made[key].of(spec) if key in made else spec for key, spec in saved.items()}
    check_leaves(specs, leaves, given, unread, wanted, where)
    return Match(leaves, given, saved, specs, made, unread, jax.tree.structure(template))


@dataclass(frozen=True)
class _Pack:
    """What is wanted of a pack: its leaves' wanted paths, by which of it they are, and as what the whole is read."""

    leaves: dict[int, Key]
    target: Any
    shape: tuple[int, ...]
    dtype: Any

    def fits(self, pack: Any) -> bool:
        return pack.shape == self.shape and pack.dtype == self.dtype


def _wanted_packs(manifest: Manifest, match: Match, targets: Mapping[Key, Any]) -> dict[str, _Pack]:
    """The packs that something is wanted of."""
    wanted: dict[str, dict[int, Key]] = {}
    for key in targets:
        if match.saved[key].key in manifest.places:
            name, index = manifest.places[match.saved[key].key]
            wanted.setdefault(name, {})[index] = key
    packs = {}
    for name, leaves in wanted.items():
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
    """The digests that were saved, the arrays by their wanted paths, and the packs."""
    with reading(path, step):
        saved = orbax_storage.read_digest_rows(path, manifest)
    some = len(targets) + len(packs) < sum(spec.stored for spec in manifest.leaves) - len(manifest.places) + len(
        manifest.packs
    )
    asked = {match.saved[key].key: one for key, one in targets.items()}
    asked |= {(PACKS, name): pack.target for name, pack in packs.items()}
    with reading(path, step, lambda: _damaged_here(path, step, manifest, saved)):
        found = orbax_storage.read_arrays(path, asked, partial=some)
        arrays = {key: found[match.saved[key].key] for key in targets}
        return saved, arrays, {name: found[PACKS, name] for name in packs}


def read_manifest(path: Any, step: int) -> Manifest:
    """The manifest of a step.

    Raises:
        DamagedCheckpointError: it cannot be read, or belongs to another step.
    """
    with reading(path, step):
        manifest = orbax_storage.read_manifest(path)
    if manifest.step != step:
        raise damaged(path, step, f"its manifest is the one of step {manifest.step}: the directory was renamed")
    return manifest


def damaged_leaves(path: Any, step: int) -> list[str]:
    """Paths of a step's leaves that cannot be read or differ from what was saved; read one by one.

    Raises:
        DamagedCheckpointError: the manifest or the digests themselves are damaged.
        RemovedStepError: the step was removed meanwhile.
    """
    manifest = read_manifest(path, step)
    wrong = _probe(path, step, manifest, expected_digests(path, step, manifest))
    if wrong and not is_committed(path):
        raise RemovedStepError(step, path.parent)
    return ["/".join(key) for key in wrong]


def expected_digests(path: Any, step: int, manifest: Manifest) -> dict[Key, int]:
    """The digest that was saved of each leaf with elements.

    Raises:
        DamagedCheckpointError: they are not as they were written.
    """
    with reading(path, step):
        saved = orbax_storage.read_digest_rows(path, manifest)
    return _expected(path, step, manifest, saved)


def damaged(path: Any, step: int, cause: str, leaves: list[Key] | None = None) -> CheckpointError:
    """The error for a step that is not as it was written, or that was removed meanwhile."""
    if not is_committed(path):
        return RemovedStepError(step, path.parent)
    names = ["/".join(key) for key in leaves or []]
    where = f" in {len(names)} leaves:\n{listing(names)}" if names else ""
    return DamagedCheckpointError(
        f"step {step} in {path.parent} is damaged: {cause}{where}", step=step, cause=cause, leaves=names
    )


@contextlib.contextmanager
def reading(path: Any, step: int, find_leaves: Callable[[], list[Key]] = list) -> Iterator[None]:
    """Turns what Orbax and TensorStore raise into what it means; `find_leaves` says which leaves damage is in."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except PermissionError as error:
        raise CheckpointError(f"step {step} in {path.parent} cannot be read: {error}") from error
    except Exception as error:  # a flipped bit shows as whatever its decoder raises: JSON, zstd, zarr, protobuf, ...
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise damaged(path, step, _cause(error, path), find_leaves()) from error


def _cause(error: BaseException, path: Any) -> str:
    file, text = orbax_storage.explained(error, path)
    return f"file {file} cannot be read ({text[:300]})" if file else f"it cannot be read ({text[:300]})"


def _damaged_here(path: Any, step: int, manifest: Manifest, saved: Mapping[str, np.ndarray]) -> list[Key]:
    """The damaged leaves, where they can be found out."""
    if jax.process_count() > 1:  # the others do not take part in the search
        return []
    return _probe(path, step, manifest, _expected(path, step, manifest, saved))


def _probe(path: Any, step: int, manifest: Manifest, expected: Mapping[Key, int]) -> list[Key]:
    """The leaves that cannot be read alone, or are not what their digest says."""
    leaves = orbax_storage.Leaves(path, manifest)
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


def _as_wanted(array: Any, target: Any, spec: LeafSpec) -> bool:
    if target is np.ndarray:
        return array.shape == spec.shape and array.dtype.name == ("uint8" if spec.is_text else spec.dtype)
    return array.shape == target.shape and array.dtype == target.dtype


def _expected(path: Any, step: int, manifest: Manifest, saved: Mapping[str, np.ndarray]) -> dict[Key, int]:
    """The digests that were saved."""
    totals = {group: array_digest.total(rows) for group, rows in saved.items()}
    whole = {group: parts for group, parts in totals.items() if parts is not None}
    if len(whole) < len(totals):
        raise damaged(path, step, "the file of digests is not as it was written")
    return {key: int(whole[group][column]) for key, (group, column) in manifest.digests.items()}


def _digests(arrays: Mapping[Key, Any]) -> dict[Key, int]:
    """The digests of what was read, each computed where its array lies."""
    found: dict[Key, int] = {}
    for keys in grouped(dict(arrays)):
        leaves = [arrays[key] for key in keys]
        parts = _summed(array_digest.digests(leaves)) if isinstance(leaves[0], jax.Array) else host_rows(leaves)[0]
        found |= zip(keys, parts[:-1].tolist(), strict=True)
    return found


def _pack_digests(packs: Mapping[str, _Pack], stacks: Mapping[str, Any]) -> dict[Key, int]:
    """The digests of the wanted leaves of packs."""
    found: dict[Key, int] = {}
    for names in grouped({(name,): stack for name, stack in stacks.items()}):
        group = {name: stacks[name] for (name,) in names}
        if isinstance(next(iter(group.values())), jax.Array):
            parts = iter(_summed(array_digest.digests([], list(group.values()))).tolist())
            rows = {name: list(itertools.islice(parts, stack.shape[0])) for name, stack in group.items()}
            found |= {key: rows[name][index] for name in group for index, key in packs[name].leaves.items()}
        else:
            found |= {
                key: array_digest.host_digest(stack[index])
                for name, stack in group.items()
                for index, key in packs[name].leaves.items()
            }
    return found


def _summed(rows: jax.Array) -> np.ndarray:
    """`digest.digests` added up over all devices, its seal as well; off meshes the devices may all have the whole."""
    parts = np.zeros(rows.shape[1], np.uint32)
    for shard in rows.addressable_shards:
        if shard.replica_id == 0:
            parts[shard.index[1]] += np.asarray(shard.data).sum(axis=0, dtype=np.uint32)
    if not rows.is_fully_addressable:  # else each process has it whole, and would count it once more
        parts = gathered("compare digests", parts).sum(axis=0, dtype=np.uint32)
    return parts
