"""States to save, and bitwise comparison of states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.arrays import array

CONFIG = {"model": {"layers": 2, "width": 64}, "train": {"steps": 10}}


def bits(leaf: Any) -> np.ndarray:
    """Return the bytes of a leaf."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.frombuffer(np.asarray(leaf).tobytes(), np.uint8)


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Compare two states: structure, types, dtypes and every bit."""

    def check(actual: Any, expected: Any) -> None:
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        leaves = jax.tree_util.tree_leaves_with_path(actual)
        for (path, have), want in zip(leaves, jax.tree.leaves(expected), strict=True):
            name = jax.tree_util.keystr(path)
            assert isinstance(have, jax.Array) == isinstance(want, jax.Array), name
            assert getattr(have, "dtype", type(have)) == getattr(want, "dtype", type(want)), name
            np.testing.assert_array_equal(bits(have), bits(want), err_msg=name)

    return check


@pytest.fixture(scope="session")
def make_state() -> Callable[[Mesh, int], dict[str, Any]]:
    """Make a state with every type of leaf, on a mesh with the axes `data` and `model`."""

    def make(mesh: Mesh, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)

        def put(array: Any, *spec: Any) -> jax.Array:
            return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

        return {
            "params": {
                "w": put(rng.normal(size=(64, 96)).astype(np.float32), "data", "model"),
                "b": put(rng.normal(size=96).astype(np.float32)),
                "half": put(rng.normal(size=(32, 8)).astype(ml_dtypes.bfloat16), ("model", "data")),
                "eighth": put(rng.normal(size=(8, 16)).astype(ml_dtypes.float8_e4m3fn), None, "model"),
                "empty": put(np.zeros((0, 4), np.float32)),
            },
            "mu": [put(rng.normal(size=(64, 96)).astype(np.float32), ("data", "model")), jnp.float16(0.5)],
            "mask": put(rng.integers(0, 2, 24).astype(bool), "model"),
            "complex": array(rng.normal(size=5) + 1j, np.complex64),
            # Orbax would write both of these to one file.
            "a.b": jnp.ones(3),
            "a": {"b": jnp.zeros(3), "": jnp.full(3, 2.0)},
            "typed": jax.random.key(seed, impl="rbg"),
            "typed_many": put(jax.random.split(jax.random.key(seed), 8), "data"),
            "raw": jax.random.PRNGKey(seed),
            "step": jnp.int32(seed),
            "host": rng.normal(size=(3, 4)),
            "count": seed + 2**40,
            "scale": 0.5,
            "on": True,
        }

    return make


@pytest.fixture(scope="session")
def abstract() -> Callable[[Any], Any]:
    """Replace the arrays of a state by `ShapeDtypeStruct`s with shardings."""

    def describe(state: Any) -> Any:
        return jax.tree.map(
            lambda leaf: (
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                if isinstance(leaf, jax.Array)
                else leaf
            ),
            state,
        )

    return describe


@pytest.fixture
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """Read all files below a directory, to compare before and after."""

    def read(directory: Path) -> dict[str, bytes]:
        return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}

    return read


@pytest.fixture(scope="session")
def config() -> dict[str, Any]:
    """The config to save with the states."""
    return CONFIG
