"""Reading one step back: is it this model's, is it whole, are its values the ones that were saved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autoshard._processes import gathered
from autoshard._shown import shown
from autoshard.ckpt import digest, storage
from autoshard.ckpt.errors import CheckpointError, DamagedCheckpointError, MismatchError, listing
from autoshard.ckpt.leaves import (
    Key,
    LeafSpec,
    as_tree,
    castable,
    leaf_spec,
    named_leaves,
    rebuilt,
    target_struct,
    unfit,
    with_shardings,
)
from autoshard.ckpt.manifest import Manifest, check_config
from autoshard.ckpt.processes import together
from autoshard.ckpt.snapshot import grouped, host_rows
from autoshard.sharding.report.units import bytes_text


@shown
@dataclass(frozen=True)
class Wanted:
    """What is to be read, and what of a checkpoint that is not quite that will do.

    Attributes:
        template: the state as it is wanted; None for all that was saved, by paths.
        shardings: on which it is wanted, where the template's own will not do.
        config: compared with the saved one.
        allow_cast: whether leaves of another dtype are cast, integers to integers and floats to floats.
        partial: whether leaves that were not saved stay as the template has them, and saved ones that the
            template lacks are left out.
        rename: paths, or the first levels of paths, that the template calls otherwise: saved -> wanted.
    """

    template: Any = None
    shardings: Any = None
    config: Mapping[str, Any] | None = None
    allow_cast: bool = False
    partial: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)


@shown
@dataclass(frozen=True)
class Restored:
    """How a restore went.

    Attributes:
        step: the one that was restored.
        damaged: newer steps that were damaged, and passed over.
        nbytes: bytes of the leaves that were read.
        seconds: of reading them and comparing their digests.
        digest_seconds: of these for the digests.
        kept: leaves of the template that were not saved.
        unread: saved leaves that the template lacks.
        cast: leaves that were cast, as `path: saved dtype -> dtype`.
    """

    step: int
    nbytes: int
    seconds: float
    digest_seconds: float
    damaged: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"step {self.step}: {bytes_text(self.nbytes)} read in {self.seconds:.2f} s, "
            f"of which {self.digest_seconds:.2f} s for digests"
        ]
        if self.damaged:
            lines.append(f"damaged, and passed over: steps {', '.join(map(str, self.damaged))}")
        for told, names in (("not saved", self.kept), ("saved, not read", self.unread), ("cast", self.cast)):
            if names:
                lines.append(f"{told}: {len(names)} leaves\n{listing(names)}")
        return "\n".join(lines)


def restore_step(path: Any, step: int, wanted: Wanted) -> tuple[Any, Restored]:
    """The state of one step, placed as is wanted and compared with the digests that were saved; and how it went.

    Raises:
        MismatchError: the step is another model's.
        DamagedCheckpointError: the step is not as it was written.
        CheckpointError: the template cannot be placed, or the files cannot be read.
    """
    begun = time.perf_counter()
    manifest = read_manifest(path, step)
    where = f"step {step} in {path.parent}"
    if wanted.config is not None:
        check_config(manifest.config, wanted.config, where)
    template = as_tree(manifest.leaves) if wanted.template is None else wanted.template
    if wanted.shardings is not None:
        template = with_shardings(template, wanted.shardings)
    leaves = dict(named_leaves(template))
    saved_specs = {spec.key: spec for spec in manifest.leaves}
    origin = _renamed(saved_specs, leaves, wanted.rename, where)
    specs = {key: saved_specs[origin[key]] for key in leaves if key in origin}
    unread = sorted(saved_specs.keys() - {origin[key] for key in specs})
    _check_leaves(specs, leaves, [saved_specs[key] for key in unread], wanted, where)
    targets = {key: target_struct(leaves[key], spec) for key, spec in specs.items() if spec.stored}
    some = len(targets) < sum(spec.stored for spec in manifest.leaves)

    def read() -> tuple[dict[str, np.ndarray], dict[Key, Any]]:
        with reading(path, step):
            saved = storage.read_digest_rows(path, manifest)
        with reading(path, step, lambda: _damaged_here(path, step, manifest, saved)):
            found = storage.read_arrays(path, {origin[key]: target for key, target in targets.items()}, partial=some)
            return saved, {key: found[origin[key]] for key in targets}

    saved, arrays = together(f"restore step {step}", read, lambda who: damaged(path, step, who))
    jax.block_until_ready(list(arrays.values()))
    read_at = time.perf_counter()
    wrong = [key for key, array in arrays.items() if not _as_wanted(array, targets[key], specs[key])]
    expected = _expected(path, step, manifest, saved)
    wrong = wrong or _differing({key: expected[origin[key]] for key in arrays}, arrays)
    if wrong:
        raise damaged(path, step, "other values than were saved", [origin[key] for key in wrong])
    digest_seconds = time.perf_counter() - read_at
    cast = tuple(f"{specs[key].name}: {specs[key].dtype} -> {leaves[key].dtype}" for key in _cast(specs, leaves))
    state = [rebuilt(leaf, specs[key], arrays.get(key)) if key in specs else leaf for key, leaf in leaves.items()]
    told = Restored(
        step,
        nbytes=sum(spec.nbytes for spec in specs.values()),
        seconds=time.perf_counter() - begun,
        digest_seconds=digest_seconds,
        kept=tuple("/".join(key) for key in leaves if key not in specs),
        unread=tuple("/".join(key) for key in unread),
        cast=cast,
    )
    return jax.tree.unflatten(jax.tree.structure(template), state), told


def _cast(specs: Mapping[Key, LeafSpec], leaves: Mapping[Key, Any]) -> list[Key]:
    """The leaves that are wanted in another dtype."""
    return [key for key, spec in specs.items() if leaf_spec(key, leaves[key]).dtype != spec.dtype]


def _renamed(
    saved: Mapping[Key, LeafSpec], leaves: Mapping[Key, Any], rename: Mapping[str, str], where: str
) -> dict[Key, Key]:
    """For each wanted path that was saved, the saved one.

    Raises:
        MismatchError: a name matches no saved leaf, or two saved leaves get one path.
    """
    by_name = {"/".join(key): key for key in leaves}
    found: dict[Key, Key] = {}
    used, wrong = set(), []
    for key, spec in saved.items():
        name = spec.name
        for old in sorted(rename, key=len, reverse=True):  # the longest that fits says it
            if name == old or name.startswith(f"{old}/"):
                used.add(old)
                name = rename[old] + name[len(old) :]
                break
        wanted = by_name.get(name)
        if wanted is None:
            continue
        if wanted in found:
            wrong.append(f"{spec.name} and {'/'.join(found[wanted])} both become {name}")
        found[wanted] = key
    wrong += [f"{old!r}: no saved leaf is called that or lies below it" for old in rename if old not in used]
    if wrong:
        raise MismatchError(f"{where}: rename does not fit:\n{listing(wrong)}")
    return found


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


def _check_leaves(
    specs: Mapping[Key, LeafSpec], leaves: Mapping[Key, Any], unread: Sequence[LeafSpec], wanted: Wanted, where: str
) -> None:
    asked = {key: leaf_spec(key, leaf) for key, leaf in leaves.items()}
    lines, casts = [], 0
    for key, want in asked.items():
        have = specs.get(key)
        if have is None:
            if not wanted.partial:
                lines.append(f"{want.name}: not in the checkpoint, wanted {want}")
            elif isinstance(leaves[key], jax.ShapeDtypeStruct):
                lines.append(f"{want.name}: not in the checkpoint, and the template has no value to keep")
        elif have.shape != want.shape or have.dtype != want.dtype:
            fits = have.shape == want.shape and castable(have, want)
            casts += fits
            if not (fits and wanted.allow_cast):
                lines.append(f"{want.name}: saved {have}{_as(have, want)}, wanted {want}")
    if not wanted.partial:
        lines += [f"{spec.name}: saved {spec}, not in the wanted state" for spec in unread]
    if lines:
        hint = f" allow_cast=True casts {casts} of them." if casts and not wanted.allow_cast else ""
        raise MismatchError(
            f"{where} is a checkpoint of another model: {len(lines)} of {len(asked) + len(unread)} leaves differ:\n"
            f"{listing(lines)}\nUse the model that it was saved with, or another directory.{hint}"
        )
    lines = unfit({key: leaves[key] for key in specs})
    if lines:
        raise CheckpointError(f"the state cannot be placed as its template says:\n{listing(lines)}")


def _as(have: LeafSpec, want: LeafSpec) -> str:
    """Under which name it was saved, where that is another."""
    return f" as {have.name}" if have.key != want.key else ""


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
