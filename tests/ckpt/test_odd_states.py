"""States other than a nested dict of sharded float arrays."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.training import dynamic_scale
from jax.extend.sharding import GSPMDSharding
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.ckpt import Checkpointer, CheckpointError, MismatchError
from autoshard.ckpt.restore.checkpoint_diff import compare

W = jnp.arange(8.0)


def test_names_with_a_slash(tmp_path: Path) -> None:
    state: Any = {"a/b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state | {"a": {"b": jnp.full(2, 5.0)}})
        checkpoints.save(3, state | {"a/b": jnp.full(2, 5.0)}, block=True)
        for restored in (checkpoints.restore(1, like=state), checkpoints.restore(1)):
            np.testing.assert_array_equal(restored["a/b"], np.ones(2))
            np.testing.assert_array_equal(restored["a"]["b"], np.zeros(2))
        for later in (2, 3):
            difference = compare(checkpoints.describe(1), checkpoints.describe(later))
            changed = "a/b" if later == 2 else "'a/b'"
            assert difference.same == 1 and difference.values == (changed,) and not difference.equal
        checkpoints.save(4, {"a/b": jnp.ones(2)})
        checkpoints.save(5, {"a": {"b": jnp.ones(2)}}, block=True)
        difference = compare(checkpoints.describe(4), checkpoints.describe(5))
        assert (difference.same, difference.values) == (0, ())
        assert (difference.only_one, difference.only_other) == (("'a/b'",), ("a/b",))
        assert checkpoints.describe(5).leaves[0].key == ("a", "b") and checkpoints.describe(5).leaves[0].name == "a/b"
        with pytest.raises(MismatchError, match="a/b and a/b both become c"):
            checkpoints.restore(1, like={"c": jnp.ones(2)}, rename={"a/b": "c"})


@pytest.mark.parametrize("count", [1, 70])
def test_wide_values_are_cast_on_the_host(tmp_path: Path, mesh8: Mesh, count: int) -> None:
    """The values are leaves of their own or in packs."""
    sharding = NamedSharding(mesh8, PartitionSpec("data"))
    state = {"step": 7, "many": [np.arange(8.0) + n for n in range(count)]}
    like = {"step": jnp.int32(0), "many": [jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)] * count}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(like=like, allow_cast=True)
        assert restored["step"] == 7 and restored["step"].dtype == jnp.int32
        for n, leaf in enumerate(restored["many"]):
            assert leaf.sharding == sharding and leaf.dtype == jnp.float32
            np.testing.assert_array_equal(leaf, state["many"][n])
        checkpoints.save(2, {"a": 2**40, "b": 1e300})
        for like in ({"a": jnp.int32(0)}, {"b": jnp.float32(0)}):
            with pytest.raises(CheckpointError, match="values that (int|float)32 cannot hold"):
                checkpoints.restore(2, like=like, allow_cast=True, partial=True)


def test_without_a_template_wide_values_are_restored_on_the_host(tmp_path: Path) -> None:
    state = {"step": 2**40, "scale": 0.5, "on": True, "wide": np.arange(3) + 2**33, "none": np.zeros((0, 2)), "w": W}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore()
        assert {name for name, leaf in restored.items() if not isinstance(leaf, jax.Array)} == state.keys() - {
            "on",
            "w",
        }
        for name, leaf in restored.items():
            assert leaf.dtype == np.asarray(state[name]).dtype
            np.testing.assert_array_equal(leaf, state[name])
        one_expert = checkpoints.restore(experts=[2], expert_dims={"wide": 0})
        np.testing.assert_array_equal(one_expert["wide"], [2**33 + 2])


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 70])
def test_a_restored_state_does_not_recompile_the_step(tmp_path: Path, mesh8: Mesh, count: int) -> None:
    """Leaves that were not committed to a device are restored uncommitted, weakly typed leaves weakly typed."""
    params = jax.device_put({"w": jnp.ones((8, 8))}, NamedSharding(mesh8, PartitionSpec("data")))
    state = {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "counts": [jnp.int32(n) for n in range(count)],
        "weak": jnp.asarray(2.0),
        "weak_wide": jnp.broadcast_to(jnp.asarray(2.0), (3,)),
        "key": jax.random.key(0),
        "empty": jnp.zeros((0, 2)),
        "first": jax.device_put(jnp.ones(2), jax.devices()[0]),
    }

    traced = []

    def step(state: Any) -> Any:
        traced.append(True)
        return jax.tree.map(lambda leaf: leaf, state | {"first": None}), state["weak"] + state["params"]["w"]

    jitted = jax.jit(step)
    jitted(state | {"first": None})
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(like=state)
    for actual, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (actual.committed, actual.sharding) == (want.committed, want.sharding)
        assert jax.typeof(actual) == jax.typeof(want) and bool((actual == want).all())
    assert restored["first"].committed and state["weak_wide"].weak_type and not restored["opt"][0].count.committed
    jitted(restored | {"first": None})
    assert traced == [True]


def test_replicas_without_a_mesh_are_digested_once(tmp_path: Path) -> None:
    sharding: Any = GSPMDSharding.get_replicated(jax.devices())
    like = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": W})
        restored = checkpoints.restore(like={"w": like})["w"]
        assert restored.sharding == sharding
        np.testing.assert_array_equal(restored, W)
        checkpoints.save(2, {"w": restored}, block=True)
        np.testing.assert_array_equal(checkpoints.restore(2, like={"w": W})["w"], W)


@pytest.mark.parametrize("count", [1, 70])
def test_arrays_of_the_other_byte_order(tmp_path: Path, count: int) -> None:
    """The arrays are restored bit for bit, including signalling NaNs, in the byte order of the template."""
    native = np.array([0x7F812345, 0xFFC00001, 0x80000000, 0x3F800000], np.uint32).view(np.float32)
    other = native.byteswap().view(native.dtype.newbyteorder())
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {str(n): other for n in range(count)}, block=True)
        assert checkpoints.verify() == []
        for like in (native, other):
            restored = checkpoints.restore(like={str(n): like for n in range(count)})
            for leaf in restored.values():
                assert leaf.dtype == like.dtype and leaf.tobytes() == like.tobytes()


KEYS = ("", ".", "..", "%", "%packs", "%2E", "a/b", "/", "a\0b", "\n", " ", "\N{SNOWMAN}", "e\u0301", "\xe9", "x" * 300)


@pytest.mark.slow
def test_unusual_names(tmp_path: Path) -> None:
    """All names are used on two levels of one state."""
    state = {name: {other: np.float32(i * 100 + j) for j, other in enumerate(KEYS)} for i, name in enumerate(KEYS)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, block=True)
        assert checkpoints.verify() == [] and len(checkpoints.describe().leaves) == len(KEYS) ** 2
        for restored in (checkpoints.restore(like=state), checkpoints.restore()):
            assert restored == state


def test_a_dynamic_loss_scale(tmp_path: Path, assert_same: Any) -> None:
    """As in jmp and Flax, the loss scale is a registered dataclass with static fields, beside states of optax."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class LossScale:
        scale: jax.Array
        counter: jax.Array
        period: int = dataclasses.field(default=2000, metadata={"static": True})

    @struct.dataclass
    class State:
        params: Any
        opt: Any
        scale: Any
        flax_scale: Any
        skipped: int

    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    optimizer = optax.apply_if_finite(optax.chain(optax.clip(1.0), optax.adamw(1e-3)), 5)
    scale = LossScale(jnp.float32(2.0**15), jnp.int32(1999))
    state = State(params, optimizer.init(params), scale, dynamic_scale.DynamicScale(fin_steps=jnp.int32(7)), 3)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, block=True)
        assert "scale/scale" in [leaf.name for leaf in checkpoints.describe().leaves]
        blank = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if isinstance(leaf, jax.Array) else type(leaf)(0), state)
        restored = checkpoints.restore(like=blank)
    assert_same(restored, state)
    assert restored.scale.period == 2000


@pytest.mark.parametrize("count", [2, 70])
def test_leaves_on_other_devices_than_the_current_mesh(tmp_path: Path, count: int) -> None:
    """The values are leaves of their own or in packs."""
    device = jax.devices()[3]
    state = {str(n): jax.device_put(jnp.full(4, float(n)), device) for n in range(count)}
    with Checkpointer(tmp_path) as checkpoints, jax.set_mesh(jax.make_mesh((8,), ("x",))):
        checkpoints.save(1, state)
        for restored in (checkpoints.restore(like=state), checkpoints.restore(shardings=device)):
            for name, leaf in restored.items():
                assert leaf.devices() == {device}
                np.testing.assert_array_equal(np.asarray(leaf), np.full(4, float(name)))


@pytest.mark.parametrize("count", [1, 70])
def test_the_largest_number_of_dimensions(tmp_path: Path, count: int) -> None:
    state = {str(n): np.full((1,) * 31, n) for n in range(count)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, block=True)
        restored = checkpoints.restore(like=state)
    assert all(restored[name].shape == (1,) * 31 and restored[name].item() == int(name) for name in state)
