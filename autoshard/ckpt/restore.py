"""Reading one step back: is it this model's, is it whole, are its values the ones that were saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from autoshard.ckpt import digest, storage
from autoshard.ckpt.errors import CheckpointError, DamagedCheckpointError, MismatchError, listing
from autoshard.ckpt.leaves import (
    Key,
    LeafSpec,
    differences,
    leaf_spec,
    named_leaves,
    rebuilt,
    target_struct,
    unfit,
)
from autoshard.ckpt.manifest import Manifest, check_config
from autoshard.ckpt.processes import gathered, together
from autoshard.ckpt.snapshot import grouped, host_rows


def restore_step(path: Any, step: int, template: Any, config: Mapping[str, Any] | None) -> Any:
    """The state of one step, placed as the template says and compared with the digests that were saved.

    Raises:
        MismatchError: the step is another model's.
        DamagedCheckpointError: the step is not as it was written.
        CheckpointError: the template cannot be placed, or the files cannot be read.
    """
    manifest = read_manifest(path, step)
    if config is not None:
        check_config(manifest.config, config, f"step {step} in {path.parent}")
    leaves = dict(named_leaves(template))
    specs = {spec.key: spec for spec in manifest.leaves}
    _check_leaves(specs, leaves, f"step {step} in {path.parent}")
    targets = {key: target_struct(leaf, specs[key]) for key, leaf in leaves.items() if specs[key].stored}

    def read() -> tuple[dict[str, np.ndarray], dict[Key, Any]]:
        with _reading(path, step):
            saved = storage.read_digest_rows(path, manifest)
        with _reading(path, step, lambda: _damaged_here(path, step, manifest, saved)):
            return saved, storage.read_arrays(path, targets)

    saved, arrays = together(read, lambda who: damaged(path, step, who))
    wrong = [key for key, array in arrays.items() if not _as_wanted(array, targets[key], specs[key])]
    wrong = wrong or _differing(_expected(path, step, manifest, saved), _digests(arrays))
    if wrong:
        raise damaged(path, step, "other values than were saved", wrong)
    state = [rebuilt(leaf, specs[key], arrays.get(key)) for key, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(template), state)


def read_manifest(path: Any, step: int) -> Manifest:
    """The manifest of a step.

    Raises:
        DamagedCheckpointError: it cannot be read, or belongs to another step.
    """
    with _reading(path, step):
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
    with _reading(path, step):
        saved = storage.read_digest_rows(path, manifest)
    return ["/".join(key) for key in _probe(path, step, manifest, _expected(path, step, manifest, saved))]


def damaged(path: Any, step: int, cause: str, leaves: list[Key] | None = None) -> DamagedCheckpointError:
    """The error for a step that is not as it was written."""
    names = ["/".join(key) for key in leaves or []]
    where = f" in {len(names)} leaves:\n{listing(names)}" if names else ""
    return DamagedCheckpointError(
        f"step {step} in {path.parent} is damaged: {cause}{where}", step=step, cause=cause, leaves=names
    )


@contextlib.contextmanager
def _reading(path: Any, step: int, find_leaves: Callable[[], list[Key]] = list) -> Iterator[None]:
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
            with _reading(path, step):
                intact = not spec.stored or digest.host_digest(storage.read_one(path, spec.key)) == expected[spec.key]
        except CheckpointError:
            intact = False
        if not intact:
            wrong.append(spec.key)
    return wrong


def _check_leaves(specs: Mapping[Key, LeafSpec], leaves: Mapping[Key, Any], where: str) -> None:
    wanted = {key: leaf_spec(key, leaf) for key, leaf in leaves.items()}
    lines = differences(specs, wanted)
    if lines:
        raise MismatchError(
            f"{where} is a checkpoint of another model: {len(lines)} of "
            f"{len(specs.keys() | wanted.keys())} leaves differ:\n{listing(lines)}\n"
            "Use the model that it was saved with, or another directory."
        )
    lines = unfit(leaves)
    if lines:
        raise CheckpointError(f"the state cannot be placed as its template says:\n{listing(lines)}")


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
            parts = gathered(parts).sum(axis=0, dtype=np.uint32)
        found |= zip(keys, parts[:-1].tolist(), strict=True)
    return found


def _differing(expected: Mapping[Key, int], found: Mapping[Key, int]) -> list[Key]:
    return [key for key, value in found.items() if value != expected[key]]
