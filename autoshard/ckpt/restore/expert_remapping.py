"""Selecting, reordering and copying experts by number, and copying a dense layer for each expert.

The number of an expert is its index in the dimension of experts of the global arrays: weights, their optimizer state
and moving average, and the router's columns. It does not depend on the mesh, the degree of expert parallelism or the
number of processes. A plan gives the dimension of experts (its logical axis `experts`), and it is saved with the step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _compat
from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.ckpt.state.named_leaves import Key, LeafSpec
from autoshard.ckpt.store.argument_checks import is_integer
from autoshard.errors import CheckpointError
from autoshard.sharding.plan.replication import sharded_axes

_AXIS = re.compile(r"experts(_\d+)?")  # its name in plans


@shown
@dataclass(frozen=True)
class Change:
    """The change of a saved leaf: a selection of experts, or copies along a new dimension.

    Attributes:
        dim: the dimension of experts of the changed leaf.
        numbers: the numbers of the selected experts; None if the leaf is copied for each expert.
        count: number of experts of the changed leaf.
    """

    dim: int
    numbers: tuple[int, ...] | None
    count: int

    def of(self, spec: LeafSpec) -> LeafSpec:
        """Return the spec of the changed leaf."""
        shape = list(spec.shape)
        if self.numbers is None:
            shape.insert(self.dim, self.count)
        else:
            shape[self.dim] = self.count
        return replace(spec, shape=tuple(shape))

    def read_like(self, leaf: Any, spec: LeafSpec) -> Any:
        """Return a template for the saved leaf, sharded like the requested leaf as far as its shape allows."""
        sharding = getattr(leaf, "sharding", None)
        if not hasattr(leaf, "sharding"):
            return np.zeros((), spec.dtype)
        if isinstance(sharding, NamedSharding):
            axes = [*sharded_axes(sharding.spec)] + [()] * (len(leaf.shape) - len(sharding.spec))
            shards = int(np.prod([sharding.mesh.shape[name] for name in axes[self.dim]], dtype=int))
            if self.numbers is None:
                del axes[self.dim]
            elif spec.shape[self.dim] % shards:
                axes[self.dim] = ()
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*axes))
        return spec.struct(sharding)

    def apply(self, array: Any, leaf: Any) -> Any:
        """Return the changed values of a saved array, with the sharding of the requested leaf."""
        if not isinstance(array, jax.Array):
            return self.changed(np, array)
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.are_all_axes_auto:
            return _program(self, sharding)(array)
        # With explicit axes, `take` along a sharded dimension would need an output sharding.
        with _compat.auto_axes():
            array = jax.device_put(array, _with_auto_axes(array.sharding))
            changed = _program(self, _with_auto_axes(sharding))(array)
        return jax.device_put(changed, sharding)

    def changed(self, library: Any, array: Any) -> Any:
        """Return the changed values of an array. `library` is that of the array: NumPy or `jax.numpy`."""
        if self.numbers is not None:
            return library.take(array, np.array(self.numbers), axis=self.dim)
        return library.repeat(library.expand_dims(array, self.dim), self.count, axis=self.dim)


@lru_cache(maxsize=64)
def _program(change: Change, sharding: Any) -> Any:
    """Return the program of a change. Leaves of the same shape, dtype and sharding share it, so it is compiled once."""
    return jax.jit(partial(change.changed, jnp), out_shardings=sharding)


def _with_auto_axes(sharding: Any) -> NamedSharding:
    return NamedSharding(_compat.all_axes_auto(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def dims_from_plan(plan: Any, specs: Sequence[LeafSpec]) -> dict[Key, int]:
    """Return the dimension of experts of each leaf for which a plan gives one.

    Args:
        plan: JSON values of `Plan.to_json`, or None.
        specs: the leaves of the state, which is an argument of the planned function.
    """
    expert_dims = {}
    inputs = plan.get("inputs", []) if isinstance(plan, Mapping) else []
    by_name = {one["path"].partition("/")[2]: one["axes"] for one in inputs}  # without the number of the argument
    for spec in specs:
        axes = by_name.get(spec.name, ())
        dims = [dim for dim, name in enumerate(axes) if _AXIS.fullmatch(name or "")]
        if len(dims) == 1 and len(axes) == len(spec.shape):
            expert_dims[spec.key] = dims[0]
    return expert_dims


def dims_from_patterns(patterns: Mapping[str, int], specs: Sequence[LeafSpec], what: str = "leaf") -> dict[Key, int]:
    """Return the dimension of experts of each leaf whose path matches a pattern. The first matching pattern counts.

    Args:
        patterns: path pattern -> dimension.
        specs: the leaves.
        what: the name of such leaves, for errors.

    Raises:
        CheckpointError: a pattern matches no leaf, or a leaf has no such dimension.
    """
    expert_dims, wrong, used = {}, [], set()
    for spec in (one for one in specs if not one.is_text):
        pattern = next((one for one in patterns if fnmatchcase(spec.name, one)), None)
        if pattern is None:
            continue
        used.add(pattern)
        dim = patterns[pattern]
        if not -len(spec.shape) <= dim < len(spec.shape):
            wrong.append(f"{spec.name}: {spec} has no dimension {dim}")
        else:
            expert_dims[spec.key] = dim % len(spec.shape)
    wrong += [f"{one!r} matches no {what}" for one in patterns if one not in used]
    if wrong:
        raise CheckpointError(f"the dimensions of experts do not match the leaves:\n{listing(wrong)}")
    return expert_dims


def expert_changes(
    specs: Mapping[Key, LeafSpec],
    dims: Mapping[Key, int],
    leaves: Mapping[Key, Any],
    experts: Sequence[int] | None,
    upcycle: Mapping[str, int],
    where: str,
) -> dict[Key, Change]:
    """Return the change of each saved leaf that must be changed, by requested path.

    Args:
        specs: the saved leaf for each requested path.
        dims: the dimension of experts of those that have one.
        leaves: the requested leaves.
        experts: the numbers of the requested experts, in this order, possibly repeated; None for all.
        upcycle: patterns of requested paths -> dimension of experts, for leaves that are copies of a dense layer.
        where: the name of the step, for errors.

    Raises:
        CheckpointError: an expert does not exist, or a pattern matches no leaf.
    """
    result: dict[Key, Change] = {}
    if experts is not None:
        result |= _select_experts(specs, dims, [*experts], where)
    wanted = [LeafSpec(key, tuple(leaves[key].shape), "") for key in specs if hasattr(leaves.get(key), "shape")]
    for key, dim in dims_from_patterns(upcycle, wanted, "requested leaf that was saved").items() if upcycle else ():
        result[key] = Change(dim, None, leaves[key].shape[dim])
    return result


def _select_experts(
    specs: Mapping[Key, LeafSpec], dims: Mapping[Key, int], experts: list[Any], where: str
) -> dict[Key, Change]:
    if not dims:
        raise CheckpointError(
            f"experts={experts}: {where} does not give the dimension of experts of its leaves. Save with plan=, "
            "or pass expert_dims={'*/experts/w_*': 0}."
        )
    if not experts or not all(map(is_integer, experts)):
        raise CheckpointError(f"experts is {experts}; it must be a list of numbers such as [0, 3].")
    numbers = tuple(one.__index__() for one in experts)
    wrong = []
    for key, dim in dims.items():
        count = specs[key].shape[dim]
        unknown = [one for one in numbers if not 0 <= one < count]
        if unknown:
            names = ", ".join(map(str, unknown))
            wrong.append(f"{specs[key].name}: has no expert {names}, its experts are 0 to {count - 1}")
    if wrong:
        raise CheckpointError(f"experts={experts}: {where} has fewer experts:\n{listing(wrong)}")
    return {key: Change(dim, numbers, len(numbers)) for key, dim in dims.items()}
