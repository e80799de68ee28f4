"""`Plan.jit()`: it is called as the function itself, and other arguments than the planned ones are an error."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard, plan
from autoshard.errors import PlanError
from tests.sharding.programs import assert_close, batch, mlp_state, sgd_step

X = jax.ShapeDtypeStruct((32, 64), "float32")
MASK = jax.ShapeDtypeStruct((32,), "float32")


def scaled_step(state, x, *, scale):
    return sgd_step(state, x * scale)


def masked_step(state, data):
    x = data["x"] if data["mask"] is None else data["x"] * data["mask"][:, None]
    return sgd_step(state, x)


def test_keyword_arguments_are_passed_by_keyword():
    run = plan(scaled_step, mlp_state(), X, scale=jax.ShapeDtypeStruct((), "float32")).jit()
    expected = scaled_step(mlp_state(), batch(), scale=2.0)
    assert_close(expected, run(mlp_state(), batch(), scale=jnp.float32(2)))
    assert_close(expected, run(mlp_state(), batch(), scale=2.0))  # weakly typed, but planned as float32
    assert_close(expected, run(x=batch(), scale=2.0, state=mlp_state()))
    assert "sdy.mesh" in run.lower(mlp_state(), batch(), scale=jnp.float32(2)).as_text()
    with pytest.raises(PlanError, match=r"scaled_step: .*'scale' float32\[\] is missing; '2/scale' .* is new"):
        run(mlp_state(), batch(), {"scale": jnp.float32(2)})


@pytest.mark.parametrize("planned", ["by position", "by keyword"])
def test_arguments_can_be_passed_in_both_ways(planned):
    run = (plan(sgd_step, mlp_state(), X) if planned == "by position" else plan(sgd_step, mlp_state(), x=X)).jit()
    expected = sgd_step(mlp_state(), batch())
    assert_close(expected, run(mlp_state(), batch()))
    assert_close(expected, run(mlp_state(), x=batch()))


OTHER = {
    "None": ({"x": batch(), "mask": None}, r"'data/mask' is None, planned float32\[32\]"),
    "shape": (
        {"x": batch(size=16), "mask": jnp.ones(16)},
        r"'data/mask' is float32\[16\], planned float32\[32\]; 'data/x' is",
    ),
    "dtype": (
        {"x": jnp.ones((32, 64), jnp.bfloat16), "mask": jnp.ones(32)},
        r"'data/x' is bfloat16\[32,64\], planned flo",
    ),
    "missing": ({"x": batch()}, r"'data/mask' float32\[32\] is missing"),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_arguments_than_the_planned_ones_are_named(name):
    data, message = OTHER[name]
    planned = plan(masked_step, mlp_state(), {"x": X, "mask": MASK}, plan="dp:8")
    with pytest.raises(PlanError, match=f"masked_step: the arguments are not those of the plan: {message}"):
        planned.jit()(mlp_state(), data)
    if name == "None":  # the function has another program for it
        with pytest.raises(PlanError, match=r"has 5 inputs, this function 4: 'data/mask' float32\[32\] is missing"):
            auto_shard(masked_step, plan=planned)(mlp_state(), data)
        assert_close(masked_step(mlp_state(), data), auto_shard(masked_step, plan="dp:8")(mlp_state(), data))


def noisy(w, key):
    return w + jax.random.normal(jax.device_put(key, jax.memory.Space.Device), w.shape)


def test_arguments_in_other_places_than_the_planned_ones_are_named():
    planned = plan(sgd_step, mlp_state(), X, plan="tp:8")
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    rows = Mesh(jax.devices(), ("rows",))
    for place, text in (
        (jax.devices()[3], r"'params/w' is on cpu:3, planned P\(None, 'tp'\) on mesh {'tp': 8}\. Move"),
        (NamedSharding(rows, P("rows")), r"'params/w' is P\('rows',\) on mesh {'rows': 8}, planned"),
        (host, "'params/w' is on cpu:0 in pinned_host memory, planned"),
    ):
        moved = mlp_state() | {"w": jax.device_put(mlp_state()["w"], place)}
        for use in (planned.jit(), planned.jit().lower):
            with pytest.raises(PlanError, match=f"sgd_step: {text}"):
                use(moved, batch())
        arguments = jax.device_put((moved, batch()), planned.in_shardings())
        assert_close(sgd_step(mlp_state(), batch()), planned.jit()(*arguments))


def test_a_random_key_in_host_memory():
    key = jax.device_put(jax.random.key(0), SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    planned = plan(noisy, jnp.ones((32, 8)), key)
    with pytest.raises(PlanError, match=r"'key' is on cpu:0 in pinned_host .*, planned P\(\) on mesh .*in pinned_host"):
        planned.jit()(jnp.ones((32, 8)), key)
    arguments = jax.device_put((jnp.ones((32, 8)), key), planned.in_shardings())
    assert arguments[1].sharding.memory_kind == "pinned_host"
    assert_close(noisy(jnp.ones((32, 8)), jax.random.key(0)), planned.jit()(*arguments))
