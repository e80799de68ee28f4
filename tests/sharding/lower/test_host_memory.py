"""Values in host memory stay where the program puts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.export import deserialize
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from autoshard import Plan, auto_shard, plan
from autoshard.ckpt import Checkpointer
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import bound_or_error

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
PLANS = ("dp:8", "fsdp:8", "fsdp:4 tp:2")
ADAM = optax.adam(1e-2)


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def on_host(tree: Any) -> Any:
    """Puts arrays into host memory, as a user does who has one device."""
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.tree.map(lambda x: jax.device_put(x, place) if x.ndim else x, tree)


def parameters() -> dict[str, jax.Array]:
    up, down = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(up, (16, 64)) / 4, "down": jax.random.normal(down, (64, 16)) / 8}


def batch() -> tuple[jax.Array, jax.Array]:
    x, y = jax.random.split(jax.random.key(1))
    return jax.random.normal(x, (32, 16)), jax.random.normal(y, (32, 16))


def loss_of(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def offloaded_step(params: Any, moments: Any, batch: Any) -> Any:
    """A step with the optimizer's state in host memory: the step brings it to the device and back."""
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    here = jax.tree.map(lambda x: jax.device_put(x, DEVICE) if x.ndim else x, moments)
    updates, here = ADAM.update(grads, here, params)
    back = jax.tree.map(lambda x: jax.device_put(x, HOST) if x.ndim else x, here)
    return optax.apply_updates(params, updates), back, loss


@pytest.mark.few(1)
@pytest.mark.parametrize("words", PLANS)
def test_state_in_host_memory_stays_there(words: str) -> None:
    params, data = parameters(), batch()
    moments = on_host(ADAM.init(params))
    want = params, moments
    for _ in range(2):
        *want, want_loss = jax.jit(offloaded_step)(*want, data)
    step = auto_shard(offloaded_step, plan=words)
    state = params, moments
    for _ in range(2):
        *state, loss = step(*state, data)
    assert kinds(state[1]) == kinds(want[1]) == {"pinned_host"} and kinds(state[0]) == {"device"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tuple(state), tuple(want))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    made = step.plan(params, moments, data)
    whole = sum(x.nbytes for x in jax.tree.leaves(moments) if x.ndim)
    shards = 8 if "fsdp" in words else 1
    assert made.estimate.host_memory_bytes == 2 * whole / shards  # the old state and the new one
    donated = auto_shard(offloaded_step, plan=words, donate_argnums=(0, 1)).plan(params, moments, data)
    assert donated.estimate.host_memory_bytes == whole / shards
    assert made.estimate.memory_bytes["optimizer"] < 100
    assert "memory by kind: device" in str(made)
    assert Plan.from_json(made.to_json()).inputs == made.inputs


def test_state_that_comes_from_the_host_is_sharded_as_it_is_stored() -> None:
    """On the device, the moments take an eighth of their bytes while they are updated."""
    shapes = {"up": jax.ShapeDtypeStruct((256, 1024), "float32"), "down": jax.ShapeDtypeStruct((1024, 256), "float32")}
    rows = jax.ShapeDtypeStruct((32, 256), "float32")
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    moments = jax.eval_shape(ADAM.init, shapes)
    waiting = jax.tree.map(lambda x: x.update(sharding=place) if x.ndim else x, moments)
    found = plan(offloaded_step, shapes, waiting, (rows, rows), plan="fsdp:8").estimate
    moments_bytes = sum(x.size * 4 for x in jax.tree.leaves(moments) if x.ndim)
    assert found.memory_bytes["temporary"] < moments_bytes / 2


def test_a_plan_from_shapes_in_host_memory(mesh8: Mesh) -> None:
    params, data = parameters(), batch()
    place = NamedSharding(mesh8, P(), memory_kind="pinned_host")
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place if x.ndim else None), ADAM.init(params)
    )
    step = auto_shard(offloaded_step, plan="fsdp:8")
    made = step.plan(params, shapes, data)
    assert {leaf.memory_kind for leaf in made.inputs if leaf.role == "optimizer" and leaf.shape} == {"pinned_host"}
    moments = step.init(ADAM.init, params)
    assert kinds(moments) == {"pinned_host"}
    _, moments, loss = step(params, moments, data)
    assert kinds(moments) == {"pinned_host"} and np.isfinite(loss)
    assert step.lower(params, shapes, data).compile() is not None
    on_device = made.jit()(params, step.init(ADAM.init, params), data)
    np.testing.assert_allclose(on_device[2], loss)


def test_another_memory_is_another_plan() -> None:
    step = auto_shard(lambda x: x * 2)
    x = jnp.arange(16.0).reshape(8, 2)
    assert kinds(step(x)) == {"device"}
    assert kinds(step(on_host(x))) == {"pinned_host"}
    assert kinds(step(x)) == {"device"}


def test_a_device_put_with_a_sharding(mesh8: Mesh) -> None:
    place = NamedSharding(mesh8, P("data"), memory_kind="pinned_host")
    step = auto_shard(lambda x: (jax.device_put(x * 2, place), x + 1))
    x = jnp.arange(16.0).reshape(8, 2)
    kept, plain = step(x)
    assert kinds(kept) == {"pinned_host"} and kinds(plain) == {"device"}
    np.testing.assert_array_equal(kept, x * 2)


def test_a_value_visits_host_memory_that_a_sharding_names(mesh8: Mesh) -> None:
    """It is no result, so only the `device_put` of the program says where it is."""

    def step(x: jax.Array) -> jax.Array:
        waiting = jax.device_put(x * 2, NamedSharding(mesh8, P("data"), memory_kind="pinned_host"))
        return jax.device_put(waiting, NamedSharding(mesh8, P("data"), memory_kind="device")) + 1

    x = jnp.arange(16.0).reshape(8, 2)
    np.testing.assert_array_equal(plan(step, x).jit()(x), x * 2 + 1)
    for_tpu = plan(step, x, target="v5e:2x4")
    text = deserialize(bytearray(export_plan(bound_or_error(for_tpu.bound).executable).program)).mlir_module()
    assert 'buffer_placement = "pinned_host"' in text


def test_arithmetic_with_both_memories_is_refused() -> None:
    step = auto_shard(lambda state, x: state["mean"] + x, plan="dp:8")
    with pytest.raises(PlanError, match=r"combines values in host memory with values in device .*\n?.*'state/mean'"):
        step({"mean": on_host(jnp.ones((8, 2)))}, jnp.ones((8, 2)))


def layers(params: Any, batch: Any, policy: Any) -> jax.Array:
    x, y = batch

    def layer(h: jax.Array, w: Any) -> Any:
        h = checkpoint_name(jnp.tanh(h @ w["up"]), "hidden")
        return h @ w["down"], None

    h, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)
    return jnp.mean((h - y) ** 2)


def policy(memory: str) -> Any:
    names = {"host": ([], ["hidden"]), "device": (["hidden"], [])}[memory]
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=names[0], names_which_can_be_offloaded=names[1],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip


def test_offloaded_activations_take_host_memory() -> None:
    params = {"up": jnp.ones((4, 16, 64)) / 16, "down": jnp.ones((4, 64, 16)) / 64}
    grad = lambda memory: jax.value_and_grad(lambda p, b: layers(p, b, policy(memory)))  # noqa: E731
    data = batch()
    made = {m: plan(grad(m), params, data, plan="dp:8") for m in ("host", "device")}
    kept = 4 * 32 * 64 * 4 / 8  # of four layers, on one device
    assert made["host"].estimate.host_memory_bytes == kept  # each layer's value is moved straight into the stack
    assert made["device"].estimate.host_memory_bytes == 0
    saved = made["device"].estimate.peak_memory_bytes - made["host"].estimate.peak_memory_bytes
    assert kept * 0.7 <= saved <= kept
    want = jax.jit(grad("device"))(params, data)
    got = made["host"].jit()(params, data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)
    for_tpu = plan(grad("host"), params, data, plan="dp:8", target="v5e:2x4")
    text = deserialize(bytearray(export_plan(bound_or_error(for_tpu.bound).executable).program)).mlir_module()
    assert 'buffer_placement = "pinned_host"' in text and 'buffer_placement = "device"' in text


def test_plain_plans_do_not_mention_memory() -> None:
    made = plan(loss_of, parameters(), batch(), plan="dp:8")
    assert isinstance(made, ShardingPlan) and "memory_kind" not in made.to_json() and "by kind" not in str(made)


def create_on_host() -> Any:
    params = parameters()
    moments = ADAM.init(params)
    return params, jax.tree.map(lambda x: jax.device_put(x, HOST) if x.ndim else x, moments)


def test_init_keeps_the_memory_spaces_of_what_it_creates() -> None:
    """Shapes of `jax.eval_shape` have no memory space, so the plan has the moments in device memory."""
    params, moments = jax.eval_shape(create_on_host)
    step = auto_shard(offloaded_step, plan="fsdp:8", donate_argnums=(0, 1))
    blind = step.plan(params, moments, batch())
    with pytest.warns(AutoshardWarning, match=r"create_on_host puts 'moments/0/mu/down'.* into host .*pinned_host"):
        state = step.init(create_on_host)
    assert kinds(state[1]) == {"pinned_host"} and kinds(state[0]) == {"device"}
    assert state[1][0].mu["up"].sharding.spec == blind.in_specs[1][0].mu["up"] != P()
    *state, _ = step(*state, batch())
    assert kinds(state[1]) == {"pinned_host"}
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    on_host = jax.tree.map(lambda x: x.update(sharding=place) if x.ndim else x, moments)
    assert step.plan(params, on_host, batch()).estimate.host_memory_bytes > 0
    again = step.init(create_on_host)  # without a warning
    assert kinds(again[1]) == {"pinned_host"}
    want = jax.jit(offloaded_step)(*create_on_host(), batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tuple(state), tuple(want[:2]))


def test_a_checkpoint_is_restored_into_the_memory_of_the_plan(tmp_path: Path) -> None:
    params, moments = create_on_host()
    shardings = plan(offloaded_step, params, moments, batch(), plan="fsdp:8").in_shardings()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, (params, moments), block=True)
        shapes = jax.eval_shape(create_on_host)
        restored = checkpoints.restore(like=shapes, shardings=shardings[:2])
    assert kinds(restored[0]) == {"device"} and kinds(restored[1]) == {"pinned_host"}
    assert restored[1][0].mu["up"].sharding == shardings[1][0].mu["up"]
