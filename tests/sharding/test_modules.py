"""`auto_shard` on module classes, nnx and linen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from autoshard import auto_shard
from autoshard.errors import AutoshardWarning
from autoshard.sharding.plan import PlanError
from tests.sharding.programs import assert_close, batch, device_bytes, whole_bytes


def nnx_class() -> Any:
    class Net(nnx.Module):
        def __init__(self, width, hidden, *, rngs):
            self.up = nnx.Linear(width, hidden, rngs=rngs)
            self.norm = nnx.BatchNorm(hidden, rngs=rngs)
            self.down = nnx.Linear(hidden, width, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.norm(self.up(x))))

    return Net


def linen_class() -> Any:
    class Net(linen.Module):
        hidden: int = 128

        @linen.compact
        def __call__(self, x, train=False):
            x = linen.relu(linen.Dense(self.hidden)(x))
            return linen.Dense(64)(linen.Dropout(0.1, deterministic=not train)(x))

    return Net


def test_an_nnx_class_is_changed_in_place_and_born_sharded():
    plain = nnx_class()(64, 128, rngs=nnx.Rngs(0))
    expected = plain(batch())
    cls = nnx_class()
    sharded_class = auto_shard(plan="fsdp:8")(cls)
    assert sharded_class is cls and cls.__name__ == "Net"
    rngs = nnx.Rngs(0)
    model = cls.sharded(64, 128, rngs=rngs, example=(batch(),))
    assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))
    assert cls.autoshard_plan.chosen == "fsdp:8"
    assert_close(expected, model(batch()))
    assert_close(nnx.state(plain, nnx.BatchStat), nnx.state(model, nnx.BatchStat))
    second = cls.sharded(64, 128, rngs=rngs, example=(batch(),))  # the streams have moved on
    assert not np.allclose(second.up.kernel[...], model.up.kernel[...])


def test_a_plainly_made_nnx_module_is_resharded_at_its_first_call():
    expected = nnx_class()(64, 128, rngs=nnx.Rngs(0))(batch())
    cls = auto_shard(nnx_class(), plan="fsdp:8")
    model = cls(64, 128, rngs=nnx.Rngs(0))
    assert device_bytes(nnx.state(model)) == whole_bytes(nnx.state(model))
    assert_close(expected, model(batch()))
    assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))


def test_a_first_call_under_a_trace_only_constrains_and_says_so():
    plain = nnx_class()(64, 128, rngs=nnx.Rngs(0))
    model = auto_shard(nnx_class(), plan="dp:8")(64, 128, rngs=nnx.Rngs(0))

    @nnx.jit
    def gradients(model, x):
        return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

    with pytest.warns(AutoshardWarning, match="first called under somebody's trace"):
        found = gradients(model, batch())
    assert_close(gradients(plain, batch()), found)


def test_inside_a_planned_step_the_step_rules():
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def make(cls):
        model = cls(64, 128, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    cls = auto_shard(nnx_class(), plan="dp:8")
    (plain, plain_optimizer), (model, optimizer) = make(nnx_class()), make(cls)
    sharded = auto_shard(step, plan="tp:8")
    for seed in range(2):
        expected = nnx.jit(step)(plain, plain_optimizer, batch(seed))
        np.testing.assert_allclose(sharded(model, optimizer, batch(seed)), expected, rtol=1e-5)
    assert cls.autoshard_plan is None  # its own plan was never made
    assert_close(nnx.state(plain, nnx.Param), nnx.state(model, nnx.Param))


def test_a_linen_class_plans_at_init():
    plain, cls = linen_class()(), auto_shard(linen_class(), plan="fsdp:8")
    expected = plain.init(jax.random.key(0), batch())
    variables = cls().init(jax.random.key(0), batch())
    assert jax.tree.structure(variables) == jax.tree.structure(expected)  # the class kept its name
    assert_close(expected, variables, 1e-6)
    assert device_bytes(variables) * 8 == whole_bytes(variables)
    assert_close(plain.apply(expected, batch()), cls().apply(variables, batch()))
    keys = {"dropout": jax.random.key(1)}
    assert_close(
        plain.apply(expected, batch(), train=True, rngs=keys), cls().apply(variables, batch(), train=True, rngs=keys)
    )


def test_what_is_no_module_is_refused():
    with pytest.raises(PlanError, match="class int"):
        auto_shard(int)
    with pytest.raises(PlanError, match="function or a Flax module class"):
        auto_shard(3)  # pyright: ignore[reportArgumentType]
