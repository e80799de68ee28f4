"""State that comes back changed raises or warns; arguments that only look like state do neither."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard, plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.axes.state_checks import StateChangedError
from tests.sharding.programs import OPTIMIZER, adamw_step, batch, mlp_loss, mlp_state, sgd_step


def trained(params, x, change):
    """One step of gradient descent that applies `change` to the new parameters."""
    new, loss = sgd_step(params, x)
    return change(new), loss


def narrow_one(p):
    return {**p, "w": p["w"].astype(jnp.bfloat16)}


def slice_one(p):
    return {**p, "v": p["v"][:8]}


def drop_one(p):
    return {k: v for k, v in p.items() if k != "b"}


def add_one(p):
    return {**p, "count": jnp.zeros(3, jnp.int32)}


CHANGES = {
    narrow_one: r"'w' from float32\[64,128\] to bfloat16\[64,128\]\. Return it with the leaves",
    slice_one: r"'v' from float32\[128,64\] to float32\[8,64\]",
    drop_one: r"'b' float32\[128\] is missing",
    add_one: r"'count' int32\[3\] is new",
}


@pytest.mark.parametrize("donate", [(), 0])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_state_with_one_changed_leaf_raises(change, donate):
    what = "is donated, but" if donate == 0 else "is state that"
    with pytest.raises(StateChangedError, match=f"argument 'p' {what} comes back changed: {CHANGES[change]}"):
        plan(lambda p, x: trained(p, x, change), mlp_state(), batch(), donate_argnums=donate)


def test_a_changed_leaf_of_nested_state_is_named():
    """The state is the only result, has parameters and moments as subtrees, and is updated in a scan."""

    def steps(state, xs):
        def inner_step(state, x):
            return adamw_step(state, x)[0], None

        params, moments = jax.lax.scan(inner_step, state, xs)[0]
        return {"params": drop_one(params), "moments": moments}

    state = {"params": mlp_state(), "moments": OPTIMIZER.init(mlp_state())}
    with pytest.raises(StateChangedError, match="'params/b' .* is missing"):
        plan(lambda s, xs: steps((s["params"], s["moments"]), xs), state, jnp.stack([batch(), batch()]))


def test_a_layer_as_wide_as_its_input_is_state_too():
    def step(p, x):
        g = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(p)
        return {"w": (p["w"] - g["w"]).astype(jnp.bfloat16), "b": p["b"] - g["b"]}

    with pytest.raises(StateChangedError, match="'w' from float32"):
        plan(step, {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}, batch())


def halve(p):
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)


@pytest.mark.parametrize(
    ("fn", "change"),
    [
        (lambda p, x: trained(p, x, halve), "'b' from float32"),
        (lambda p, x: ({"w": p["w"]}, jnp.sum(x @ p["w"] @ p["v"])), "'v' .* is missing"),
        (lambda p, x: trained(p, x, narrow_one)[::-1], "'w' from float32"),
        (lambda p, x: ({**p, "cache": x @ p["w"]}, mlp_loss(p, x)), "'cache' .* is new"),
    ],
    ids=["every leaf changed", "half of the leaves missing", "at another index", "a new cache"],
)
def test_likely_state_that_changes_warns(fn, change):
    params = {"w": mlp_state()["w"], "v": mlp_state()["v"]} if "missing" in change else mlp_state()
    with pytest.warns(AutoshardWarning, match=f"argument 'p' looks like state that comes back changed: {change}"):
        planned = plan(fn, params, batch())
    assert planned.jit()(params, batch()) is not None


def cast_and_use(p, x):
    return mlp_loss(p, x), halve(p)


def some_gradients(p, x):
    grads = jax.grad(mlp_loss)(p, x)
    return {"w": grads["w"], "v": grads["v"]}


def narrow_gradients(p, x):
    return halve(jax.grad(mlp_loss)(p, x))


def statistics(variables, x):
    mean = 0.9 * variables["stats"]["mean"] + 0.1 * (x @ variables["params"]["w"]).mean(0)
    scale = 0.9 * variables["stats"]["scale"] + 0.1
    return x @ variables["params"]["w"] - mean, {"stats": {"mean": mean, "scale": scale}}


def sown(variables, x):
    return statistics(variables, x)[0], {**variables, **statistics(variables, x)[1], "sown": {"x": x}}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def crop(data, x):
    return {**data, "image": data["image"][:, :4], "mask": data["mask"] * 1.0}, x.sum()


def with_mask(data, x):
    return {**data, "image": data["image"] / 255 - x[:, :8], "seen": data["image"] > 0}, x.sum()


def grow(cache, x):
    return {"keys": jnp.concatenate([cache["keys"], x[:, None]], 1), "index": cache["index"] + 1}, x


MLP = jax.eval_shape(mlp_state)
IMAGES = {"image": f32(32, 8), "mask": f32(32, 8), "label": f32(32), "epoch": np.int32(0)}


@pytest.mark.parametrize(
    ("fn", "first"),
    [
        (cast_and_use, MLP),
        (some_gradients, MLP),
        (narrow_gradients, MLP),
        (lambda p, x: (some_gradients(p, x), mlp_loss(p, x)), MLP),
        (lambda p, x: (mlp_loss(p, x), some_gradients(p, x)), MLP),
        (statistics, {"params": {"w": f32(64, 8)}, "stats": {"mean": f32(8), "scale": f32(8)}}),
        (sown, {"params": {"w": f32(64, 8)}, "stats": {"mean": f32(8), "scale": f32(8)}}),
        (crop, IMAGES),
        (with_mask, IMAGES),
        (grow, {"keys": f32(32, 4, 64), "index": np.int32(0)}),
        (lambda p, x: {"w": p["w"], "norm": jnp.sum(p["v"])}, MLP),
        (lambda p, x: (jnp.sum(x @ p[0] @ p[1]), p[0], p[1] * 2), (f32(64, 8), f32(8, 4), f32(3))),
        (lambda p, x: (p[0] - x.T @ x, (x @ p[0]).mean()), (f32(64, 64), jax.eval_shape(lambda: jax.random.key(0)))),
    ],
)
def test_functions_that_are_not_steps_do_not_warn(fn, first):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "auto_shard.*nothing is sharded")
        plan(fn, first, batch())


def test_donated_data_may_be_returned_with_more_leaves():
    plan(with_mask, IMAGES, batch(), donate_argnums=0)


def test_an_nnx_step_may_add_and_drop_sown_values():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, *, rngs):
            self.up, self.down = nnx.Linear(64, 32, rngs=rngs), nnx.Linear(32, 64, rngs=rngs)

        def __call__(self, x):
            x = jnp.tanh(self.up(x))
            self.sow(nnx.Intermediate, "hidden", x.mean(0))
            return self.down(x)

    @auto_shard
    def step(model, x):
        grads = nnx.grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, nnx.state(grads, nnx.Param)))

    model = Net(rngs=nnx.Rngs(0))
    step(model, batch())
    assert vars(model)["hidden"][0].shape == (32,)
