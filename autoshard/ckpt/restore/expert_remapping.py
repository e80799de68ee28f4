"""Experts by their numbers: a subset, more of them by copying, a dense layer made into experts.

An expert's number is its place in the dimension of experts of the whole arrays: of its weights, of their optimizer
state and average, and of the router's columns. It is the same on every mesh, under every degree of expert parallelism
and in any number of processes, as leaves are saved whole. Which dimension that is, a plan knows (its logical axis
`experts`) and a checkpoint keeps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
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

_AXIS = re.compile(r"experts(_\d+)?")  # as plans name it


@shown
@dataclass(frozen=True)
class Change:
    """How a saved leaf becomes another: some of its experts in some order, or copies along a new dimension.

    Attributes:
        dim: the dimension of experts, in what comes of it.
        numbers: which experts are taken; None where the leaf is copied.
        count: how many there are then.
    """

    dim: int
    numbers: tuple[int, ...] | None
    count: int

    def of(self, spec: LeafSpec) -> LeafSpec:
        """What a saved leaf becomes."""
        shape = list(spec.shape)
        if self.numbers is None:
            shape.insert(self.dim, self.count)
        else:
            shape[self.dim] = self.count
        return replace(spec, shape=tuple(shape))

    def read_like(self, leaf: Any, spec: LeafSpec) -> Any:
        """A template for the saved leaf, placed as nearly as the wanted one as its shape allows."""
        sharding = getattr(leaf, "sharding", None)
        if not hasattr(leaf, "sharding"):
            return np.zeros((), spec.dtype)
        if isinstance(sharding, NamedSharding):
            axes = [*sharded_axes(sharding.spec)] + [()] * (len(leaf.shape) - len(sharding.spec))
            ways = int(np.prod([sharding.mesh.shape[name] for name in axes[self.dim]], dtype=int))
            if self.numbers is None:
                del axes[self.dim]
            elif spec.shape[self.dim] % ways:
                axes[self.dim] = ()
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*axes))
        return spec.struct(sharding)

    def applied(self, array: Any, leaf: Any) -> Any:
        """The wanted leaf's values, on its sharding."""
        if not isinstance(array, jax.Array):
            return self._made(np, array)
        wanted = getattr(leaf, "sharding", None)
        if not isinstance(wanted, NamedSharding) or wanted.mesh.are_all_axes_auto:
            return jax.jit(partial(self._made, jnp), out_shardings=wanted)(array)
        # With explicit axes the type of what is taken of a sharded dimension would have to be said.
        with _compat.auto_axes():
            array = jax.device_put(array, _with_auto_axes(array.sharding))
            made = jax.jit(partial(self._made, jnp), out_shardings=_with_auto_axes(wanted))(array)
        return jax.device_put(made, wanted)

    def _made(self, library: Any, array: Any) -> Any:
        if self.numbers is not None:
            return library.take(array, np.array(self.numbers), axis=self.dim)
        return library.repeat(library.expand_dims(array, self.dim), self.count, axis=self.dim)


def _with_auto_axes(sharding: Any) -> NamedSharding:
    return NamedSharding(_compat.all_axes_auto(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def dims_of(plan: Any, specs: Sequence[LeafSpec]) -> dict[Key, int]:
    """The dimension of experts of each leaf that has one, by a plan's JSON.

    Args:
        plan: as `Plan.to_json` writes it; None where there is none.
        specs: the leaves of the state, which is an argument of the planned function.
    """
    found = {}
    inputs = plan.get("inputs", []) if isinstance(plan, Mapping) else []
    by_name = {one["path"].partition("/")[2]: one["axes"] for one in inputs}  # without the argument's number
    for spec in specs:
        axes = by_name.get(spec.name, ())
        dims = [dim for dim, name in enumerate(axes) if _AXIS.fullmatch(name or "")]
        if len(dims) == 1 and len(axes) == len(spec.shape):
            found[spec.key] = dims[0]
    return found


def dims_by(patterns: Mapping[str, int], specs: Sequence[LeafSpec], what: str = "leaf") -> dict[Key, int]:
    """The dimension of experts of each leaf whose path a pattern matches; the first that does says it.

    Args:
        patterns: of paths -> dimension.
        specs: the leaves.
        what: they are, for errors.

    Raises:
        CheckpointError: a pattern matches no leaf, or a leaf has no such dimension.
    """
    found, wrong, used = {}, [], set()
    for spec in (one for one in specs if not one.is_text):
        pattern = next((one for one in patterns if fnmatchcase(spec.name, one)), None)
        if pattern is None:
            continue
        used.add(pattern)
        dim = patterns[pattern]
        if not -len(spec.shape) <= dim < len(spec.shape):
            wrong.append(f"{spec.name}: {spec} has no dimension {dim}")
        else:
            found[spec.key] = dim % len(spec.shape)
    wrong += [f"{one!r} matches no {what}" for one in patterns if one not in used]
    if wrong:
        raise CheckpointError(f"dimensions of experts:\n{listing(wrong)}")
    return found


def changes(
    specs: Mapping[Key, LeafSpec],
    dims: Mapping[Key, int],
    leaves: Mapping[Key, Any],
    experts: Sequence[int] | None,
    upcycle: Mapping[str, int],
    where: str,
) -> dict[Key, Change]:
    """How saved leaves become the wanted ones.

    Args:
        specs: the saved leaf for each wanted path.
        dims: of these, the dimension of experts where there is one.
        leaves: the wanted leaves.
        experts: which experts are wanted, in this order; None for all. One may be there several times.
        upcycle: patterns of wanted paths of experts that are copies of a saved dense layer -> dimension of experts.
        where: names the step, for errors.

    Raises:
        CheckpointError: there are no such experts, or no such leaves.
    """
    found: dict[Key, Change] = {}
    if experts is not None:
        found |= _taken(specs, dims, [*experts], where)
    wanted = [LeafSpec(key, tuple(leaves[key].shape), "") for key in specs if hasattr(leaves.get(key), "shape")]
    for key, dim in dims_by(upcycle, wanted, "wanted leaf that was saved").items() if upcycle else ():
        found[key] = Change(dim, None, leaves[key].shape[dim])
    return found


def _taken(specs: Mapping[Key, LeafSpec], dims: Mapping[Key, int], experts: list[Any], where: str) -> dict[Key, Change]:
    if not dims:
        raise CheckpointError(
            f"experts={experts}: {where} does not say which dimension of its leaves is that of experts. Save with "
            "plan=, or say it by expert_dims={'*/experts/w_*': 0}."
        )
    if not experts or not all(map(is_integer, experts)):
        raise CheckpointError(f"experts={experts}: name some by their numbers, as experts=[0, 3].")
    numbers = tuple(one.__index__() for one in experts)
    wrong = []
    for key, dim in dims.items():
        count = specs[key].shape[dim]
        unknown = [one for one in numbers if not 0 <= one < count]
        if unknown:
            named = ", ".join(map(str, unknown))
            wrong.append(f"{specs[key].name}: there is no expert {named}, there are 0 to {count - 1}")
    if wrong:
        raise CheckpointError(f"experts={experts}: {where} has fewer:\n{listing(wrong)}")
    return {key: Change(dim, numbers, len(numbers)) for key, dim in dims.items()}
