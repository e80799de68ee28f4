"""The leaves of a state: their paths and types, and their conversion to and from plain arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
from jax import dtypes
from jax import numpy as jnp
from jax.sharding import SingleDeviceSharding

from autoshard import _compat
from autoshard._shown import shown
from autoshard.errors import CheckpointError

Key = tuple[str, ...]
TEXTS = {"str": str, "bytes": bytes}  # types of leaves that are saved as their bytes, a str as UTF-8
# The first level of the paths of packs. No escaped name equals it: there, two hex digits follow every '%'.
PACKS = "%packs"


@shown
@dataclass(frozen=True)
class LeafSpec:
    """The path and type of a leaf.

    Attributes:
        key: the path in the tree, one string per level.
        shape: the global shape; for typed RNG keys that of the keys, not of their bits; for a text its number of bytes.
        dtype: the name of the dtype; `key<fry>` and the like for typed RNG keys; `str` or `bytes` for a text.
        key_impl: the implementation of typed RNG keys, else None.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None

    @property
    def stored(self) -> bool:
        """Whether it has elements. Orbax cannot write arrays without elements, so they are not stored."""
        return 0 not in self.shape

    @property
    def is_text(self) -> bool:
        """Whether it is a str or bytes. The length of a text may differ between the template and the checkpoint."""
        return self.dtype in TEXTS

    @property
    def name(self) -> str:
        """The path for display: `params/w`."""
        return "/".join(self.key)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements; for typed RNG keys, of their bits."""
        if self.key_impl is not None:
            struct = self.bits()
            return math.prod(struct.shape) * struct.dtype.itemsize
        if self.is_text:
            return math.prod(self.shape)
        return -(-math.prod(self.shape) * _bits_of_name(self.dtype) // 8)

    def struct(self, sharding: Any = None) -> jax.ShapeDtypeStruct:
        """Return its shape and dtype; for a text those of its bytes."""
        dtype: Any = np.uint8 if self.is_text else self.dtype
        if self.key_impl is not None:
            impl = self.key_impl
            dtype = jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)

    def bits(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the written array; for typed RNG keys those of their bits."""
        struct = self.struct()
        return _key_bits(struct) if is_typed_key(struct) else struct

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def named_leaves(tree: Any) -> list[tuple[Key, Any]]:
    """Return the leaves of a tree with their paths, in tree order.

    Raises:
        CheckpointError: the tree has no leaves, two leaves have the same path, or the path of one is a prefix of
            another.
    """
    try:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state ({type(tree).__name__}) cannot be flattened: {error} The keys of a dict must be sortable, "
            "which 1 and '1' are not."
        ) from error
    pairs = [(tuple(map(_entry_text, path)), leaf) for path, leaf in leaves]
    if not pairs:
        raise CheckpointError(f"the state ({type(tree).__name__}) has no leaves: there is nothing to save or restore.")
    seen: set[Key] = set()
    for key, _ in pairs:
        if key in seen:
            raise CheckpointError(f"two leaves of the state have the path '{'/'.join(key)}': rename one of them.")
        seen.add(key)
    for key, _ in pairs:
        above = next((key[:depth] for depth in range(len(key)) if key[:depth] in seen), None)
        if above is not None:
            raise CheckpointError(
                f"the leaf '{'/'.join(above)}' of the state is also a parent of the leaf '{'/'.join(key)}': "
                "rename one of them."
            )
        if not _encodable("".join(key)):
            raise CheckpointError(
                f"a leaf of the state has the path {'/'.join(key)!r}, which is not valid Unicode: rename it."
            )
    return pairs


def _entry_text(entry: Any) -> str:
    if type(entry) is jax.tree_util.DictKey and type(entry.key) is str:
        return entry.key  # the result of `keystr`, ten times as fast
    return jax.tree_util.keystr((entry,), simple=True)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def is_typed_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed RNG keys, or a `ShapeDtypeStruct` of one."""
    return hasattr(leaf, "dtype") and _is_key_type(leaf.dtype)


# Cached: called for thousands of leaves of a few dtypes.
@functools.cache
def _is_key_type(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, dtypes.prng_key)


@functools.cache
def _bits_of_name(dtype: str) -> int:
    return bits_of(np.dtype(dtype))


@functools.cache
def dtype_text(dtype: Any) -> str:
    """Return `str(dtype)`; cached."""
    return str(dtype)


@functools.cache
def _name_if_storable(dtype: Any) -> str | None:
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # a dtype of another library
        return None
    return None if dtype.hasobject or dtype.kind in "SUMm" or isinstance(dtype, np.dtypes.VoidDType) else dtype.name


def is_text(leaf: Any) -> bool:
    """Return whether a leaf is a str or bytes, and not of a subclass."""
    return type(leaf) in TEXTS.values()


def text_bytes(leaf: str | bytes) -> np.ndarray:
    """Return the bytes of a text, uint8 `[bytes]`."""
    return np.frombuffer(leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else leaf, np.uint8)


def leaf_spec(key: Key, leaf: Any) -> LeafSpec:
    """Return the spec of a leaf of a state or template.

    Raises:
        CheckpointError: leaves of this type cannot be saved.
    """
    if is_typed_key(leaf):
        impl = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else None
        return LeafSpec(key, tuple(leaf.shape), str(leaf.dtype), impl)
    if is_text(leaf):
        return LeafSpec(key, text_bytes(leaf).shape, type(leaf).__name__)
    if isinstance(leaf, (bool, int, float, complex)):
        number, leaf = leaf, np.asarray(leaf)
        if isinstance(number, int) and leaf.dtype == object:
            raise CheckpointError(
                f"the state's leaf '{'/'.join(key)}' is an integer of {number.bit_length()} bits, and at most 64 "
                "can be saved: move it to the config, or save it as an array of its digits."
            )
    dtype = getattr(leaf, "dtype", None)
    name = None if dtype is None or not hasattr(leaf, "shape") else _name_if_storable(dtype)
    if name is None:
        suffix = "" if dtype is None else f" of {dtype}"
        raise CheckpointError(
            f"the state's leaf '{'/'.join(key)}' is a {type(leaf).__name__}{suffix}: only arrays, RNG keys, "
            "numbers, str and bytes can be saved. Make it a static field, or leave it out: of an Equinox model, save "
            "equinox.filter(state, equinox.is_array)."
        )
    return LeafSpec(key, tuple(leaf.shape), name)


def target_struct(leaf: Any, spec: LeafSpec) -> Any:
    """Return the type with which to read a leaf: a struct of the saved leaf with a sharding, or `np.ndarray`.

    64-bit values that a device would truncate are read on the host, where the digest can be compared.
    """
    if not hasattr(leaf, "sharding") or _needs_x64(spec):
        return np.ndarray
    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if is_typed_key(leaf):
        bits = _key_bits(leaf)
        # The dimensions of the bits come last and are not sharded, so the sharding of the keys applies.
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)
    return _shared_struct(spec.shape, spec.dtype, sharding)


def _needs_x64(spec: LeafSpec) -> bool:
    """Return whether JAX needs x64 for arrays of this dtype, and it is off."""
    return spec.key_impl is None and not spec.is_text and dtypes.canonicalize_dtype(spec.dtype) != np.dtype(spec.dtype)


@functools.lru_cache(maxsize=4096)
def _shared_struct(shape: tuple[int, ...], dtype: str, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return a struct; cached, because creating it is slow and many leaves share it."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)


def rebuild_leaf(leaf: Any, spec: LeafSpec, array: Any) -> Any:
    """Return a leaf of the template's type from the array that was read.

    Args:
        leaf: the leaf of the template.
        spec: the saved leaf.
        array: the saved values; None if the leaf has no elements.

    Raises:
        CheckpointError: a value is out of the range of the template's dtype.
    """
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return type(leaf)(array.item())
    if spec.is_text:
        text = b"" if array is None else array.tobytes()
        return text.decode("utf-8", "surrogatepass") if spec.dtype == "str" else text
    if array is None:
        return _bound_like(_empty(leaf, spec), leaf)
    if is_typed_key(leaf):
        return jax.random.wrap_key_data(_bound_like(array, leaf), impl=spec.key_impl)
    if array.dtype != leaf.dtype:
        # x64 keeps 64-bit values for the comparison. NumPy would warn of values for which the cast raises.
        with jax.enable_x64(isinstance(array, np.ndarray)), np.errstate(over="ignore", invalid="ignore"):
            array = _cast(array, leaf.dtype, spec)
    if hasattr(leaf, "sharding") and not isinstance(array, jax.Array):
        array = _put(array, getattr(leaf, "sharding", None))
    return array[()] if isinstance(leaf, np.generic) else _bound_like(array, leaf)


def _bound_like(array: Any, leaf: Any) -> Any:
    """Make an array uncommitted and weakly typed if the template's leaf is.

    A program cannot take a committed counter on one device together with sharded parameters, and a strongly typed leaf
    in place of a weakly typed one would be traced again.
    """
    if isinstance(leaf, jax.Array) and not leaf.committed:
        array = jnp.asarray(np.asarray(array))
    if getattr(leaf, "weak_type", False):
        array = _compat.weakly_typed(array)
    return array


def _put(array: np.ndarray, sharding: Any) -> jax.Array:
    """Put an array, of which each process has all elements, on a sharding; by default on the first device."""
    sharding = sharding or SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def castable(saved: LeafSpec, wanted: LeafSpec) -> bool:
    """Return whether a leaf may be cast: integers to integers, floats to floats, complex numbers to complex numbers."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    if "key<" in saved.dtype + wanted.dtype or saved.is_text or wanted.is_text:
        return False
    one, other = np.dtype(saved.dtype), np.dtype(wanted.dtype)
    return any(jnp.issubdtype(one, kind) and jnp.issubdtype(other, kind) for kind in kinds)


def _cast(array: Any, dtype: Any, spec: LeafSpec) -> Any:
    """Cast an array with rounding. Values out of range raise instead of wrapping, saturating or becoming infinite."""
    with np.errstate(all="ignore"):  # signalling NaNs
        fits = bool(_in_range(array, np.dtype(dtype)).all())
    if not fits:
        raise CheckpointError(f"{spec.name}: {spec} has values that {np.dtype(dtype).name} cannot hold")
    return array.astype(dtype)


def _in_range(array: Any, dtype: Any) -> Any:
    """Return for each element whether its value is in the range of `dtype`, a type of the same kind.

    Compares with the limits of the type, because a round trip hides a wrapped sign, and some types saturate.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        part = np.empty(0, dtype).real.dtype
        return _in_range(array.real, part) & _in_range(array.imag, part)
    if jnp.issubdtype(array.dtype, jnp.integer):
        own, other = jnp.iinfo(array.dtype), jnp.iinfo(dtype)
        low, high = (np.array(limit, array.dtype) for limit in (max(own.min, other.min), min(own.max, other.max)))
        return (array >= low) & (array <= high)
    if bits_of(array.dtype) < 32:  # narrow types may not represent the limits
        array = array.astype(np.float32)
    own, other = jnp.finfo(array.dtype), jnp.finfo(dtype)
    low, high = max(float(own.min), float(other.min)), min(float(own.max), float(other.max))
    in_range = (array >= np.array(low, array.dtype)) & (array <= np.array(high, array.dtype))
    library = jnp if isinstance(array, jax.Array) else np
    nan, infinite = np.array([np.nan, np.inf], np.float32).astype(dtype).astype(np.float32)
    if np.isnan(nan):
        in_range = in_range | library.isnan(array)
    return in_range | library.isinf(array) if np.isinf(infinite) else in_range


def _key_bits(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the bits of typed RNG keys."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


@functools.cache
def bits_of(dtype: Any) -> int:
    """Return the number of bits of one element."""
    if dtype == np.bool_:
        return 8
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 8 * np.dtype(dtype).itemsize
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits


def _empty(leaf: Any, spec: LeafSpec) -> Any:
    """Return an array without elements, of the template's type."""
    if is_typed_key(leaf):
        bits = _key_bits(leaf)
        return jax.random.wrap_key_data(jnp.zeros(bits.shape, bits.dtype), impl=spec.key_impl)
    array = np.zeros(spec.shape, leaf.dtype)
    return jax.device_put(array, leaf.sharding) if hasattr(leaf, "sharding") else array


def nest(leaves: Mapping[Key, Any]) -> dict[str, Any]:
    """Return leaves as a nested dict with escaped keys.

    Orbax joins the levels of a path with '.', so it would silently write {"a.b": x} and {"a": {"b": y}} to one file.
    """
    root: dict[str, Any] = {}
    for key, leaf in leaves.items():
        *levels, last = [_escaped(part) for part in key or ("",)]
        node = root
        for level in levels:
            node = node.setdefault(level, {})
        node[last] = leaf
    return root


def unnest(tree: Mapping[str, Any], keys: Sequence[Key]) -> dict[Key, Any]:
    """Invert `nest`."""
    leaves = {}
    for key in keys:
        node: Any = tree
        for part in key or ("",):
            node = node[_escaped(part)]
        leaves[key] = node
    return leaves


def _escaped(part: str) -> str:
    if part == PACKS:
        return part
    return quote(part, safe="").replace(".", "%2E") or "%"


def as_tree(specs: Sequence[LeafSpec]) -> Any:
    """Return a template for saved leaves: nested dicts by path. 64-bit leaves are NumPy arrays if x64 is off."""
    root: dict[str, Any] = {}
    for spec in specs:
        if not spec.key:
            return _own_template(spec)
        node = root
        for level in spec.key[:-1]:
            node = node.setdefault(level, {})
        node[spec.key[-1]] = _own_template(spec)
    return root


def _own_template(spec: LeafSpec) -> Any:
    if spec.is_text:
        return TEXTS[spec.dtype]()
    # A broadcast view, so that the template of a large leaf takes no memory.
    return np.broadcast_to(np.zeros((), spec.dtype), spec.shape) if _needs_x64(spec) else spec.struct()
