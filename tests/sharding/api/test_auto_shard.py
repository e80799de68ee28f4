"""`auto_shard` on functions: its arguments, the attributes it keeps, and results equal to those of one device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from autoshard import auto_shard, operator, plan
from autoshard.errors import PlanError
from autoshard.spmdrules.core import registry
from tests.sharding.programs import (
    OPTIMIZER,
    adamw_step,
    assert_close,
    batch,
    device_bytes,
    mlp_loss,
    mlp_state,
    sgd_step,
    whole_bytes,
)

STRATEGIES = [None, "dp:8", "zero1:8", "fsdp:8", "tp:8", "dp:2 fsdp:2 tp:2", "fsdp:2 tp:4 state"]


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_train_step_computes_what_one_device_does(strategy):
    state = (mlp_state(), OPTIMIZER.init(mlp_state()))
    step = auto_shard(adamw_step, plan=strategy)
    expected, actual = state, state
    for seed in range(3):
        expected, loss = jax.jit(adamw_step)(expected, batch(seed))
        actual, sharded_loss = step(actual, batch(seed))
        np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    assert_close(expected[0], actual[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_equal_those_of_one_device(strategy):
    gradients = auto_shard(jax.grad(mlp_loss), plan=strategy)(mlp_state(), batch())
    assert_close(jax.grad(mlp_loss)(mlp_state(), batch()), gradients)


def test_the_decorator_works_with_and_without_arguments_and_keeps_the_function():
    @auto_shard
    def bare(params, x):
        """Docs."""
        return mlp_loss(params, x)

    @auto_shard(plan="dp:8")
    def called(params, x):
        return mlp_loss(params, x)

    assert bare.__wrapped__(mlp_state(), batch()) == mlp_loss(mlp_state(), batch())
    assert (bare.__name__, bare.__doc__) == ("bare", "Docs.")
    np.testing.assert_allclose(bare(mlp_state(), batch()), called(mlp_state(), batch()), rtol=1e-6)
    assert called.plan(mlp_state(), batch()).chosen == "dp:8"


def test_state_is_sharded_and_keeps_its_sharding():
    step = auto_shard(adamw_step, plan="fsdp:8", donate_argnums=0)
    shapes = jax.eval_shape(lambda: (mlp_state(), OPTIMIZER.init(mlp_state())))
    step.plan(shapes, batch())
    state = step.init(lambda seed: (mlp_state(), OPTIMIZER.init(mlp_state())), 0)
    assert device_bytes(state) <= 1.02 / 8 * whole_bytes(state) + 16
    old = state
    state, _ = step(state, batch())
    assert old[0]["w"].is_deleted()
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(old)]


def test_the_plan_for_a_small_memory_shards_all_state():
    state = jax.eval_shape(lambda: (mlp_state(hidden=1024), OPTIMIZER.init(mlp_state(hidden=1024))))
    unlimited = plan(adamw_step, state, batch(), donate_argnums=0, plan="dp:8")
    limit = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 8 * 1.8  # gradients too
    step = auto_shard(adamw_step, memory_limit_bytes=limit, donate_argnums=0)
    limited = step.plan(state, batch())
    assert limited.estimate.peak_memory_bytes <= limit < unlimited.estimate.peak_memory_bytes
    initial = step.init(lambda: (mlp_state(hidden=1024), OPTIMIZER.init(mlp_state(hidden=1024))))
    assert device_bytes(initial) <= 1.02 / 8 * whole_bytes(initial) + 16


def test_it_plans_and_traces_once():
    chex.clear_trace_counter()
    traced = chex.assert_max_traces(sgd_step, n=1)
    step = auto_shard(traced, donate_argnums=0)
    params = mlp_state()
    for seed in range(4):
        params, _ = step(params, batch(seed))
    assert len(step._plain.entries) == 1 and step._plain.last.jitted._cache_size() == 1


@pytest.mark.whole
def test_each_shape_has_its_own_plan():
    step = auto_shard(sgd_step)
    for size in (32, 64, 32, 64):
        expected = sgd_step(mlp_state(), batch(size=size))[1]
        np.testing.assert_allclose(step(mlp_state(), batch(size=size))[1], expected, rtol=1e-5)
    assert len(step._plain.entries) == 2


def test_an_error_of_the_function_is_raised_unchanged():
    @auto_shard
    def broken(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(TypeError, match="dot_general"):
        broken(batch())


def test_static_and_keyword_arguments():
    @functools.partial(auto_shard, static_argnums=1)
    def power(x, n, *, scale):
        return jnp.sum(x**n) * scale

    for n in (2, 3, 2):
        np.testing.assert_allclose(power(batch(), n, scale=2.0), np.sum(batch() ** n) * 2, rtol=1e-4)


def test_a_flax_train_state():
    state = TrainState.create(apply_fn=mlp_loss, params=mlp_state(), tx=optax.adamw(1e-2))

    def step(state, x):
        loss, grads = jax.value_and_grad(state.apply_fn)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    expected, _ = jax.jit(step)(state, batch())
    actual, _ = auto_shard(step, plan="fsdp:8")(state, batch())
    assert_close(expected.params, actual.params)
    assert int(actual.step) == 1


def test_functions_that_share_state_share_its_sharding():
    train, evaluate = auto_shard(sgd_step, plan="fsdp:8"), auto_shard(mlp_loss)
    params, _ = train(mlp_state(), batch())
    layout = jax.tree.map(lambda x: x.sharding, params)
    for seed in range(3):
        pointers = [s.data.unsafe_buffer_pointer() for s in params["w"].addressable_shards]
        evaluate(params, batch(seed))
        assert pointers == [s.data.unsafe_buffer_pointer() for s in params["w"].addressable_shards]
        params, _ = train(params, batch(seed))
        assert jax.tree.map(lambda x: x.sharding, params) == layout
    planned = {leaf.path: leaf.spec for leaf in evaluate.plan(params, batch()).inputs}
    assert all(planned[f"0/{k}"] == layout[k].spec for k in params)
    for function in (train, evaluate):
        assert len(function._plain.entries) == 1 and function._plain.last.jitted._cache_size() == 1


def test_jax_transformations_apply_to_it():
    loss = auto_shard(mlp_loss, plan="dp:8")
    assert_close(jax.grad(mlp_loss)(mlp_state(), batch()), jax.grad(loss)(mlp_state(), batch()))
    inside = jax.jit(lambda p, x: loss(p, x) * 2)
    np.testing.assert_allclose(inside(mlp_state(), batch()), 2 * mlp_loss(mlp_state(), batch()), rtol=1e-5)


def test_custom_derivatives_are_kept():
    @jax.custom_vjp
    def twice(x):
        return x * 2

    twice.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 100,))
    loss = auto_shard(lambda x: jnp.sum(twice(x)), plan="dp:8")
    np.testing.assert_allclose(jax.grad(loss)(batch()), np.full((32, 64), 100.0))


def test_control_flow_is_sharded():
    def fn(params, x):
        def body(carry, _):
            carry = jnp.tanh(carry @ params["w"] + params["b"]) @ params["v"]
            return jax.lax.cond(carry.sum() > 0, lambda c: c * 0.5, lambda c: c - 1.0, carry), carry.mean()

        x, means = jax.lax.scan(body, x, None, length=3)
        x = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 0.9), (0, x))[1]
        return jax.lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, jnp.tanh], x), means

    for strategy in ("dp:8", "tp:8", "fsdp:4 tp:2"):
        assert_close(fn(mlp_state(), batch()), auto_shard(fn, plan=strategy)(mlp_state(), batch()))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = self.embed

    def __call__(self, tokens):
        return self.head.attend(self.drop(self.norm(self.embed(tokens))))


def nnx_step(model, optimizer, tokens):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [None, "dp:8", "fsdp:8", "tp:8"])
def test_nnx_objects_are_updated_in_place_as_by_nnx_jit(strategy):
    def make():
        model = Tied(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    (model, optimizer), (other, other_optimizer) = make(), make()
    step = auto_shard(nnx_step, plan=strategy)
    for seed in range(3):
        tokens = np.random.default_rng(seed).integers(0, 64, (16, 8)).astype(np.int32)
        expected = nnx.jit(nnx_step)(model, optimizer, tokens)
        np.testing.assert_allclose(step(other, other_optimizer, tokens), expected, rtol=1e-5)
    assert other.head is other.embed
    assert int(other_optimizer.step[...]) == 3
    for kind in (nnx.Param, nnx.BatchStat):
        assert_close(nnx.state(model, kind), nnx.state(other, kind))
    streams, other_streams = (nnx.state(m, nnx.RngCount) for m in (model, other))
    assert jax.tree.leaves(streams) == jax.tree.leaves(other_streams) != [0]


def test_plans_of_nnx_steps_name_the_parameters():
    model = nnx.eval_shape(lambda: Tied(nnx.Rngs(0)))
    step = auto_shard(lambda model, tokens: model(tokens))
    plan = step.plan(model, jax.ShapeDtypeStruct((16, 8), jnp.int32))
    assert "0/embed/embedding" in {leaf.path for leaf in plan.inputs}


def test_init_creates_sharded_nnx_objects():
    def create(key):
        return Tied(nnx.Rngs(key))

    step = auto_shard(lambda model, tokens: model(tokens), plan="fsdp:8")
    with pytest.raises(PlanError, match="there is no plan yet"):
        step.init(create, 0)
    step.plan(nnx.eval_shape(lambda: create(0)), jax.ShapeDtypeStruct((16, 8), jnp.int32))
    model = step.init(create, 0)
    assert device_bytes(nnx.state(model, nnx.Param)) * 8 == whole_bytes(nnx.state(model, nnx.Param))
    with pytest.raises(PlanError, match="returns none of the planned arguments"):
        step.init(lambda key: jnp.zeros(3), 0)


def test_frozen_parameters_are_bitwise_unchanged_and_need_no_moments():
    optimizer = optax.masked(optax.adamw(1e-2), {"w": False, "b": True, "v": True})

    def step(state, x):
        params, moments = state

        def loss(params):
            return mlp_loss({**params, "w": jax.lax.stop_gradient(params["w"])}, x)

        grads = jax.grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    state = (mlp_state(), optimizer.init(mlp_state()))
    sharded = auto_shard(step, plan="fsdp:4 tp:2")
    params, moments = sharded(state, batch())
    np.testing.assert_array_equal(params["w"], mlp_state()["w"])
    shapes = [leaf.shape for leaf in sharded.plan(state, batch()).inputs]
    assert shapes.count((64, 128)) == 1  # frozen parameters have no moments
    costs = [f.lower(state, batch()).compile().cost_analysis() for f in (jax.jit(step), sharded)]
    whole, per_device = (cost["flops"] for cost in costs if cost is not None)
    assert per_device <= whole / 8 * 1.3


def test_variants_choose_the_cheapest():
    def fn(x, *, extra):
        for _ in range(extra):
            x = x @ x.T @ x
        return x

    assert plan(fn, batch(), variants={"extra": [3, 1, 2]}).variant == {"extra": 1}


def test_a_declared_operator_runs_on_shards(monkeypatch):
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))  # other tests count the registered rules
    seen = []

    @operator("b d, d -> b d; whole d")
    def rms(x, scale):
        seen.append(x.shape)
        return x * scale / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))

    def step(params, x):
        def loss(params):
            return jnp.mean((rms(jnp.tanh(x @ params["w"]), params["b"] + 1) @ params["v"] - x) ** 2)

        return jax.value_and_grad(loss)(params)

    expected = jax.jit(step)(mlp_state(), batch())
    for strategy in ("dp:8", "fsdp:4 tp:2", "tp:8"):
        seen.clear()
        assert_close(expected, auto_shard(step, plan=strategy)(mlp_state(), batch()))
        assert (32 // {"dp:8": 8, "fsdp:4 tp:2": 4, "tp:8": 1}[strategy], 128) in seen


@pytest.mark.filterwarnings("ignore:.*only 2 of the 8 devices have work of their own")
@pytest.mark.parametrize("groups", [8, 4])
@pytest.mark.parametrize("batch_size", [16, 2])
def test_plans_avoid_a_known_fault_of_the_partitioner(groups, batch_size):
    def gradient(kernel, x):
        def loss(kernel):
            dims = ("NHWC", "HWIO", "NHWC")
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=groups
            )
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(kernel)

    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(3, 3, 8 // groups, 16)).astype(np.float32)
    x = rng.normal(size=(batch_size, 6, 6, 8)).astype(np.float32)
    sharded = auto_shard(gradient, mesh={"a": 2, "b": 4}, plan={"a": ["batch"]})
    assert_close(jax.jit(gradient)(kernel, x), sharded(kernel, x))
