"""What a checkpoint says of itself: its leaves, where their digests are, its configuration."""

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

from autoshard._columns import listing
from autoshard._gc import paused
from autoshard._shown import shown
from autoshard.ckpt.state.array_packing import Place
from autoshard.ckpt.state.named_leaves import Key, LeafSpec
from autoshard.errors import CheckpointError, MismatchError

FORMAT = 4  # 1 had nothing of metrics, plan, meshes and time; 2 no packs; 3 no texts
WITHOUT_TEXTS = 3  # what a step without them is written as: versions from before there were texts read it
_PACKAGES = ("autoshard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@shown
@dataclass(frozen=True)
class Manifest:
    """The description that is written with every step.

    Attributes:
        step: the step it belongs to, so that a renamed directory is noticed.
        config: the caller's configuration, as JSON gives it back.
        leaves: every leaf of the state.
        digests: for each stored leaf the group and the column its digest is in.
        written_by: versions, devices, processes, time and meshes, for people.
        metrics: numbers that were saved with it.
        plan: the plan that it was trained under, as JSON; None where none was given.
        layouts: for each leaf on a mesh its `PartitionSpec`, for people.
        expert_dims: the dimension of experts of each leaf that is known to have one.
        places: for each leaf in a pack the pack's name, and which of its leaves it is.
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
        """Bytes of all leaves; typed RNG keys by their bits."""
        return sum(spec.nbytes for spec in self.leaves)

    @functools.cached_property
    def packs(self) -> dict[str, dict[int, LeafSpec]]:
        """For each pack its leaves, by which of it they are."""
        found: dict[str, dict[int, LeafSpec]] = {}
        for spec in self.leaves:
            if spec.key in self.places:
                name, index = self.places[spec.key]
                found.setdefault(name, {})[index] = spec
        return found

    @paused()
    def to_json(self) -> dict[str, Any]:
        """A JSON object that carries its own checksum."""
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
            "metrics": {name: _written(value) for name, value in self.metrics.items()},
            "plan": self.plan,
        }
        return {"autoshard": body, "sha256": _checksum(body)}

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """The manifest again.

        Raises:
            ValueError: it is not one, or not as it was written.
            CheckpointError: a newer version wrote it.
        """
        if not isinstance(data, dict) or "autoshard" not in data:
            raise ValueError("the step has no autoshard manifest")
        body = data["autoshard"]
        if _checksum(body) != data.get("sha256"):
            raise ValueError("the manifest is not as it was written")
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


def _written(value: float) -> float | str:
    """A number as JSON has it: what is not finite is a text there."""
    return value if math.isfinite(value) else str(value)


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def plain(value: Any, what: str) -> Any:
    """A configuration, or something else that is kept beside the leaves, as JSON gives it back.

    Raises:
        CheckpointError: it holds something that JSON cannot.
    """
    try:
        written = json.dumps(dict(value) if isinstance(value, Mapping) else value)
        return json.loads(written, object_pairs_hook=_once)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the {what} cannot be written as JSON ({error}): use numbers, texts, lists and dicts of them."
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict, none of whose keys is lost: JSON has one name for 1 and '1'."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"two keys of a dict have one name: {', '.join(name for name, _ in pairs)}")
    return found


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers.

    Raises:
        CheckpointError: one of them is none.
    """
    found, wrong = {}, []
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            wrong.append(f"{name}={value!r}")
    if len(found) + len(wrong) < len(metrics):
        raise CheckpointError(f"two metrics have one name: {', '.join(map(str, metrics))}.")
    if wrong:
        raise CheckpointError(f"metrics are numbers: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not.")
    return found


def check_config(saved: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Compares the parts that define the model: the section `model` where `wanted` has one, else all of it.

    Raises:
        MismatchError: naming every key that differs, with both values.
    """
    wanted = plain(wanted, "config")
    if "model" in wanted:
        saved, wanted = {"model": saved.get("model", {})}, {"model": wanted["model"]}
    lines = differences(saved, wanted, "{name}: saved {one}, wanted {other}".format)
    if lines:
        raise MismatchError(
            f"{where} is a checkpoint of another model: its config differs in {len(lines)} keys:\n"
            f"{listing(lines)}\n"
            "Use the config that it was saved with, or another directory."
        )


def differences(one: Any, other: Any, line: Callable[..., str]) -> list[str]:
    """The settings that differ, as `line(name=, one=, other=)` says it; NaN is equal to NaN."""
    have, want = dict(_flat(one)), dict(_flat(other))
    # A table that is empty in one alone is told by what the other has in it.
    filled = {path[:depth] for path in (*have, *want) for depth in range(len(path))}
    return [
        line(name=".".join(path), one=_shown(have, path), other=_shown(want, path))
        for path in sorted(have.keys() | want.keys())
        if not (path in filled and have.get(path, want.get(path)) == {})
        and (path not in have or path not in want or not _equal(have[path], want[path]))
    ]


def _flat(value: Any, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Nested settings by their paths: a name may hold a dot."""
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


def _shown(settings: Mapping[Key, Any], path: Key) -> str:
    return repr(settings[path]) if path in settings else "nothing"


def written_by(devices: int, processes: int, meshes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Who writes: versions, devices, processes, and the meshes that the leaves lie on; and when, in UTC."""
    return {
        "versions": dict(_versions()),
        "devices": devices,
        "processes": processes,
        "meshes": [dict(mesh) for mesh in meshes],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@functools.cache  # reading them takes longer than dispatching the copy of a state
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
