"""The digest of an array does not depend on its sharding or memory."""

import math
from collections.abc import Callable

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.ckpt.state import array_digest

DTYPES = [
    np.bool_, np.int8, np.uint16, np.int32, np.uint32, np.float16, np.float32, np.complex64,
    ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip


def random_array(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == np.complex64:
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        return rng.integers(0, 8, shape).astype(dtype)
    return (rng.normal(size=shape) * 50).astype(dtype)


def device_digest(array: jax.Array) -> int:
    parts = array_digest.total(np.asarray(array_digest.digests([array])))
    assert parts is not None
    return int(parts[0])


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_devices_and_host_agree_on_every_dtype(dtype: type, mesh8: Mesh) -> None:
    array = random_array((8, 12), dtype, 0)
    sharded = jax.device_put(array, NamedSharding(mesh8, PartitionSpec("data", "model")))
    assert device_digest(sharded) == device_digest(jnp.asarray(array)) == array_digest.host_digest(array)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_blocks_of_a_large_host_array(dtype: type) -> None:
    array = random_array((3, array_digest.DIGEST_BLOCK_ELEMENTS // 2 + 7), dtype, 0)
    assert device_digest(jnp.asarray(array)) == array_digest.host_digest(array)


def test_the_summands_are_not_written_to_memory(mesh8: Mesh) -> None:
    leaf = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=NamedSharding(mesh8, PartitionSpec("data")))
    compiled = array_digest._parts_program(mesh8, (PartitionSpec("data"),)).lower((leaf,)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**16


def test_wide_types() -> None:
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64, np.complex128):
            array = np.random.default_rng(1).normal(size=(3, 5)).astype(dtype)
            assert device_digest(jnp.asarray(array)) == array_digest.host_digest(array)


@given(st.data())
def test_the_digest_does_not_depend_on_the_sharding(mesh_of: Callable[..., Mesh], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 3))
    names = data.draw(st.permutations(["a", "b", "c"]))
    shape, spec = [], []
    for _ in range(rank):
        count = data.draw(st.integers(0, len(names)))
        mine, names = names[:count], names[count:]
        shape.append(2**count * data.draw(st.integers(1, 3)))
        spec.append(tuple(mine) or None)
    array = random_array(tuple(shape), np.float32, math.prod(shape))
    sharding = NamedSharding(mesh_of(a=2, b=2, c=2), PartitionSpec(*spec))
    assert device_digest(jax.device_put(array, sharding)) == array_digest.host_digest(array)


def test_explicit_axes() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    array = random_array((8, 6), np.float32, 2)
    sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec("x", "y")))
    assert device_digest(sharded) == array_digest.host_digest(array)


@given(st.integers(0, 95), st.integers(0, 31))
def test_any_flipped_bit_changes_the_digest(element: int, bit: int) -> None:
    array = random_array((8, 12), np.float32, 3)
    flipped = array.copy()
    flipped.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
    assert array_digest.host_digest(flipped) != array_digest.host_digest(array)


def test_the_digest_depends_on_the_order_of_elements() -> None:
    array = random_array((8, 12), np.float32, 4)
    assert len({array_digest.host_digest(a) for a in (array, array[::-1], array[:, ::-1], np.roll(array, 1))}) == 4


def test_blocks_of_constants_differ() -> None:
    """A plain weighted sum would depend on few bits of the exponent only."""
    digests = {array_digest.host_digest(np.full(4096, value, np.float32)) for value in (0.0, 1.0, 2.0, -1.0, 0.5, 4.0)}
    assert len(digests) == 6


def test_there_are_no_collectives(mesh8: Mesh) -> None:
    specs = (PartitionSpec("data", "model"), PartitionSpec(), PartitionSpec(("model", "data")))
    leaves = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh8, spec)) for spec in specs]
    text = array_digest._parts_program(mesh8, specs).lower(tuple(leaves)).compile().as_text()
    assert not [name for name in ("all-reduce", "all-gather", "all-to-all", "permute") if name in text]


def test_a_damaged_row_is_detected(mesh8: Mesh) -> None:
    array = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh8, PartitionSpec("data")))
    rows = np.asarray(array_digest.digests([array, array + 1]))
    assert rows.shape == (8, 3) and array_digest.total(rows) is not None
    rows = rows.copy()
    rows[5, 1] ^= np.uint32(4)
    assert array_digest.total(rows) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e3m4"])
def test_the_digest_depends_on_the_bits_of_nans(mesh8: Mesh, dtype: str) -> None:
    bits = 8 * np.dtype(dtype).itemsize
    words = np.arange(2**bits, dtype=np.uint64).astype(f"u{bits // 8}")
    expected = array_digest.host_digest(words)
    sharding = NamedSharding(mesh8, PartitionSpec("data"))
    array = jax.device_put(words.view(dtype), sharding)
    assert device_digest(array) == array_digest.host_digest(words.view(dtype)) == expected
    assert device_digest(jax.device_put(array, sharding, may_alias=False)) == expected


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_the_digest_depends_on_the_bits_of_wide_nans(dtype: str) -> None:
    words = np.array([0x7F800001, 0xFFC12345, 0x7FC00000, 0xFF800002, 0x7FFFFFFF, 0x80000000], np.uint32)
    array = words.view(dtype)
    assert device_digest(jnp.asarray(array)) == array_digest.host_digest(array) == array_digest.host_digest(words)


def test_leaves_in_several_memory_kinds(mesh8: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more leaves in host memory than are moved at once."""
    monkeypatch.setattr(array_digest, "MAX_MOVED_BYTES", 1000)
    arrays = [random_array((8, 12), np.float32, seed) for seed in range(9)]
    sharding = NamedSharding(mesh8, PartitionSpec("data", "model"))
    kinds = ["pinned_host", "device", "unpinned_host"]
    leaves = [jax.device_put(a, sharding.with_memory_kind(kinds[i % 3])) for i, a in enumerate(arrays)]
    parts = array_digest.total(np.asarray(array_digest.digests(leaves)))
    assert parts is not None and parts.tolist() == [array_digest.host_digest(array) for array in arrays]
    assert [leaf.sharding.memory_kind for leaf in leaves] == kinds * 3
