"""Options that allow differences between the checkpoint and the template."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autoshard.ckpt import Checkpointer, CheckpointError, MismatchError

P = PartitionSpec
W = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def saved(tmp_path: Path, mesh8: Mesh) -> Checkpointer:
    state = {
        "params": {"encoder": {"w": W, "b": np.ones(8, np.float32)}, "head": {"w": -W}},
        "count": np.array([1, 300], np.int32),
        "key": jax.random.key(3, impl="rbg"),
        "empty": np.zeros((0, 2), np.float32),
    }
    placed = jax.device_put(state["params"], NamedSharding(mesh8, P("data")))
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(5, state | {"params": placed}, block=True)
    checkpoints.close()
    return checkpoints


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def test_without_a_template_the_whole_state_is_restored(saved: Checkpointer) -> None:
    state = saved.restore()
    assert set(state) == {"count", "empty", "key", "params"}
    np.testing.assert_array_equal(state["params"]["encoder"]["w"], W)
    assert state["empty"].shape == (0, 2)
    assert jax.random.key_impl(state["key"]) == "rbg"
    np.testing.assert_array_equal(jax.random.key_data(state["key"]), jax.random.key_data(jax.random.key(3, impl="rbg")))
    assert saved.restored is not None and saved.restored.step == 5
    assert str(saved.restored).startswith("step 5: ") and " read in " in str(saved.restored)


def test_a_single_array_without_a_template(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, jnp.arange(3))
        np.testing.assert_array_equal(checkpoints.restore(), [0, 1, 2])


def test_shardings_replace_those_of_the_template(saved: Checkpointer, mesh8: Mesh) -> None:
    whole, rows = NamedSharding(mesh8, P()), NamedSharding(mesh8, P("model"))
    state = saved.restore(shardings=whole)
    assert state["params"]["head"]["w"].sharding == whole == state["count"].sharding == state["key"].sharding
    state = saved.restore(shardings={"params": rows, "count": None, "key": whole, "empty": whole})
    assert state["params"]["encoder"]["b"].sharding == rows == state["params"]["head"]["w"].sharding
    assert isinstance(state["count"].sharding, SingleDeviceSharding)
    with pytest.raises(CheckpointError, match="shardings do not match the structure of the state"):
        saved.restore(shardings={"parameters": rows})


def test_a_partial_restore_of_no_leaf(saved: Checkpointer) -> None:
    with pytest.raises(MismatchError, match="has none of the 2 wanted leaves among its 6:") as caught:
        saved.restore(like={"encoder": {"w": jnp.ones((8, 8))}, "n": 1}, partial=True)
    for line in ("count: saved int32[2]", "params/encoder/b: saved float32[8]", "encoder/w: wanted float32[8, 8]"):
        assert line in str(caught.value)
    assert "rename={'saved': 'wanted'}" in str(caught.value)


def test_a_partial_restore(saved: Checkpointer) -> None:
    new = jnp.full(4, 7.0)
    like = {"params": {"encoder": {"w": shape(8, 8)}, "adapter": new}}
    with pytest.raises(MismatchError, match="adapter: not in the checkpoint(?s:.*)count: saved int32"):
        saved.restore(like=like)
    state = saved.restore(like=like, partial=True)
    np.testing.assert_array_equal(state["params"]["encoder"]["w"], W)
    assert state["params"]["adapter"] is new
    restored = saved.restored
    assert restored is not None and restored.kept == ("params/adapter",)
    assert restored.unread == ("count", "empty", "key", "params/encoder/b", "params/head/w")
    assert "saved, not read: 5 leaves" in str(restored)
    with pytest.raises(MismatchError, match="params/adapter: not in the checkpoint, and the template has no value"):
        saved.restore(like={"params": {"adapter": shape(4)}}, partial=True)
    new.delete()  # as if it was donated
    with pytest.raises(MismatchError, match="params/adapter: not in the checkpoint, and the template has no value"):
        saved.restore(like=like, partial=True)
    with pytest.raises(MismatchError, match=r"encoder/w: saved float32\[8, 8\], wanted float32\[8, 4\]"):
        saved.restore(like={"params": {"encoder": {"w": shape(8, 4)}}}, partial=True)


def test_kept_leaves_are_moved_to_the_requested_shardings(saved: Checkpointer, mesh8: Mesh) -> None:
    new, sharding = jnp.arange(8.0), NamedSharding(mesh8, P("data"))
    like = {"params": {"encoder": {"w": shape(8, 8)}, "adapter": new, "host": np.ones(3), "key": jax.random.key(1)}}
    wanted = {"encoder": sharding, "adapter": sharding, "host": sharding, "key": NamedSharding(mesh8, P())}
    params = saved.restore(like=like, partial=True, shardings={"params": wanted})["params"]
    np.testing.assert_array_equal(params["encoder"]["w"], W)
    np.testing.assert_array_equal(params["adapter"], new)
    assert params["adapter"].sharding == sharding and params["key"].sharding == wanted["key"]
    assert params["host"] is like["params"]["host"] and params["key"] == like["params"]["key"]
    assert (
        saved.restore(like=like, partial=True, shardings={"params": wanted | {"adapter": None}})["params"]["adapter"]
        is new
    )
    with pytest.raises(CheckpointError, match=r"params/adapter: shape \(7,\): dim 0 of size 7 is not divisible"):
        saved.restore(like={"params": {"adapter": jnp.ones(7)}}, partial=True, shardings=sharding)
    with pytest.raises(MismatchError, match="params/adapter: not in the checkpoint, and the template has no value"):
        saved.restore(like={"params": {"adapter": shape(8)}}, partial=True, shardings=sharding)


def test_casts_must_be_allowed(saved: Checkpointer) -> None:
    like = {"params": {"encoder": {"w": shape(8, 8, dtype=jnp.bfloat16)}}, "count": shape(2, dtype=jnp.int16)}
    with pytest.raises(MismatchError, match=r"saved float32\[8, 8\], wanted bfloat16.*(?s:.*)allow_cast=True casts 2"):
        saved.restore(like=like, partial=True)
    state = saved.restore(like=like, partial=True, allow_cast=True)
    assert state["params"]["encoder"]["w"].dtype == jnp.bfloat16 and state["count"].dtype == jnp.int16
    np.testing.assert_array_equal(state["params"]["encoder"]["w"], W.astype(jnp.bfloat16))
    assert saved.restored is not None
    assert saved.restored.cast == ("count: int32 -> int16", "params/encoder/w: float32 -> bfloat16")


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"count": shape(2, dtype=jnp.int8)}, r"count: int32\[2\] has values that int8 cannot hold"),
        ({"count": shape(2, dtype=jnp.float32)}, r"count: saved int32\[2\], wanted float32\[2\]"),
        ({"key": jax.eval_shape(lambda: jax.random.key(0))}, r"key: saved key<rbg>\[\], wanted key<fry>\[\]"),
    ],
)
def test_casts_that_would_change_values_raise(saved: Checkpointer, like: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        saved.restore(like=like, partial=True, allow_cast=True)


def test_a_cast_never_makes_a_value_infinite(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": jnp.array([1e30, jnp.inf])})
        with pytest.raises(CheckpointError, match="values that float16 cannot hold"):
            checkpoints.restore(like={"w": shape(2, dtype=jnp.float16)}, allow_cast=True)
        assert np.isinf(checkpoints.restore(like={"w": shape(2, dtype=jnp.bfloat16)}, allow_cast=True)["w"][1])


def test_renamed_leaves(saved: Checkpointer) -> None:
    like = {"params": {"backbone": {"w": shape(8, 8), "bias": shape(8)}, "out": shape(8, 8)}}
    rename = {
        "params/encoder": "params/backbone",
        "params/encoder/b": "params/backbone/bias",
        "params/head/w": "params/out",
    }
    state = saved.restore(like=like, partial=True, rename=rename)
    np.testing.assert_array_equal(state["params"]["backbone"]["w"], W)
    np.testing.assert_array_equal(state["params"]["backbone"]["bias"], np.ones(8))
    np.testing.assert_array_equal(state["params"]["out"], -W)


def test_renamings_that_do_not_match(saved: Checkpointer) -> None:
    like = {"params": {"encoder": {"w": shape(8, 8)}}}
    with pytest.raises(MismatchError, match="'params/enc': matches no saved leaf"):
        saved.restore(like=like, partial=True, rename={"params/enc": "params/encoder"})
    with pytest.raises(MismatchError, match="params/head/w and params/encoder/w both become params/encoder/w"):
        saved.restore(like=like, partial=True, rename={"params/head": "params/encoder"})
    with pytest.raises(MismatchError, match=r"saved float32\[8, 8\] as params/head/w, wanted float32\[8\]"):
        saved.restore(like={"v": shape(8)}, partial=True, rename={"params/head/w": "v"})


@pytest.mark.few(6)
@pytest.mark.parametrize("on_devices", [True, False])
@pytest.mark.parametrize(
    ("value", "saved", "wanted"),
    [
        (-1, "int32", "uint32"),
        (4000000000, "uint32", "int32"),
        (-1, "int8", "uint8"),
        (-1, "int8", "uint32"),
        (200, "uint8", "int8"),
        (2, "int8", "int2"),
        (-1, "int4", "uint8"),
        (2**15, "int32", "int16"),
        (1000.0, "float32", "float4_e2m1fn"),
        (7.0, "bfloat16", "float4_e2m1fn"),
        (1000.0, "float32", "float8_e4m3fn"),
        (1e30, "float32", "float16"),
        (65536.0, "bfloat16", "float16"),
        (-1e30, "bfloat16", "float16"),
        (np.nan, "float32", "float4_e2m1fn"),
        (np.inf, "float32", "float4_e2m1fn"),
        (-np.inf, "float32", "float8_e4m3fn"),
        (-1.0, "float32", "float8_e8m0fnu"),
    ],
)
def test_values_out_of_the_range_of_a_dtype(
    tmp_path: Path, value: float, saved: str, wanted: str, on_devices: bool
) -> None:
    array = np.array([1, value]).astype(saved)
    like: Any = shape(2, dtype=wanted) if on_devices else np.zeros(2, wanted)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": array})
        with pytest.raises(CheckpointError, match=rf"w: {saved}\[2\] has values that {wanted} cannot hold"):
            checkpoints.restore(like={"w": like}, allow_cast=True)


@pytest.mark.parametrize(
    ("value", "saved", "wanted"),
    [
        (1e300, "float64", "float32"),
        (-1e300j, "complex128", "complex64"),
        (-1, "int64", "uint64"),
        (2**63, "uint64", "int64"),
        (2**32, "int64", "uint32"),
    ],
)
def test_wide_host_values_out_of_the_range_of_a_dtype(tmp_path: Path, value: Any, saved: str, wanted: str) -> None:
    """x64 is disabled; if it were enabled, JAX would not truncate the values."""
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, {"v": np.array([value], saved), "w": np.array(value, saved)[()]})
        for name, like in {"v": np.zeros(1, wanted), "w": np.zeros((), wanted)[()]}.items():
            with pytest.raises(CheckpointError, match=f"has values that {wanted} cannot hold"):
                checkpoints.restore(like={name: like}, allow_cast=True, partial=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("on_devices", [True, False])
@pytest.mark.parametrize(
    ("values", "saved", "wanted"),
    [
        ([127, 0], "uint8", "int8"),
        ([2**31 - 1, 0], "uint32", "int32"),
        ([2**31 - 1, 0], "int32", "uint32"),
        ([-128, 127], "int32", "int8"),
        ([-1, 1], "int4", "int32"),
        ([6.0, -6.0], "float32", "float4_e2m1fn"),
        ([65504.0, -65504.0], "float32", "float16"),
        ([448.0, np.nan], "float32", "float8_e4m3fn"),
        ([np.inf, np.nan], "float32", "float8_e5m2"),
        ([-np.inf, 3.38e38], "bfloat16", "float32"),
        ([1 + 2j, np.inf], "complex64", "complex64"),
    ],
)
def test_values_up_to_the_limits_of_a_dtype(
    tmp_path: Path, values: list[Any], saved: str, wanted: str, on_devices: bool
) -> None:
    array = np.array(values).astype(saved)
    like: Any = shape(2, dtype=wanted) if on_devices else np.zeros(2, wanted)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": array})
        restored = checkpoints.restore(like={"w": like}, allow_cast=True)["w"]
    assert restored.dtype == wanted
    np.testing.assert_array_equal(np.asarray(restored).astype(complex), array.astype(wanted).astype(complex))
