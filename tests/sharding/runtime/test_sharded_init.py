"""`step.init`: state that is created sharded, and errors that name how it differs from the planned state."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from autoshard import auto_shard
from autoshard.errors import PlanError
from tests.sharding.programs import assert_close, batch, device_bytes, mlp_loss, mlp_state, sgd_step, whole_bytes

OPTIMIZER = optax.adam(1e-2)


def two_state_step(params, x, moments):
    loss, gradients = jax.value_and_grad(mlp_loss)(params, x)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return optax.apply_updates(params, updates), loss, moments


def test_several_state_arguments_are_created_together_or_one_by_one():
    shapes = jax.eval_shape(mlp_state)
    example = (shapes, batch(), jax.eval_shape(OPTIMIZER.init, shapes))
    step = auto_shard(two_state_step, plan="fsdp:8", example=example, donate_argnums=(0, 2))

    def create():
        params = mlp_state()
        return params, OPTIMIZER.init(params)

    params, moments = step.init(create)
    planned = step.plan(*example).in_specs
    for made, specs in ((params, planned[0]), (moments, planned[2])):
        assert jax.tree.map(lambda x: x.sharding.spec, made) == specs
    alone = step.init(OPTIMIZER.init, params)
    assert jax.tree.map(lambda x: x.sharding, alone) == jax.tree.map(lambda x: x.sharding, moments)
    expected = two_state_step(*(create()[0], batch(), create()[1]))
    assert_close(expected, step(params, batch(), moments))


def test_nnx_objects_are_created_as_their_step_was_planned_from_shapes():
    def create(seed):
        rngs = nnx.Rngs(seed)
        model = nnx.Sequential(
            nnx.Linear(64, 128, rngs=rngs), nnx.Dropout(0.1, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)
        )
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def train_step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    step = auto_shard(train_step, plan="fsdp:8")
    plan = step.plan(*nnx.eval_shape(lambda: create(0)), batch())
    state, expected = step.init(create, 0), create(0)
    for part in (nnx.state(state[0], nnx.Param), state[1].opt_state[0].mu, state[1].opt_state[0].nu):
        assert device_bytes(part) * 8 == whole_bytes(part)
    for _ in range(3):
        assert_close(train_step(*expected, batch()), step(*state, batch()))
    assert_close(nnx.state(expected, nnx.Param), nnx.state(state, nnx.Param))
    assert step.plan(*state, batch()) is plan


OTHER = {
    "missing": (lambda: {k: v for k, v in mlp_state().items() if k != "b"}, r"'params/b' float32\[128\] is missing"),
    "new": (lambda: mlp_state() | {"c": jnp.ones(3)}, r"'params/c' float32\[3\] is new"),
    "shape": (lambda: mlp_state() | {"b": jnp.ones(3)}, r"'params/b' is float32\[3\], planned float32\[128\]"),
    "dtype": (
        lambda: mlp_state() | {"b": jnp.ones(128, "bfloat16")},
        r"'params/b' is bfloat16\[128\], planned float32\[128\]",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_state_than_the_planned_one_is_named(name):
    create, difference = OTHER[name]
    step = auto_shard(sgd_step, example=(mlp_state(), batch()))
    with pytest.raises(
        PlanError, match=f"init: .* none of the planned .* most similar one is 'params', but {difference}. Return"
    ):
        step.init(create)
