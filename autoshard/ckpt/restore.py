"""Reading one step back: is it this model's, is it whole, are its values the ones that were saved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from autoshard._processes import gathered
from autoshard.ckpt import digest, storage
from autoshard.ckpt.errors import CheckpointError, DamagedCheckpointError, listing
from autoshard.ckpt.experts import changes, dims_by
from autoshard.ckpt.leaves import Key, LeafSpec, as_tree, named_leaves, rebuilt, target_struct, with_shardings
from autoshard.ckpt.manifest import Manifest, check_config
from autoshard.ckpt.processes import together
from autoshard.ckpt.snapshot import grouped, host_rows
from autoshard.ckpt.wanted import Match, Restored, Wanted, casts, check_leaves, renamed


def restore_step(path: Any, step: int, wanted: Wanted) -> tuple[Any, Restored]:
    """The state of one step, placed as is wanted and compared with the digests that were saved; and how it went.

    Raises:
        MismatchError: the step is another model's.
        DamagedCheckpointError: the step is not as it was written.
        CheckpointError: the template cannot be placed, or the files cannot be read.
    """
    begun = time.perf_counter()
    manifest = read_manifest(path, step)
    match = _matched(manifest, wanted, f"step {step} in {path.parent}")
    targets = {key: target_struct(match.read_like(key), spec) for key, spec in match.saved.items() if spec.stored}
    saved, arrays = together(
        f"restore step {step}",
        lambda: _read(path, step, manifest, match, targets),
        lambda who: damaged(path, step, who),
    )
    jax.block_until_ready(list(arrays.values()))
    read_at = time.perf_counter()
    wrong = [key for key, array in arrays.items() if not _as_wanted(array, targets[key], match.saved[key])]
    expected = _expected(path, step, manifest, saved)
    wrong = wrong or _differing({key: expected[match.saved[key].key] for key in arrays}, arrays)
    if wrong:
        raise damaged(path, step, "other values than were saved", [match.saved[key].key for key in wrong])
    digest_seconds = time.perf_counter() - read_at
    for key, change in match.changes.items():
        if key in arrays:
            arrays[key] = change.applied(arrays[key], match.leaves[key])
    state = [
        rebuilt(leaf, match.specs[key], arrays.get(key)) if key in match.specs else leaf
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


def _matched(manifest: Manifest, wanted: Wanted, where: str) -> Match:
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
    check_leaves(specs, leaves, unread, wanted, where)
    return Match(leaves, saved, specs, made, unread, jax.tree.structure(template))


def _read(
    path: Any, step: int, manifest: Manifest, match: Match, targets: Mapping[Key, Any]
) -> tuple[dict[str, np.ndarray], dict[Key, Any]]:
    """The digests that were saved, and the arrays by their wanted paths; of several for one saved leaf, each."""
    with reading(path, step):
        saved = storage.read_digest_rows(path, manifest)
    some = len(targets) < sum(spec.stored for spec in manifest.leaves)
    with reading(path, step, lambda: _damaged_here(path, step, manifest, saved)):
        found = storage.read_arrays(path, {match.saved[key].key: one for key, one in targets.items()}, partial=some)
        return saved, {key: found[match.saved[key].key] for key in targets}


def read_manifest(path: Any, step: int) -> Manifest:
    """The manifest of a step.

    Raises:
        DamagedCheckpointError: it cannot be read, or belongs to another step.
    """
    with reading(path, step):
        manifest = storage.read_manifest(path)
    if manifest.step != step:
        raise damaged(path, step, f"its manifest is the one of step {manifest.step}: the directory was renamed")
    return manifest


def damaged_leaves(path: Any, step: int) -> list[str]:
    """Paths of a step's leaves that cannot be read or differ from what was saved; read one by one.

    Raises:
        DamagedCheckpointError: the manifest or the digests themselves are damaged.
    """
    manifest = read_manifest(path, step)
    return ["/".join(key) for key in _probe(path, step, manifest, expected_digests(path, step, manifest))]


def expected_digests(path: Any, step: int, manifest: Manifest) -> dict[Key, int]:
    """The digest that was saved of each leaf with elements.

    Raises:
        DamagedCheckpointError: they are not as they were written.
    """
    with reading(path, step):
        saved = storage.read_digest_rows(path, manifest)
    return _expected(path, step, manifest, saved)


def damaged(path: Any, step: int, cause: str, leaves: list[Key] | None = None) -> DamagedCheckpointError:
    """The error for a step that is not as it was written."""
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
    file, text = storage.explained(error, path)
    return f"file {file} cannot be read ({text[:300]})" if file else f"it cannot be read ({text[:300]})"


def _damaged_here(path: Any, step: int, manifest: Manifest, saved: Mapping[str, np.ndarray]) -> list[Key]:
    """The damaged leaves, where they can be found out."""
    if jax.process_count() > 1:  # the others do not take part in the search
        return []
    return _probe(path, step, manifest, _expected(path, step, manifest, saved))


def _probe(path: Any, step: int, manifest: Manifest, expected: Mapping[Key, int]) -> list[Key]:
    """The leaves that cannot be read alone, or are not what their digest says."""
    wrong = []
    for spec in manifest.leaves:
        try:
            with reading(path, step):
                intact = not spec.stored or digest.host_digest(storage.read_one(path, spec.key)) == expected[spec.key]
        except CheckpointError:
            intact = False
        if not intact:
            wrong.append(spec.key)
    return wrong


def _as_wanted(array: Any, target: Any, spec: LeafSpec) -> bool:
    if target is np.ndarray:
        return array.shape == spec.shape and array.dtype.name == spec.dtype
    return array.shape == target.shape and array.dtype == target.dtype


def _expected(path: Any, step: int, manifest: Manifest, saved: Mapping[str, np.ndarray]) -> dict[Key, int]:
    """The digests that were saved."""
    totals = {group: digest.total(rows) for group, rows in saved.items()}
    whole = {group: parts for group, parts in totals.items() if parts is not None}
    if len(whole) < len(totals):
        raise damaged(path, step, "the file of digests is not as it was written")
    return {key: int(whole[group][column]) for key, (group, column) in manifest.digests.items()}


def _digests(arrays: Mapping[Key, Any]) -> dict[Key, int]:
    """The digests of what was read, each computed where its array lies."""
    found: dict[Key, int] = {}
    for keys in grouped(dict(arrays)):
        leaves = [arrays[key] for key in keys]
        if not isinstance(leaves[0], jax.Array):
            found |= zip(keys, host_rows(leaves)[0, :-1].tolist(), strict=True)
            continue
        rows = np.concatenate([np.asarray(shard.data) for shard in digest.digests(leaves).addressable_shards])
        parts = rows.sum(axis=0, dtype=np.uint32)
        if not leaves[0].is_fully_addressable:  # else each process has it whole, and would count it once more
            parts = gathered("compare digests", parts).sum(axis=0, dtype=np.uint32)
        found |= zip(keys, parts[:-1].tolist(), strict=True)
    return found


def _differing(expected: Mapping[Key, int], arrays: Mapping[Key, Any]) -> list[Key]:
    return [key for key, value in _digests(arrays).items() if value != expected[key]]
