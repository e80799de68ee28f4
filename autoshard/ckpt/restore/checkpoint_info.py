"""The description of a committed step, without its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard._units import bytes_text
from autoshard.ckpt.restore.constants import LEAVES_SHOWN
from autoshard.ckpt.restore.restore import expected_digests, read_manifest, reading
from autoshard.ckpt.state.named_leaves import Key
from autoshard.ckpt.store import orbax_storage
from autoshard.ckpt.store.manifest import Manifest


@shown
@dataclass(frozen=True)
class Leaf:
    """One leaf of a step.

    Attributes:
        name: the path, `params/w`.
        shape: the global shape.
        dtype: the name of the dtype.
        nbytes: bytes of the elements.
        layout: the `PartitionSpec` with which it was saved; None if it was not on a mesh.
        digest: the digest of the values, the same on any mesh; None if there are no elements.
        expert_dim: the dimension of experts, if it is known.
        key: the path, one string per level; a level may contain a `/`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    layout: str | None
    digest: int | None
    expert_dim: int | None = None
    key: Key = ()


@shown
@dataclass(frozen=True)
class Description:
    """A committed step, without its values.

    Attributes:
        step: the number of the step.
        path: the path of the step.
        leaves: the leaves of the state, in tree order.
        nbytes: bytes of the leaves.
        file_bytes: bytes of the files.
        metrics: the metrics that were saved with it.
        config: the config that was saved with it.
        plan: the plan of the train step, as written by `Plan.to_json`, or None.
        meshes: the axis sizes of the meshes of the leaves.
        written_by: versions of packages, devices, processes and time.
    """

    step: int
    path: str
    leaves: tuple[Leaf, ...]
    nbytes: int
    file_bytes: int
    metrics: Mapping[str, float]
    config: Mapping[str, Any]
    plan: Any
    meshes: tuple[Mapping[str, int], ...]
    written_by: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        leaves = [{name: getattr(leaf, name) for name in leaf.__dataclass_fields__} for leaf in self.leaves]
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return values | {"leaves": leaves, "meshes": [dict(mesh) for mesh in self.meshes], "metrics": metrics}

    def __str__(self) -> str:
        by = self.written_by
        where = ", ".join(" ".join(f"{name}:{size}" for name, size in mesh.items()) for mesh in self.meshes)
        processes = by.get("processes", "?")
        machines = f"{by.get('devices', '?')} devices, {processes} {'process' if processes == 1 else 'processes'}"
        lines = [
            f"step {self.step} in {self.path}",
            f"  state     {len(self.leaves)} leaves, {bytes_text(self.nbytes)}; {bytes_text(self.file_bytes)} in files",
            f"  written   {by.get('time', 'at an unknown time')} on {machines}{f', mesh {where}' if where else ''}",
            f"  versions  {', '.join(f'{name} {value}' for name, value in by.get('versions', {}).items())}",
        ]
        if self.metrics:
            lines.append(f"  metrics   {', '.join(f'{name} {value:.6g}' for name, value in self.metrics.items())}")
        if self.plan is not None:
            lines.append("  plan      saved")
        counts = sorted({leaf.shape[leaf.expert_dim] for leaf in self.leaves if leaf.expert_dim is not None})
        if counts:
            lines.append(f"  experts   {' or '.join(map(str, counts))} experts")
        largest = sorted(self.leaves, key=lambda leaf: -leaf.nbytes)[:LEAVES_SHOWN]
        for leaf in largest:
            shape = ", ".join(map(str, leaf.shape))
            placed = f" on {leaf.layout}" if leaf.layout not in (None, "()") else ""
            lines.append(f"    {leaf.name}: {leaf.dtype}[{shape}], {bytes_text(leaf.nbytes)}{placed}")
        if len(self.leaves) > len(largest):
            lines.append(f"    and {len(self.leaves) - len(largest)} smaller leaves")
        return "\n".join(lines)


def describe_step(path: Any, step: int) -> Description:
    """Read the manifest and digests of a step and return its description.

    Raises:
        DamagedCheckpointError: the manifest or the digests are damaged.
        RemovedStepError: the step was removed while it was read.
    """
    manifest = read_manifest(path, step)
    return description_of(path, manifest, expected_digests(path, step, manifest))


def description_of(path: Any, manifest: Manifest, digests: Mapping[Key, int]) -> Description:
    """Return the description of a step from its manifest and digests."""
    with reading(path, manifest.step):
        file_bytes = orbax_storage.file_bytes(path)
    return Description(
        step=manifest.step,
        path=str(path),
        leaves=tuple(
            Leaf(
                name=spec.name,
                shape=spec.shape,
                dtype=spec.dtype,
                nbytes=spec.nbytes,
                layout=manifest.layouts.get(spec.key),
                digest=digests.get(spec.key),
                expert_dim=manifest.expert_dims.get(spec.key),
                key=spec.key,
            )
            for spec in manifest.leaves
        ),
        nbytes=manifest.nbytes,
        file_bytes=file_bytes,
        metrics=manifest.metrics,
        config=manifest.config,
        plan=manifest.plan,
        meshes=tuple(manifest.written_by.get("meshes", ())),
        written_by=manifest.written_by,
    )
