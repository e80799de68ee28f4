"""Leaves of arguments and results that are neither arrays nor numbers are static."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import auto_shard
from autoshard.errors import PlanError
from tests.sharding.programs import assert_close, batch, device_bytes, mlp_loss, mlp_state, sgd_step, whole_bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    w: Any
    activation: Callable[..., Any]


@struct.dataclass
class Flax:
    w: Any
    activation: Callable[..., Any]


class Equinox(eqx.Module):
    w: Any
    activation: Callable[..., Any]


def tree(w, activation):
    return {"w": w, "activation": activation}


def parts(model):
    return (model["w"], model["activation"]) if isinstance(model, dict) else (model.w, model.activation)


KINDS = pytest.mark.parametrize("kind", [tree, Plain, Flax, Equinox], ids=["dict", "dataclass", "struct", "equinox"])


def relu_step(model, x):
    """Returns the updated model and its output, of the model's own type."""
    w, activation = parts(model)
    changed = w - 0.1 * (x.T @ activation(x @ w))
    return type(model)(**{"w": changed, "activation": activation}), activation(x @ changed)


@KINDS
def test_functions_in_arguments_and_results(kind):
    w = jax.random.normal(jax.random.key(0), (64, 64))
    step = auto_shard(relu_step, plan="fsdp:8", donate_argnums=0)
    for activation in (jax.nn.relu, jnp.tanh, jax.nn.relu):
        model, expected = kind(jnp.copy(w), activation), kind(w, activation)
        for _ in range(2):
            (model, out), (expected, wanted) = step(model, batch()), relu_step(expected, batch())
        assert parts(model)[1] is activation and type(model) is type(expected)
        assert_close((parts(expected)[0], wanted), (parts(model)[0], out))
    assert len(step._plain.entries) == 2  # one plan for each function


@KINDS
def test_plan_init_lower_and_jit(kind):
    def create(key):
        return kind(jax.random.normal(key, (64, 64)), jax.nn.relu)

    step = auto_shard(relu_step, plan="fsdp:8")
    shapes = kind(jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.nn.relu)
    plan = step.plan(shapes, batch())
    assert parts(plan.in_specs[0]) == (P("fsdp"), jax.nn.relu) == parts(plan.out_specs[0])
    assert autoshard.plan(relu_step, shapes, batch(), plan="fsdp:8").to_json() == plan.to_json()
    model = step.init(create, jax.random.key(0))
    assert parts(model)[1] is jax.nn.relu and device_bytes(parts(model)[0]) * 8 == whole_bytes(parts(model)[0])
    expected, wanted = relu_step(create(jax.random.key(0)), batch())
    for run in (step, plan.jit()):
        changed, out = run(model, batch())
        assert parts(changed)[1] is jax.nn.relu
        assert_close((parts(expected)[0], wanted), (parts(changed)[0], out))
        assert "stablehlo" in run.lower(model, batch()).as_text()


def test_static_leaves_are_compared_by_type_and_value():
    traced = []

    def fn(x, config):
        traced.append(config["n"])
        return x * len(config["n"]), config

    sharded = auto_shard(fn, plan="dp:8")
    values = ["ab", "".join(["a", "b"]), np.str_("ab"), b"ab", range(2), "abc", "ab"]
    for value in values:
        out, config = sharded(batch(), {"n": value})
        np.testing.assert_array_equal(out, batch() * len(value))
        assert config["n"] == value and type(config["n"]) is type(value)
    assert traced == ["ab", np.str_("ab"), b"ab", range(2), "abc"]


def test_objects_without_equality_are_compared_by_identity():
    class Config:
        scale = 3

    sharded = auto_shard(lambda x, config: x * config.scale, plan="dp:8")
    one, other = Config(), Config()
    for config in (one, other, one):
        np.testing.assert_array_equal(sharded(batch(), config), batch() * 3)
    assert len(sharded._plain.entries) == 2


def test_whole_arguments_and_keywords_are_static():
    def fn(mode, params, x, *, dtype, rate=0.1):
        loss, gradients = jax.value_and_grad(mlp_loss)(params, x)
        sign = {"descend": -1, "ascend": 1}[mode]
        return jax.tree.map(lambda p, g: p + sign * rate * g, params, gradients), loss.astype(dtype)

    sharded = auto_shard(fn, plan="fsdp:8", donate_argnums=1)
    for mode, dtype in (("descend", np.float32), ("ascend", jnp.float16), ("descend", np.dtype("float32"))):
        changed, loss = sharded(mode, mlp_state(), batch(), dtype=dtype, rate=0.2)
        expected, wanted = fn(mode, mlp_state(), batch(), dtype=dtype, rate=0.2)
        assert loss.dtype == dtype
        np.testing.assert_allclose(loss, wanted, rtol=1e-3)
        assert_close(expected, changed)
    params, _ = sharded("descend", mlp_state(), batch(), dtype=np.float32)
    sharded("descend", params, batch(), dtype=np.float32)
    assert all(x.is_deleted() for x in params.values())


def test_numbers_stay_data():
    sharded = auto_shard(lambda x, config: x * config["scale"], plan="dp:8")
    for scale in (1.5, 2.5, 3.5):
        np.testing.assert_array_equal(sharded(batch(), {"scale": scale, "name": "scale"}), batch() * np.float32(scale))
    assert len(sharded._plain.entries) == 1


@dataclasses.dataclass
class Settings:
    arrays: Any = None


@pytest.mark.parametrize(
    "leaf, kind",
    [
        (np.array(["adam"]), r"an array of text \(<U4\)"),
        (np.array([None]), r"an array of Python objects \(object\)"),
        (np.zeros(1, [("a", "f4")]), r"an array of \[\('a', '<f4'\)\]"),
        (Settings(np.ones(3)), "a Settings"),
        (bytearray(b"adam"), "a bytearray"),
    ],
    ids=["array of text", "array of objects", "structured array", "dataclass of arrays", "bytes"],
)
def test_a_leaf_that_is_not_hashable_is_named_at_every_call(leaf, kind):
    def with_leaf(params, x):
        return sgd_step(params, x)[0], leaf

    step, returns = auto_shard(sgd_step, plan="dp:8"), auto_shard(with_leaf, plan="dp:8")
    text = f"is .*, {kind}.*(not hashable|of numbers only)"
    for _ in range(2):
        with pytest.raises(PlanError, match=rf"\(sgd_step\): argument 'params/name' {text}"):
            step({**mlp_state(), "name": leaf}, batch())
        step(mlp_state(), batch())
        with pytest.raises(PlanError, match=rf"\(with_leaf\): result '1' {text}"):
            returns(mlp_state(), batch())


def test_results_that_are_not_arrays():
    def fn(params, x):
        return {"loss": mlp_loss(params, x), "name": "loss", "unit": None, "count": 3, "f": jnp.tanh}

    sharded = auto_shard(fn, plan="dp:8")
    for _ in range(2):
        out = sharded(mlp_state(), batch())
        assert out["name"] == "loss" and out["unit"] is None and int(out["count"]) == 3 and out["f"] is jnp.tanh
        np.testing.assert_allclose(out["loss"], mlp_loss(mlp_state(), batch()), rtol=1e-5)


def test_inside_other_transformations():
    def loss(model, x):
        return jnp.mean(relu_step(model, x)[1] ** 2)

    model = Equinox(jax.random.normal(jax.random.key(0), (64, 64)), jax.nn.relu)
    expected = eqx.filter_grad(loss)(model, batch())
    assert_close(expected.w, eqx.filter_grad(auto_shard(loss, plan="dp:8"))(model, batch()).w)
    changed, _ = eqx.filter_jit(auto_shard(relu_step, plan="dp:8"))(model, batch())
    assert_close(relu_step(model, batch())[0].w, changed.w)


def test_beside_nnx_objects():
    def step(model, config, x):
        out = config["activation"](model(x))
        model.bias[...] += 1
        return {"out": out, "name": config["name"]}

    model: Any = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    expected: Any = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    config = {"activation": jax.nn.relu, "name": "relu"}
    sharded = auto_shard(step, plan="dp:8")
    plan = sharded.plan(model, config, batch())
    assert [leaf.path for leaf in plan.inputs] == ["0/bias", "0/kernel", "2"]
    for _ in range(2):
        out, wanted = sharded(model, config, batch()), step(expected, config, batch())
        assert out["name"] == "relu"
        assert_close((wanted["out"], expected.bias[...]), (out["out"], model.bias[...]))
    assert plan.jit()(model, config, batch())["name"] == "relu"


class Dropping(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, x, key):
        return self.dropout(self.linear(x), key=key)


def dropping_step(model, moments, x, key, *, momentum=0.9, clip=True):
    """Reads numbers of its model and, if `clip`, of its arguments, so they have to be static."""

    def loss_fn(model):
        return jnp.mean((jax.vmap(model)(x, jax.random.split(key, len(x))) - x) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads) if clip else grads
    moments = jax.tree.map(lambda m, g: momentum * m + g, moments, grads)
    return eqx.apply_updates(model, jax.tree.map(lambda m: -0.1 * m, moments)), moments, loss


@pytest.mark.parametrize("jitted", [False, True], ids=["function", "filter_jit"])
def test_numbers_of_equinox_are_static(jitted):
    model = Dropping(eqx.nn.Linear(64, 64, key=jax.random.key(0)), eqx.nn.Dropout(0.5))
    moments = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
    keywords = {"clip": True} if jitted else {}
    single: Any = eqx.filter_jit(dropping_step)
    step = auto_shard(single if jitted else dropping_step, plan="fsdp:8")
    for inference in (False, True):
        here: Any = (eqx.nn.inference_mode(model, inference), moments)
        there: Any = here
        for index in range(2):
            *there, wanted = single(*there, batch(), jax.random.key(index), **keywords)
            *here, loss = step(*here, batch(), jax.random.key(index), **keywords)
            assert_close((wanted, eqx.filter(there, eqx.is_array)), (loss, eqx.filter(here, eqx.is_array)))
        assert here[0].dropout == eqx.nn.Dropout(0.5, inference)
    assert len(step._plain.entries) == 2
    assert device_bytes(eqx.filter(here, eqx.is_array)) * 8 == whole_bytes(eqx.filter(here, eqx.is_array))


def test_flax_train_state_is_created_sharded():
    """Its functions are fields outside of the tree, so it is planned as it is."""
    from flax import linen
    from flax.training.train_state import TrainState

    model, tx = linen.Dense(64), optax.adamw(1e-2)

    def create(key):
        return TrainState.create(apply_fn=model.apply, params=model.init(key, jnp.zeros((1, 64))), tx=tx)

    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean((state.apply_fn(p, x) - x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    sharded = auto_shard(step, plan="fsdp:8", donate_argnums=0)
    sharded.plan(jax.eval_shape(create, jax.random.key(0)), batch())
    state, expected = sharded.init(create, jax.random.key(0)), create(jax.random.key(0))
    for _ in range(2):
        state, expected = sharded(state, batch()), step(expected, batch())
    assert_close(expected, state)
    assert len(sharded._plain.entries) == 1 and state.tx is tx
