"""Saving and restoring every type of leaf on any mesh, bit for bit."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from autoshard.ckpt import Checkpointer, CheckpointError
from autoshard.ckpt.state import snapshot


@pytest.mark.few(1)
@pytest.mark.parametrize("block", [False, True])
def test_every_kind_of_leaf(
    tmp_path: Path, mesh8: Mesh, make_state: Any, abstract: Any, assert_same: Any, config: Any, block: bool
) -> None:
    state = make_state(mesh8)
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(3, state, config=config, block=block)
        checkpoints.wait()
        assert checkpoints.steps() == [3] and checkpoints.latest() == 3
        assert checkpoints.config() == checkpoints.config(3) == config
        assert checkpoints.verify() == []
        restored = checkpoints.restore(like=abstract(state), config=config)
        assert checkpoints.restored is not None and checkpoints.restored.step == 3
    assert_same(restored, state)
    for actual, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        if isinstance(want, jax.Array):
            assert actual.sharding.is_equivalent_to(want.sharding, want.ndim)
    assert jax.random.bits(restored["typed"]) == jax.random.bits(state["typed"])


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(4, 1), (1, 1), (1, 8), (8, 1), (1, 2)], ids=str)
def test_onto_another_mesh(
    tmp_path: Path, mesh8: Mesh, mesh_of: Any, make_state: Any, abstract: Any, assert_same: Any,
    shape: tuple[int, int],
) -> None:  # fmt: skip
    state = make_state(mesh8)
    template = abstract(make_state(mesh_of(data=shape[0], model=shape[1])))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, config={})
        restored = checkpoints.restore(like=template)
    assert_same(restored, state)
    assert restored["params"]["w"].sharding == template["params"]["w"].sharding
    assert len(restored["params"]["w"].sharding.device_set) == shape[0] * shape[1]


def test_without_shardings_onto_one_device(tmp_path: Path, mesh8: Mesh, make_state: Any, assert_same: Any) -> None:
    state = make_state(mesh8)
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf,
        state,
    )
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, config={})
        restored = checkpoints.restore(like=template)
    assert_same(restored, state)
    assert restored["params"]["w"].sharding == SingleDeviceSharding(jax.local_devices()[0])


@jax.tree_util.register_dataclass
@dataclass
class Loop:
    model: Any
    opt_state: Any
    rng: jax.Array
    step: jax.Array


def test_dataclasses_nnx_and_optax(tmp_path: Path, assert_same: Any) -> None:
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    _, model_state = nnx.split(model)
    state = Loop(model_state, nnx.state(optimizer), jax.random.key(0), jnp.int32(1))
    plain = TrainState.create(apply_fn=abs, params={"w": jnp.ones((4, 4))}, tx=optax.adam(1e-3))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, (state, plain), config={})
        assert_same(checkpoints.restore(like=(state, plain)), (state, plain))


def test_explicit_axes(tmp_path: Path, assert_same: Any) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    state = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("x")))}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, config={})
        restored = checkpoints.restore(like=state)
    assert_same(restored, state)
    assert restored["w"].sharding == state["w"].sharding


def test_a_single_array_as_state(tmp_path: Path, assert_same: Any) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, jnp.arange(5), config={})
        assert_same(checkpoints.restore(like=jnp.zeros(5, jnp.int32)), jnp.arange(5))


def test_the_newest_steps_are_kept(tmp_path: Path) -> None:
    def state(step: int) -> dict[str, jax.Array]:
        return {"w": jnp.full(4, step, jnp.float32)}

    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (1, 5, 20, 100):
            checkpoints.save(step, state(step), config={"step": step})
        checkpoints.wait()
        assert checkpoints.steps() == [20, 100]
        assert checkpoints.restore(like=state(0), step=20)["w"][0] == 20
        assert checkpoints.config(20) == {"step": 20}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "autoshard.json", "step_00000020", "step_00000100"
    ]  # fmt: skip
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        checkpoints.save(101, state(101), config={}, block=True)
        assert checkpoints.steps() == [20, 100, 101]


def test_plain_orbax_reads_the_arrays(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.arange(4.0)}}, config={"a": 1}, block=True)
    loaded = ocp.load_checkpointables(str(tmp_path / "step_00000001"))["state"]
    np.testing.assert_array_equal(loaded["params"]["w"], np.arange(4.0))


def test_each_replica_writes_its_share(tmp_path: Path, mesh8: Mesh) -> None:
    """Each of eight devices writes an eighth of an array, however many replicas there are."""
    specs = {"whole": (), "halves": ("data",), "pieces": ("data", "model")}
    state = {
        name: jax.device_put(np.ones((64, 32)), NamedSharding(mesh8, PartitionSpec(*specs[name]))) for name in specs
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, block=True)
    metadata = ocp.checkpointables_metadata(str(tmp_path / "step_00000000")).metadata["state"]
    written = {name: np.prod(metadata[name].storage_metadata.write_shape) for name in specs}
    assert written == dict.fromkeys(specs, 64 * 32 / 8)


def test_the_manifest_has_versions_and_devices(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, config={}, block=True)
    text = (tmp_path / "step_00000001" / "_CHECKPOINT_METADATA").read_text()
    body = json.loads(text)["custom_metadata"]["autoshard"]
    assert body["written_by"]["devices"] == 8 and body["written_by"]["versions"]["jax"] == jax.__version__


@pytest.mark.slow
def test_eight_devices_to_four_to_one_in_fresh_processes(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    """Each process has a different number of devices, as on another machine."""
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={count}"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from autoshard.ckpt import Checkpointer
assert jax.device_count() == {count}
mesh = Mesh(np.array(jax.devices()).reshape(-1, {model}), ("data", "model"))
make = jax.jit(lambda key: dict(w=jax.random.normal(key, (16, 24)), key=key), out_shardings=dict(
    w=NamedSharding(mesh, P("model", "data")), key=NamedSharding(mesh, P())))
state = make(jax.random.key(0))
with Checkpointer({path!r}) as checkpoints:
    if not checkpoints.steps():
        checkpoints.save(0, state, config=dict(model=1))
    restored = checkpoints.restore(0, state, config=dict(model=1))
assert restored["w"].sharding == state["w"].sharding
print(np.asarray(restored["w"]).tobytes().hex(), jax.random.key_data(restored["key"]).tolist())
"""
    shapes = [(8, 2), (4, 4), (1, 1)]
    outputs = [run_python(code.format(count=count, model=model, path=str(tmp_path / "run"))) for count, model in shapes]
    assert [output.returncode for output in outputs] == [0, 0, 0], [output.stderr[-2000:] for output in outputs]
    assert len({output.stdout for output in outputs}) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("block", [False, True])
def test_leaves_in_host_memory(tmp_path: Path, mesh8: Mesh, assert_same: Any, block: bool) -> None:
    """The template determines the memory kind of a restored leaf, whatever it was when the leaf was saved."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    shardings = {
        "sharded": NamedSharding(mesh8, PartitionSpec("data", "model"), memory_kind="pinned_host"),
        "whole": NamedSharding(mesh8, PartitionSpec(), memory_kind="pinned_host"),
        "one": SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
        "on_device": NamedSharding(mesh8, PartitionSpec("data")),
    }
    state = {name: jax.device_put(values, sharding) for name, sharding in shardings.items()}
    on_device = {
        name: jax.device_put(values, sharding.with_memory_kind("device")) for name, sharding in shardings.items()
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, block=block)
        checkpoints.save(1, on_device, block=block)
        checkpoints.wait()
        assert checkpoints.verify(0) == checkpoints.verify(1) == []
        for step in (0, 1):
            for template in (state, on_device):
                restored = checkpoints.restore(step, template)
                assert_same(restored, state)
                assert {name: leaf.sharding for name, leaf in restored.items()} == {
                    name: leaf.sharding for name, leaf in template.items()
                }
            for name, leaf in state.items():
                single = checkpoints.restore(step, {name: leaf}, partial=True)[name]
                assert single.sharding.memory_kind == leaf.sharding.memory_kind
                np.testing.assert_array_equal(single, values)


@pytest.mark.parametrize("dtype", ["uint2", "uint4", "float8_e4m3", "float6_e2m3fn", "longdouble", "clongdouble"])
def test_the_error_names_leaves_that_cannot_be_written(tmp_path: Path, dtype: str) -> None:
    leaf = np.ones(3, getattr(ml_dtypes, dtype, dtype))
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=f"1 leaves(?s:.*)params/w: {leaf.dtype}"):
            checkpoints.save(0, {"params": {"w": leaf, "b": np.ones(3)}})
        assert checkpoints.steps() == []
        checkpoints.save(1, {"params": {"w": leaf[:0], "b": np.ones(3)}}, block=True)


def test_all_writable_dtypes(tmp_path: Path, assert_same: Any) -> None:
    state = {name: np.array([1, 0, 1]).astype(getattr(ml_dtypes, name, name)) for name in snapshot._WRITABLE}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        assert_same(checkpoints.restore(like=state), state)
