"""Arrays that were donated and are passed again: an error with their paths, before JAX runs on them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from autoshard import auto_shard, plan
from autoshard.errors import PlanError
from tests.sharding.programs import batch, mlp_state, sgd_step


def test_a_donated_state_that_is_used_again_is_named():
    step = auto_shard(sgd_step, donate_argnums=0, plan="dp:8")
    state, _ = step(mlp_state(), batch())
    step(state, batch())
    for again in (step, auto_shard(sgd_step)):  # the second has no plan yet
        with pytest.raises(
            PlanError,
            match="arguments 'params/b', 'params/v', 'params/w' were donated to an earlier call, which reused",
        ):
            again(state, batch())


def test_a_large_state_that_is_used_again_is_named_as_a_whole():
    step = auto_shard(lambda state, x: ([w + x for w in state], x), donate_argnums=0, plan="dp:8")
    state, x = [jnp.full(8, float(i)) for i in range(9)], jnp.ones(8)
    again, _ = step(state, x)
    step(again, x)
    with pytest.raises(PlanError, match=r"argument 'state' \(9 arrays\) was donated to an earlier call"):
        step(again, x)
    with pytest.raises(PlanError, match=r"arguments 'state/1', .* 'state/6' and 2 more were donated"):
        step([jnp.ones(8), *again[1:]], x)


def test_a_donated_batch_that_is_used_again_is_named():
    double = auto_shard(lambda scale, data: {"x": data["x"] * scale}, donate_argnums=1, plan="dp:8")
    data = double(2.0, {"x": batch()})
    double(2.0, data)
    with pytest.raises(PlanError, match="argument 'data/x' was donated"):
        double(2.0, data)


def test_a_donated_array_is_refused_by_the_jitted_plan_too():
    run = plan(sgd_step, mlp_state(), batch(), plan="dp:8", donate_argnums=0).jit()
    state, _ = run(mlp_state(), batch())
    run(state, batch())
    with pytest.raises(PlanError, match="arguments 'params/b', 'params/v', 'params/w' were donated"):
        run(state, batch())


def test_variables_of_nnx_objects_are_named():
    @auto_shard(plan="dp:8")
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    model.kernel[...].delete()
    with pytest.raises(PlanError, match="argument 'model/kernel' was donated"):
        step(model, optimizer, jnp.asarray(batch()))
    assert jax.device_count() == 8
