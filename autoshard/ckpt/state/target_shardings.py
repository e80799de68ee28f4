"""Where leaves are wanted: other shardings for a template, and what cannot lie as they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax import dtypes
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autoshard import _compat
from autoshard._columns import listing
from autoshard.ckpt.state.named_leaves import Key, is_typed_key
from autoshard.errors import CheckpointError
from autoshard.sharding.plan.replication import sharded_axes


def with_shardings(template: Any, shardings: Any) -> Any:
    """A template on other shardings: one for all leaves, or a tree of them that is the template's or a prefix of it.

    A device stands for all of a leaf on it, a `PartitionSpec` for one on the mesh that `jax.set_mesh` sets. Numbers and
    NumPy arrays stay as they are, and so does what has None for a sharding. The others are described, not moved: most
    are about to be read.

    Raises:
        CheckpointError: the trees do not fit, there is something else in them, or a leaf has too few dimensions.
    """
    try:
        spread = jax.tree.broadcast(_placements(shardings), template, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise CheckpointError(f"shardings do not fit the state's structure: {error}") from error
    wrong: list[str] = []
    impossible = False

    def place(path: Any, leaf: Any, sharding: Any) -> Any:
        nonlocal impossible
        if sharding is None or not hasattr(leaf, "sharding"):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))
        try:
            placed = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)
        except ValueError:  # it has fewer dimensions
            impossible, placed = True, leaf
        wrong.extend(f"{_joined(path)}: {what}" for what in _misfit(tuple(leaf.shape), sharding))
        return placed

    placed = jax.tree_util.tree_map_with_path(place, template, spread, is_leaf=lambda node: node is None)
    if impossible:  # where sizes alone do not fit, it may be another model's state, which says more
        raise CheckpointError(f"the state cannot be placed as its shardings say:\n{listing(wrong)}")
    return placed


def _placements(shardings: Any) -> Any:
    """A tree of shardings, from one that has devices and `PartitionSpec`s as well."""
    wrong: list[str] = []

    def placement(path: Any, one: Any) -> Any:
        if one is None or isinstance(one, (Sharding, Format)):
            return one
        if isinstance(one, jax.Device):
            return SingleDeviceSharding(one)
        if not isinstance(one, PartitionSpec):
            reason = f"a {type(one).__name__} is no sharding: give NamedSharding(mesh, PartitionSpec(...))"
        elif (mesh := _compat.current_mesh()) is None:
            reason = f"{one} needs a mesh: give NamedSharding(mesh, {one}), or set one with jax.set_mesh"
        else:
            try:
                return NamedSharding(mesh, one)
            except ValueError as error:
                reason = str(error)
        wrong.append(f"{_joined(path)}: {reason}" if path else reason)
        return None

    found = jax.tree_util.tree_map_with_path(placement, shardings, is_leaf=lambda node: node is None)
    if wrong:
        raise CheckpointError(f"shardings:\n{listing(wrong)}")
    return found


def _joined(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def unfit(template: Mapping[Key, Any]) -> list[str]:
    """Every leaf that cannot be placed as its template says, a line each."""
    told: dict[Any, list[str]] = {}  # by kind: there may be thousands of leaves of a few
    lines = []
    for key, leaf in template.items():
        if not hasattr(leaf, "sharding"):
            continue
        kind = leaf.shape, leaf.dtype, leaf.sharding
        if kind not in told:
            told[kind] = _unfit(leaf)
        lines += [f"{'/'.join(key)}: {what}" for what in told[kind]]
    return lines


def _unfit(leaf: Any) -> list[str]:
    """Why a leaf with a place for a sharding cannot be placed."""
    what = []
    if leaf.sharding is None and jax.process_count() > 1:
        what.append("has no sharding, which several processes need")
    if not is_typed_key(leaf) and dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        what.append(f"{leaf.dtype} needs jax_enable_x64; without it the value would be cut")
    return what + _misfit(tuple(leaf.shape), leaf.sharding)


def _misfit(shape: tuple[int, ...], sharding: Any) -> list[str]:
    """Why an array cannot lie by a sharding."""
    if isinstance(sharding, Format):
        sharding = sharding.sharding
    if not isinstance(sharding, NamedSharding):
        try:
            _ = sharding and sharding.shard_shape(shape)
        except ValueError:
            return [f"shape {shape} does not divide over {sharding}"]
        return []
    if isinstance(sharding.mesh, AbstractMesh):
        return ["its mesh is abstract, which has no devices: give a Mesh"]
    if PartitionSpec.UNCONSTRAINED in sharding.spec:
        return [f"{sharding.spec} leaves a dimension unconstrained: say where it lies"]
    axes = sharded_axes(sharding.spec)
    if len(axes) > len(shape):
        return [f"shape {shape} has fewer dimensions than {sharding.spec}"]
    sizes = [math.prod(sharding.mesh.shape[name] for name in names) for names in axes]
    return [
        f"shape {shape}: dim {dim} of size {shape[dim]} does not divide by "
        f"{', '.join(f'{name!r} ({sharding.mesh.shape[name]})' for name in axes[dim])}"
        for dim, ways in enumerate(sizes)
        if shape[dim] % ways
    ]
