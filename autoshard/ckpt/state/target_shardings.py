"""The shardings of a template: replacing them, and checking that leaves can have them."""

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
from autoshard._units import spec_text
from autoshard.ckpt.state.named_leaves import Key, is_typed_key
from autoshard.errors import CheckpointError
from autoshard.sharding.plan.replication import sharded_axes
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.program.path_patterns import first_few


def with_shardings(template: Any, shardings: Any) -> Any:
    """Return a template with other shardings. Replaced leaves become `ShapeDtypeStruct`s; no data is moved.

    Numbers and NumPy arrays stay as they are, and so do leaves whose sharding is None.

    Args:
        template: the state, or its shapes.
        shardings: one sharding for all leaves, or a tree of them with the structure of the template or a prefix of it.
            May contain devices, and `PartitionSpec`s on the mesh of `jax.set_mesh`.

    Raises:
        CheckpointError: the trees do not match, `shardings` contains something else, or a leaf has too few dimensions.
    """
    wanted = _as_shardings(shardings)
    try:
        by_leaf = jax.tree.broadcast(wanted, template, is_leaf=lambda node: node is None)
    except ValueError as error:
        if isinstance(shardings, tuple) and not isinstance(template, tuple):
            raise CheckpointError(
                f"shardings is a tuple of {len(shardings)}, but the state is a {type(template).__name__}: pass the "
                "entry of the state, plan.in_shardings()[0] if it is the first argument"
            ) from error
        raise CheckpointError(
            f"shardings do not match the structure of the state: {_differences(template, wanted)}. Give one sharding "
            "for all leaves, or a tree with the paths of the state"
        ) from error
    wrong: list[str] = []
    impossible = False

    def place(path: Any, leaf: Any, sharding: Any) -> Any:
        nonlocal impossible
        if sharding is None or not hasattr(leaf, "sharding"):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))
        try:
            placed = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)
        except ValueError:  # the leaf has fewer dimensions than the spec
            impossible, placed = True, leaf
        wrong.extend(f"{_joined(path)}: {what}" for what in _sharding_errors(tuple(leaf.shape), sharding))
        return placed

    placed = jax.tree_util.tree_map_with_path(place, template, by_leaf, is_leaf=lambda node: node is None)
    # Sizes that do not divide are reported later. If the state is of another model, that message is the better one.
    if impossible:
        raise CheckpointError(f"the state cannot be placed on its shardings:\n{listing(wrong)}")
    return placed


def _differences(template: Any, shardings: Any) -> str:
    """The paths of a state without a sharding, and those of shardings that the state does not have."""
    leaves, given = (
        [keys for keys, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)[0]]
        for tree in (template, shardings)
    )
    missing = [keys for keys in leaves if not any(keys[: len(one)] == one for one in given)]
    new = [one for one in given if not any(keys[: len(one)] == one for keys in leaves)]
    found = [f"'{_joined(keys)}' has no sharding" for keys in missing]
    found += [f"'{_joined(one)}' is not in the state" for one in new]
    return first_few(found) if found else "a list, tuple or dict of another type"


def _as_shardings(shardings: Any) -> Any:
    """Replace the devices and `PartitionSpec`s of a tree by shardings."""
    wrong: list[str] = []
    specs: list[str] = []  # without a mesh, often all of a state: one line for all

    def as_sharding(path: Any, one: Any) -> Any:
        if one is None or isinstance(one, (Sharding, Format)):
            return one
        if isinstance(one, jax.Device):
            return SingleDeviceSharding(one)
        if not isinstance(one, PartitionSpec):
            kind = type(one).__name__
            reason = f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind} is not a sharding: {_instead_of(one)}"
        elif (mesh := _compat.current_mesh()) is None:
            specs.append(f"{_joined(path)}: {spec_text(one)}" if path else spec_text(one))
            return None
        else:
            try:
                return NamedSharding(mesh, one)
            except ValueError as error:
                reason = str(error)
        wrong.append(f"{_joined(path)}: {reason}" if path else reason)
        return None

    converted = jax.tree_util.tree_map_with_path(as_sharding, shardings, is_leaf=lambda node: node is None)
    if specs:
        more = f" and {len(specs) - 1} more need" if len(specs) > 1 else " needs"
        wrong.append(
            f"{specs[0]}{more} a mesh: pass NamedSharding(mesh, spec), or plan.in_shardings() in place of "
            "plan.in_specs, or set a mesh with jax.set_mesh"
        )
    if wrong:
        raise CheckpointError(f"shardings: {wrong[0]}" if len(wrong) == 1 else f"shardings:\n{listing(wrong)}")
    return converted


def _instead_of(wrong: Any) -> str:
    """What to pass in place of something that is not a sharding."""
    if isinstance(wrong, ShardingPlan):
        return "pass those of the state, plan.in_shardings()[0] if it is the first argument"
    if hasattr(wrong, "plan") and hasattr(wrong, "init"):  # a function under `auto_shard`
        return "pass those of its plan, step.plan(state, batch).in_shardings()[0] if the state is the first argument"
    return "pass NamedSharding(mesh, PartitionSpec(...))"


def _joined(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def placement_errors(template: Mapping[Key, Any]) -> list[str]:
    """Return a line for each leaf that cannot be placed on the sharding of its template."""
    errors: dict[Any, list[str]] = {}  # by kind: thousands of leaves may share a few kinds
    lines = []
    for key, leaf in template.items():
        if not hasattr(leaf, "sharding"):
            continue
        kind = leaf.shape, leaf.dtype, leaf.sharding
        if kind not in errors:
            errors[kind] = _leaf_errors(leaf)
        lines += [f"{'/'.join(key)}: {error}" for error in errors[kind]]
    return lines


def _leaf_errors(leaf: Any) -> list[str]:
    """Return why a leaf of a template cannot be placed."""
    errors = []
    if leaf.sharding is None and jax.process_count() > 1:
        errors.append("has no sharding, which is required with several processes")
    if not is_typed_key(leaf) and dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        errors.append(f"{leaf.dtype} needs jax_enable_x64; without it the value would be truncated")
    return errors + _sharding_errors(tuple(leaf.shape), leaf.sharding)


def _sharding_errors(shape: tuple[int, ...], sharding: Any) -> list[str]:
    """Return why an array of this shape cannot have a sharding."""
    if isinstance(sharding, Format):
        sharding = sharding.sharding
    if not isinstance(sharding, NamedSharding):
        try:
            _ = sharding and sharding.shard_shape(shape)
        except ValueError:
            return [f"shape {shape} cannot be divided over {sharding}"]
        return []
    if isinstance(sharding.mesh, AbstractMesh):
        return ["its mesh is abstract and has no devices: pass a Mesh"]
    if PartitionSpec.UNCONSTRAINED in sharding.spec:
        return [f"{sharding.spec} leaves a dimension unconstrained: use None or mesh axes for it"]
    axes = sharded_axes(sharding.spec)
    if len(axes) > len(shape):
        return [f"shape {shape} has fewer dimensions than {sharding.spec}"]
    sizes = [math.prod(sharding.mesh.shape[name] for name in names) for names in axes]
    return [
        f"shape {shape}: dim {dim} of size {shape[dim]} is not divisible by "
        f"{', '.join(f'{name!r} ({sharding.mesh.shape[name]})' for name in axes[dim])}"
        for dim, size in enumerate(sizes)
        if shape[dim] % size
    ]
