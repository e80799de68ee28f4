"""A state as named leaves: how it is addressed, what each leaf is, how it goes to and from plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
from jax import dtypes
from jax import numpy as jnp
from jax.sharding import SingleDeviceSharding

from autoshard._shown import shown
from autoshard.ckpt.errors import CheckpointError

Key = tuple[str, ...]


@shown
@dataclass(frozen=True)
class LeafSpec:
    """What one leaf is.

    Attributes:
        key: its path in the tree, one text per level.
        shape: the whole shape; of the keys, not of their bits, for typed RNG keys.
        dtype: the dtype's name; `key<fry>` and the like for typed RNG keys.
        key_impl: how to make typed keys from their bits, None for every other leaf.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None

    @property
    def stored(self) -> bool:
        """Whether it has elements: Orbax cannot write arrays that have none, and there is nothing to lose."""
        return 0 not in self.shape

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def named_leaves(tree: Any) -> list[tuple[Key, Any]]:
    """Every leaf with its path, in tree order.

    Raises:
        CheckpointError: the tree has no leaf, or two leaves have one path.
    """
    pairs = [
        (tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not pairs:
        raise CheckpointError(f"the state ({type(tree).__name__}) has no leaves: there is nothing to save or restore.")
    seen: set[Key] = set()
    for key, _ in pairs:
        if key in seen:
            raise CheckpointError(f"two leaves of the state have the path '{'/'.join(key)}': rename one.")
        seen.add(key)
    return pairs


def is_typed_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed RNG keys, or describes one."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, dtypes.prng_key)


def leaf_spec(key: Key, leaf: Any) -> LeafSpec:
    """What a leaf of a state or of a template is.

    Raises:
        CheckpointError: it is nothing that a checkpoint can hold.
    """
    if is_typed_key(leaf):
        impl = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else None
        return LeafSpec(key, tuple(leaf.shape), str(leaf.dtype), impl)
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = np.asarray(leaf)
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape") or np.dtype(dtype).hasobject or np.dtype(dtype).kind in "SUMm":
        raise CheckpointError(
            f"the state's leaf '{'/'.join(key)}' is a {type(leaf).__name__}: only arrays, RNG keys and "
            "numbers can be saved. Keep anything else outside the state, in the config, or as a static field."
        )
    return LeafSpec(key, tuple(leaf.shape), np.dtype(dtype).name)


def target_struct(leaf: Any, spec: LeafSpec) -> Any:
    """What to read for a template's leaf: a shape, dtype and sharding, or `np.ndarray` on the host."""
    if not hasattr(leaf, "sharding"):
        return np.ndarray
    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if is_typed_key(leaf):
        bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        # The bits' own dimensions come last and stay whole, so the keys' spec fits as it is.
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(spec.shape, leaf.dtype, sharding=sharding)


def rebuilt(leaf: Any, spec: LeafSpec, array: Any) -> Any:
    """A leaf of the template's kind from the array that was read, None for one without elements."""
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return type(leaf)(array.item())
    if array is None:
        return _empty(leaf, spec)
    if is_typed_key(leaf):
        return jax.random.wrap_key_data(array, impl=spec.key_impl)
    return array[()] if isinstance(leaf, np.generic) else array


def _empty(leaf: Any, spec: LeafSpec) -> Any:
    """An array without elements, of the template's kind."""
    if is_typed_key(leaf):
        bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return jax.random.wrap_key_data(jnp.zeros(bits.shape, bits.dtype), impl=spec.key_impl)
    array = np.zeros(spec.shape, spec.dtype)
    return jax.device_put(array, leaf.sharding) if hasattr(leaf, "sharding") else array


def nest(leaves: Mapping[Key, Any]) -> dict[str, Any]:
    """A nested dict that Orbax can name safely.

    Orbax joins the levels with '.', so that {"a.b": x} and {"a": {"b": y}} would be one file: whichever is
    written last wins, silently. Hence every character with a meaning is escaped.
    """
    root: dict[str, Any] = {}
    for key, leaf in leaves.items():
        *levels, last = [_escaped(part) for part in key or ("",)]
        place = root
        for level in levels:
            place = place.setdefault(level, {})
        place[last] = leaf
    return root


def unnest(tree: Mapping[str, Any], keys: Sequence[Key]) -> dict[Key, Any]:
    """The leaves of `nest`'s dict again."""
    leaves = {}
    for key in keys:
        place: Any = tree
        for part in key or ("",):
            place = place[_escaped(part)]
        leaves[key] = place
    return leaves


def _escaped(part: str) -> str:
    return quote(part, safe="").replace(".", "%2E") or "%"


def differences(saved: Mapping[Key, LeafSpec], wanted: Mapping[Key, LeafSpec]) -> list[str]:
    """Every leaf that is not the same in both, a line each with both values."""
    lines = []
    for key in [*wanted, *(key for key in saved if key not in wanted)]:
        have, want = saved.get(key), wanted.get(key)
        if have is None:
            lines.append(f"{'/'.join(key)}: not in the checkpoint, wanted {want}")
        elif want is None:
            lines.append(f"{'/'.join(key)}: saved {have}, not in the wanted state")
        elif (have.shape, have.dtype) != (want.shape, want.dtype):
            lines.append(f"{'/'.join(key)}: saved {have}, wanted {want}")
    return lines


def unfit(template: Mapping[Key, Any]) -> list[str]:
    """Every leaf that cannot be placed as its template says, a line each."""
    lines = []
    for key, leaf in template.items():
        sharding = getattr(leaf, "sharding", None)
        name = "/".join(key)
        if hasattr(leaf, "sharding") and sharding is None and jax.process_count() > 1:
            lines.append(f"{name}: has no sharding, which several processes need")
        if hasattr(leaf, "sharding") and not is_typed_key(leaf) and dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            lines.append(f"{name}: {leaf.dtype} needs jax_enable_x64; without it the value would be cut")
        try:
            _ = sharding and sharding.shard_shape(tuple(leaf.shape))
        except ValueError:
            lines.append(f"{name}: shape {tuple(leaf.shape)} does not divide over {sharding}")
    return lines
