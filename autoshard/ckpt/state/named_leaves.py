"""A state as named leaves: how it is addressed, what each leaf is, how it goes to and from plain arrays."""

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
TEXTS = {"str": str, "bytes": bytes}  # kinds of leaves that are saved as their bytes, a str as UTF-8
PACKS = "%packs"  # the level of packs in a step: no escaped name has a '%' before anything but two digits


@shown
@dataclass(frozen=True)
class LeafSpec:
    """What one leaf is.

    Attributes:
        key: its path in the tree, one text per level.
        shape: the whole shape; of the keys, not of their bits, for typed RNG keys; of a text, how many bytes it has.
        dtype: the dtype's name; `key<fry>` and the like for typed RNG keys; `str` or `bytes` for a text.
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

    @property
    def is_text(self) -> bool:
        """Whether it is a str or bytes, which any other can stand for: a text's length is no part of what it is."""
        return self.dtype in TEXTS

    @property
    def name(self) -> str:
        """Its path as people write it: `params/w`."""
        return "/".join(self.key)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements; of typed RNG keys, those of their bits."""
        if self.key_impl is not None:
            struct = self.bits()
            return math.prod(struct.shape) * struct.dtype.itemsize
        if self.is_text:
            return math.prod(self.shape)
        return -(-math.prod(self.shape) * _bits_of_name(self.dtype) // 8)

    def struct(self, sharding: Any = None) -> jax.ShapeDtypeStruct:
        """Its shape and dtype; a text's bytes."""
        dtype: Any = np.uint8 if self.is_text else self.dtype
        if self.key_impl is not None:
            impl = self.key_impl
            dtype = jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)

    def bits(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of what is written: of typed RNG keys, those of their bits."""
        struct = self.struct()
        return _key_bits(struct) if is_typed_key(struct) else struct

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def named_leaves(tree: Any) -> list[tuple[Key, Any]]:
    """Every leaf with its path, in tree order.

    Raises:
        CheckpointError: the tree has no leaf, or two leaves have one path, or one that cannot be told from a branch.
    """
    try:
        found = jax.tree_util.tree_leaves_with_path(tree)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state ({type(tree).__name__}) cannot be taken apart: {error} The keys of a dict must have an order, "
            "which 1 and '1' do not have."
        ) from error
    pairs = [(tuple(map(_entry_text, path)), leaf) for path, leaf in found]
    if not pairs:
        raise CheckpointError(f"the state ({type(tree).__name__}) has no leaves: there is nothing to save or restore.")
    seen: set[Key] = set()
    for key, _ in pairs:
        if key in seen:
            raise CheckpointError(f"two leaves of the state have the path '{'/'.join(key)}': rename one.")
        seen.add(key)
    for key, _ in pairs:
        above = next((key[:depth] for depth in range(len(key)) if key[:depth] in seen), None)
        if above is not None:
            raise CheckpointError(
                f"the leaf '{'/'.join(above)}' of the state would lie above its leaf '{'/'.join(key)}': rename one."
            )
        if not _encodable("".join(key)):
            raise CheckpointError(f"a leaf of the state has the path {'/'.join(key)!r}, which is no text: rename it.")
    return pairs


def _entry_text(entry: Any) -> str:
    if type(entry) is jax.tree_util.DictKey and type(entry.key) is str:
        return entry.key  # as `keystr` has it, in a tenth of the time
    return jax.tree_util.keystr((entry,), simple=True)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return True


def is_typed_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed RNG keys, or describes one."""
    return hasattr(leaf, "dtype") and _is_key_type(leaf.dtype)


# Looked up for each of thousands of leaves, of a few dtypes.
@functools.cache
def _is_key_type(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, dtypes.prng_key)


@functools.cache
def _bits_of_name(dtype: str) -> int:
    return bits_of(np.dtype(dtype))


@functools.cache
def dtype_text(dtype: Any) -> str:
    """A dtype as text."""
    return str(dtype)


@functools.cache
def _name_if_storable(dtype: Any) -> str | None:
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # another library's
        return None
    return None if dtype.hasobject or dtype.kind in "SUMm" or isinstance(dtype, np.dtypes.VoidDType) else dtype.name


def is_text(leaf: Any) -> bool:
    """Whether a leaf is a str or bytes, and nothing that inherits from them."""
    return type(leaf) in TEXTS.values()


def text_bytes(leaf: str | bytes) -> np.ndarray:
    """The bytes of a text, uint8 `[bytes]`."""
    return np.frombuffer(leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else leaf, np.uint8)


def leaf_spec(key: Key, leaf: Any) -> LeafSpec:
    """What a leaf of a state or of a template is.

    Raises:
        CheckpointError: it is nothing that a checkpoint can hold.
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
                f"the state's leaf '{'/'.join(key)}' is an integer of {number.bit_length()} bits, and 64 can be saved: "
                "keep it in the config, or as an array of its parts."
            )
    dtype = getattr(leaf, "dtype", None)
    name = None if dtype is None or not hasattr(leaf, "shape") else _name_if_storable(dtype)
    if name is None:
        of = "" if dtype is None else f" of {dtype}"
        raise CheckpointError(
            f"the state's leaf '{'/'.join(key)}' is a {type(leaf).__name__}{of}: only arrays, RNG keys, "
            "numbers, str and bytes can be saved. Keep anything else outside the state, in the config, or "
            "as a static field."
        )
    return LeafSpec(key, tuple(leaf.shape), name)


def target_struct(leaf: Any, spec: LeafSpec) -> Any:
    """What to read for a template's leaf: the saved shape and dtype with a sharding, or `np.ndarray` on the host.

    What a device would cut to 32 bits is read on the host, where its digest is that of what was saved.
    """
    if not hasattr(leaf, "sharding") or _needs_x64(spec):
        return np.ndarray
    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if is_typed_key(leaf):
        bits = _key_bits(leaf)
        # The bits' own dimensions come last and stay whole, so the keys' spec fits as it is.
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)
    return _placed(spec.shape, spec.dtype, sharding)


def _needs_x64(spec: LeafSpec) -> bool:
    """Whether JAX's arrays cannot hold its values now."""
    return spec.key_impl is None and not spec.is_text and dtypes.canonicalize_dtype(spec.dtype) != np.dtype(spec.dtype)


@functools.lru_cache(maxsize=4096)
def _placed(shape: tuple[int, ...], dtype: str, sharding: Any) -> jax.ShapeDtypeStruct:
    """One for all leaves of a kind: making it takes longer than most of what is done with it."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)


def rebuilt(leaf: Any, spec: LeafSpec, array: Any) -> Any:
    """A leaf of the template's kind from the array that was read, None for one without elements.

    Raises:
        CheckpointError: a cast to the template's dtype would lose more than precision.
    """
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return type(leaf)(array.item())
    if spec.is_text:
        text = b"" if array is None else array.tobytes()
        return text.decode("utf-8", "surrogatepass") if spec.dtype == "str" else text
    if array is None:
        return _as_free(_empty(leaf, spec), leaf)
    if is_typed_key(leaf):
        return jax.random.wrap_key_data(_as_free(array, leaf), impl=spec.key_impl)
    if array.dtype != leaf.dtype:
        # A value of 64 bits is compared as one; NumPy would warn of what the cast refuses.
        with jax.enable_x64(isinstance(array, np.ndarray)), np.errstate(over="ignore", invalid="ignore"):
            array = _cast(array, leaf.dtype, spec)
    if hasattr(leaf, "sharding") and not isinstance(array, jax.Array):
        array = _put(array, getattr(leaf, "sharding", None))
    return array[()] if isinstance(leaf, np.generic) else _as_free(array, leaf)


def _as_free(array: Any, leaf: Any) -> Any:
    """An array as little bound to a device and to its dtype as the template's leaf is.

    A committed counter on one device cannot meet sharded parameters in a program, and a strong one where it was weak
    has the program traced again.
    """
    if isinstance(leaf, jax.Array) and not leaf.committed:
        array = jnp.asarray(np.asarray(array))
    if getattr(leaf, "weak_type", False):
        array = _compat.weakly_typed(array)
    return array


def _put(array: np.ndarray, sharding: Any) -> jax.Array:
    """An array that every process has whole, on a sharding; on the first device without one."""
    sharding = sharding or SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def castable(saved: LeafSpec, wanted: LeafSpec) -> bool:
    """Whether values of one dtype can stand for those of the other: integers for integers, floats for floats."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    if "key<" in saved.dtype + wanted.dtype or saved.is_text or wanted.is_text:
        return False
    one, other = np.dtype(saved.dtype), np.dtype(wanted.dtype)
    return any(jnp.issubdtype(one, kind) and jnp.issubdtype(other, kind) for kind in kinds)


def _cast(array: Any, dtype: Any, spec: LeafSpec) -> Any:
    """An array in another dtype: rounded, never wrapped around, cut to a range, or made infinite."""
    with np.errstate(all="ignore"):  # signalling NaNs
        fits = bool(_held(array, np.dtype(dtype)).all())
    if not fits:
        raise CheckpointError(f"{spec.name}: {spec} has values that {np.dtype(dtype).name} cannot hold")
    return array.astype(dtype)


def _held(array: Any, dtype: Any) -> Any:
    """Which elements have a value in the range of `dtype`, a type of the same kind; with NumPy where they are NumPy's.

    Told from the limits, not from the cast values: a round trip hides a wrapped sign, and some types saturate.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        part = np.empty(0, dtype).real.dtype
        return _held(array.real, part) & _held(array.imag, part)
    if jnp.issubdtype(array.dtype, jnp.integer):
        own, other = jnp.iinfo(array.dtype), jnp.iinfo(dtype)
        low, high = (np.array(limit, array.dtype) for limit in (max(own.min, other.min), min(own.max, other.max)))
        return (array >= low) & (array <= high)
    if bits_of(array.dtype) < 32:  # else a limit may not be one of its values
        array = array.astype(np.float32)
    own, other = jnp.finfo(array.dtype), jnp.finfo(dtype)
    low, high = max(float(own.min), float(other.min)), min(float(own.max), float(other.max))
    held = (array >= np.array(low, array.dtype)) & (array <= np.array(high, array.dtype))
    of = jnp if isinstance(array, jax.Array) else np
    nan, infinite = np.array([np.nan, np.inf], np.float32).astype(dtype).astype(np.float32)
    if np.isnan(nan):
        held = held | of.isnan(array)
    return held | of.isinf(array) if np.isinf(infinite) else held


def _key_bits(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the bits of typed RNG keys."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


@functools.cache
def bits_of(dtype: Any) -> int:
    """Bits of one element of a number type."""
    if dtype == np.bool_:
        return 8
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 8 * np.dtype(dtype).itemsize
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits


def _empty(leaf: Any, spec: LeafSpec) -> Any:
    """An array without elements, of the template's kind."""
    if is_typed_key(leaf):
        bits = _key_bits(leaf)
        return jax.random.wrap_key_data(jnp.zeros(bits.shape, bits.dtype), impl=spec.key_impl)
    array = np.zeros(spec.shape, leaf.dtype)
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
    if part == PACKS:
        return part
    return quote(part, safe="").replace(".", "%2E") or "%"


def as_tree(specs: Sequence[LeafSpec]) -> Any:
    """Saved leaves as a tree of their own: nested dicts by path, which is what is left of any structure.

    What JAX's arrays cannot hold is wanted as NumPy has it.
    """
    root: dict[str, Any] = {}
    for spec in specs:
        if not spec.key:
            return _own_template(spec)
        place = root
        for level in spec.key[:-1]:
            place = place.setdefault(level, {})
        place[spec.key[-1]] = _own_template(spec)
    return root


def _own_template(spec: LeafSpec) -> Any:
    if spec.is_text:
        return TEXTS[spec.dtype]()
    # One element, seen as many: the template of a large leaf takes no memory.
    return np.broadcast_to(np.zeros((), spec.dtype), spec.shape) if _needs_x64(spec) else spec.struct()
