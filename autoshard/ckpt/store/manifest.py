"""The manifest of a step: its leaves, the positions of their digests, its config and versions."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from autoshard._columns import listing
from autoshard._gc import paused
from autoshard._shown import shown
from autoshard.ckpt.state.array_packing import Place
from autoshard.ckpt.state.named_leaves import Key, LeafSpec
from autoshard.ckpt.state.snapshot import Snapshot
from autoshard.errors import CheckpointError, MismatchError

FORMAT = 4  # 1 has no metrics, plan, meshes and time; 2 no packs; 3 no str and bytes leaves
WITHOUT_TEXTS = 3  # format of steps without str and bytes leaves, so that older versions can read them
_PACKAGES = ("autoshard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@shown
@dataclass(frozen=True)
class Manifest:
    """The description of a step that is written with it.

    Attributes:
        step: the number of the step, which detects a renamed directory.
        config: the user's config, as JSON values.
        leaves: all leaves of the state.
        digests: for each stored leaf the group and column of its digest.
        written_by: versions, devices, processes, time and meshes; only displayed.
        metrics: numbers that were saved with the step.
        plan: the plan of the train step, as JSON values, or None.
        layouts: for each leaf on a mesh its `PartitionSpec`; only displayed.
        expert_dims: the dimension of experts of each leaf for which it is known.
        places: for each packed leaf the name of the pack and the leaf's index in it.
    """

    step: int
    config: dict[str, Any]
    leaves: tuple[LeafSpec, ...]
    digests: dict[Key, tuple[str, int]]
    written_by: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    plan: Any = None
    layouts: dict[Key, str] = field(default_factory=dict)
    expert_dims: dict[Key, int] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves; for typed RNG keys those of their bits."""
        return sum(spec.nbytes for spec in self.leaves)

    @functools.cached_property
    def packs(self) -> dict[str, dict[int, LeafSpec]]:
        """For each pack its leaves by index."""
        packs: dict[str, dict[int, LeafSpec]] = {}
        for spec in self.leaves:
            if spec.key in self.places:
                name, index = self.places[spec.key]
                packs.setdefault(name, {})[index] = spec
        return packs

    @paused()
    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with a checksum."""
        body = {
            "format": FORMAT if any(spec.is_text for spec in self.leaves) else WITHOUT_TEXTS,
            "step": self.step,
            "config": self.config,
            "leaves": [
                {
                    "key": list(spec.key),
                    "shape": list(spec.shape),
                    "dtype": spec.dtype,
                    "key_impl": spec.key_impl,
                }
                | ({"digest": list(self.digests[spec.key])} if spec.key in self.digests else {})
                | ({"layout": self.layouts[spec.key]} if spec.key in self.layouts else {})
                | ({"experts": self.expert_dims[spec.key]} if spec.key in self.expert_dims else {})
                | ({"pack": list(self.places[spec.key])} if spec.key in self.places else {})
                for spec in self.leaves
            ],
            "written_by": self.written_by,
            "metrics": {name: _json_number(value) for name, value in self.metrics.items()},
            "plan": self.plan,
        }
        return {"autoshard": body, "sha256": _checksum(body)}

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Return the manifest from the result of `to_json`.

        Raises:
            ValueError: it is not a manifest, or its checksum differs.
            CheckpointError: it was written by a newer version.
        """
        if not isinstance(data, dict) or "autoshard" not in data:
            raise ValueError("the step has no autoshard manifest")
        body = data["autoshard"]
        if _checksum(body) != data.get("sha256"):
            raise ValueError("the manifest has a wrong checksum")
        if body["format"] > FORMAT:
            raise CheckpointError(
                f"the checkpoint has format {body['format']}, this version of autoshard reads up to {FORMAT}: upgrade."
            )
        leaves = [(tuple(leaf["key"]), leaf) for leaf in body["leaves"]]
        specs = tuple(LeafSpec(key, tuple(leaf["shape"]), leaf["dtype"], leaf["key_impl"]) for key, leaf in leaves)
        digests = {key: tuple(leaf["digest"]) for key, leaf in leaves if "digest" in leaf}
        layouts = {key: leaf["layout"] for key, leaf in leaves if "layout" in leaf}
        metrics = {name: float(value) for name, value in body.get("metrics", {}).items()}
        experts = {key: leaf["experts"] for key, leaf in leaves if "experts" in leaf}
        places = {key: tuple(leaf["pack"]) for key, leaf in leaves if "pack" in leaf}
        return cls(
            step=body["step"],
            config=body["config"],
            leaves=specs,
            digests=digests,
            written_by=body["written_by"],
            metrics=metrics,
            plan=body.get("plan"),
            layouts=layouts,
            expert_dims=experts,
            places=places,
        )


def _json_number(value: float) -> float | str:
    """Return a number as a JSON value; a string if it is not finite."""
    return value if math.isfinite(value) else str(value)


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def as_json(value: Any, what: str) -> Any:
    """Return a value as it is after a round trip through JSON.

    Args:
        value: the config or plan.
        what: its name, for errors.

    Raises:
        CheckpointError: it cannot be written as JSON.
    """
    try:
        written = json.dumps(dict(value) if isinstance(value, Mapping) else value)
        return json.loads(written, object_pairs_hook=_unique_keys)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the {what} cannot be written as JSON ({error}): use numbers, strings, lists and dicts of them."
        ) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict; raise if two of its keys, such as 1 and '1', have the same name in JSON."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError(f"two keys of a dict have the same name: {', '.join(name for name, _ in pairs)}")
    return unique


def metrics_as_json(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats.

    Raises:
        CheckpointError: a metric is not a number.
    """
    numbers, wrong = {}, []
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            wrong.append(f"{name}={value!r}")
    if len(numbers) + len(wrong) < len(metrics):
        raise CheckpointError(f"two metrics have the same name: {', '.join(map(str, metrics))}.")
    if wrong:
        raise CheckpointError(f"metrics must be numbers: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not.")
    return numbers


def check_config(saved: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Compare the section `model` of two configs, or the whole configs if `wanted` has no such section.

    Raises:
        MismatchError: naming every key that differs, with both values.
    """
    wanted = as_json(wanted, "config")
    if "model" in wanted:
        saved, wanted = {"model": saved.get("model", {})}, {"model": wanted["model"]}
    lines = differences(saved, wanted, "{name}: saved {one}, wanted {other}".format)
    if lines:
        raise MismatchError(
            f"{where} is a checkpoint of another model: its config differs in {len(lines)} keys:\n"
            f"{listing(lines)}\n"
            "Use the config of the checkpoint, or another directory."
        )


def differences(one: Any, other: Any, line: Callable[..., str]) -> list[str]:
    """Return `line(name=, one=, other=)` for each setting that differs. NaN is equal to NaN."""
    have, want = dict(_flat(one)), dict(_flat(other))
    # If a dict is empty on one side only, the lines of the other side's keys say so.
    filled = {path[:depth] for path in (*have, *want) for depth in range(len(path))}
    return [
        line(name=".".join(path), one=_value_text(have, path), other=_value_text(want, path))
        for path in sorted(have.keys() | want.keys())
        if not (path in filled and have.get(path, want.get(path)) == {})
        and (path not in have or path not in want or not _equal(have[path], want[path]))
    ]


def _flat(value: Any, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the path and value of each nested setting. Names may contain dots."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from _flat(inner, (*path, str(name)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return bool(one == other) or (one != one and other != other)


def _value_text(settings: Mapping[Key, Any], path: Key) -> str:
    return repr(settings[path]) if path in settings else "nothing"


def manifest_of(
    step: int,
    snapshot: Snapshot,
    *,
    config: dict[str, Any],
    metrics: dict[str, float],
    plan: Any,
    expert_dims: dict[Key, int],
) -> Manifest:
    """Return the manifest of a snapshot that this process writes now."""
    return Manifest(
        step=step,
        config=config,
        leaves=snapshot.specs,
        digests=snapshot.digests,
        written_by=_written_by(snapshot.meshes),
        metrics=metrics,
        plan=plan,
        layouts=snapshot.layouts,
        places=snapshot.places,
        expert_dims=expert_dims,
    )


def _written_by(meshes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return the versions, devices, processes, the meshes of the leaves, and the time in UTC."""
    return {
        "versions": dict(_versions()),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "meshes": [dict(mesh) for mesh in meshes],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@functools.cache  # reading the versions takes longer than dispatching the copy of a state
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
