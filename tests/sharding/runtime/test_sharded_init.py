"""`step.init`: state that is created sharded, and errors that name how it differs from the planned state."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard import auto_shard
from autoshard.errors import PlanError
from tests.sharding.programs import assert_close, batch, mlp_loss, mlp_state, sgd_step

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
