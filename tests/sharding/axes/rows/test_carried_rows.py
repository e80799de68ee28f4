"""Steps whose state is data: the rows of a cache are the batch, and the weights are parameters."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.sharding.axes.logical_axes import find_axes
from autoshard.sharding.axes.rows.carried_rows import carried_batch
from autoshard.sharding.program.tracing import trace


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def batch_of(traced):
    """The size of the batch if the state of a traced step is data; None if it is not."""
    program, axes = traced.program, find_axes(traced.program)
    batch = carried_batch(program, axes, [(program.inputs[i], program.outputs[o]) for i, o in traced.state])
    return None if batch is None else axes.sizes[batch]


def decode(weights, state, active):
    """One step of a language model that keeps a mean of its embeddings: each row is computed from itself."""
    kept = state["kept"] * 0.5 + weights["embed"][state["tokens"]]
    tokens = jnp.argmax(jnp.tanh(kept @ weights["up"]) @ weights["head"], axis=-1)
    return {"kept": kept, "tokens": jnp.where(active, tokens, state["tokens"]).astype(jnp.int32)}


def test_weights_beside_a_carried_cache_are_parameters():
    weights = dict(zip(("embed", "up", "head"), shapes((64, 32), (32, 48), (48, 64)), strict=True))
    state = {"kept": shapes((16, 32))[0], "tokens": jax.ShapeDtypeStruct((16,), jnp.int32)}
    active = jax.ShapeDtypeStruct((16,), jnp.bool_)
    made = autoshard.plan(decode, weights, state, active, target="v5e:2x2", plan="fsdp:4")
    assert [leaf.role for leaf in made.inputs] == ["parameter"] * 3 + ["data"] * 3
    assert all(leaf.spec[0] for leaf in made.inputs if leaf.role == "data")


@pytest.mark.parametrize("frozen", [False, True])
def test_the_state_of_a_train_step_is_not_data(frozen):
    def step(state, fixed, x):
        def loss(w):
            return jnp.sum(jnp.tanh(x @ w) @ fixed)

        return {"w": state["w"] - jax.grad(loss)(state["w"]), "count": state["count"] + 1}

    state = {"w": shapes((32, 64))[0], "count": jax.ShapeDtypeStruct((), jnp.int32)}
    fixed, x = shapes((64, 8), (16, 32))
    if frozen:
        traced = trace(step, (state, fixed, x), {})
    else:
        traced = trace(lambda state, x: step(state, jnp.ones((64, 8)), x), (state, x), {})
    assert traced.state and batch_of(traced) is None


def test_weights_that_are_decoded_do_not_hide_the_rows():
    def step(weights, state):
        blocks = weights["codes"].astype(jnp.float32).reshape(16, 128, 4096) * weights["scale"][:, None, None]
        up = blocks.reshape(2048, 4096)
        kept = state["kept"] + jnp.tanh(state["kept"] @ up) @ up.T
        return {"kept": kept, "tokens": state["tokens"] + jnp.argmax(kept, -1).astype(jnp.int32)}

    weights = {"codes": jax.ShapeDtypeStruct((2048, 4096), jnp.float8_e4m3fn), "scale": shapes((16,))[0]}
    state = {"kept": shapes((2, 2048))[0], "tokens": jax.ShapeDtypeStruct((2,), jnp.int32)}
    traced = trace(step, (weights, state), {})
    assert batch_of(traced) == 2


LAYERS, ROWS, SEQ, HEADS, DIM, WIDTH, HIDDEN = 2, 16, 24, 4, 8, 32, 64


def float_decode(weights, cache, x):
    """A decode step that takes and returns features. Its cache has no integers but the scalar position."""
    position, end = cache["position"], jnp.arange(SEQ) <= cache["position"]

    def layer(x, args):
        own, keys, values = args
        q, k, v = (jnp.einsum("be,ehd->bhd", x, own[name]) for name in "qkv")
        keys, values = (
            jax.lax.dynamic_update_slice(kept, new[:, None], (0, position, 0, 0))
            for kept, new in ((keys, k), (values, v))
        )
        scores = jnp.where(end, jnp.einsum("bhd,bthd->bht", q, keys), -1e9)
        x = x + jnp.einsum("bht,bthd,hde->be", jax.nn.softmax(scores), values, own["o"])
        return x + jnp.tanh(x @ own["up"]) @ own["down"], (keys, values)

    x, (keys, values) = jax.lax.scan(layer, x, (weights, cache["keys"], cache["values"]))
    return {"keys": keys, "values": values, "position": position + 1}, x


def float_decode_shapes():
    sizes = {"q": (WIDTH, HEADS, DIM), "o": (HEADS, DIM, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    sizes |= dict.fromkeys("kv", sizes["q"])
    weights = {name: shapes((LAYERS, *size))[0] for name, size in sizes.items()}
    kept = shapes((LAYERS, ROWS, SEQ, HEADS, DIM))[0]
    cache = {"keys": kept, "values": kept, "position": jax.ShapeDtypeStruct((), jnp.int32)}
    return weights, cache, shapes((ROWS, WIDTH))[0]


def test_a_cache_of_floats_is_data():
    made = autoshard.plan(float_decode, *float_decode_shapes(), target="v5e:2x2", plan="dp:2 tp:2")
    weights = [leaf for leaf in made.inputs if leaf.path.startswith("0/")]
    assert {leaf.role for leaf in weights} == {"parameter"} and all("tp" in str(leaf.spec) for leaf in weights)
    rows = [leaf for leaf in made.inputs if leaf.path in ("1/keys", "1/values", "2")]
    assert {leaf.role for leaf in rows} == {"data"}
    assert all("dp" in str(leaf.spec[leaf.axes.index("batch")]) for leaf in rows)


@pytest.mark.parametrize("rows", [16, 1])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_random_key_in_the_state_has_no_rows(make, rows):
    def step(weights, state, active):
        key, own = jax.random.split(state["key"])
        state = {"kept": state["kept"] + jax.random.normal(own, (rows, 32)), "tokens": state["tokens"]}
        return {**decode(weights, state, active), "key": key}

    weights = dict(zip(("embed", "up", "head"), shapes((64, 32), (32, 48), (48, 64)), strict=True))
    state = {"kept": shapes((rows, 32))[0], "tokens": jax.ShapeDtypeStruct((rows,), jnp.int32)}
    state["key"] = jax.eval_shape(lambda: make(0))
    made = autoshard.plan(step, weights, state, jax.ShapeDtypeStruct((rows,), jnp.bool_), target="v5e:2x2", plan="tp:4")
    roles = {leaf.path: leaf.role for leaf in made.inputs}
    assert {roles[f"0/{name}"] for name in weights} == {"parameter"}
    assert roles["1/kept"] == roles["1/tokens"] == "data"


def test_a_recurrent_state_beside_inputs_and_results_is_data():
    def cell(weights, carry, x):
        c = carry["c"] + jnp.tanh(carry["h"] @ weights["h"] + x @ weights["x"])
        return {"c": c, "h": jnp.tanh(c)}, c @ weights["out"]

    weights = dict(zip(("h", "x", "out"), shapes((48, 48), (32, 48), (48, 8)), strict=True))
    traced = trace(cell, (weights, dict(zip("ch", shapes((16, 48), (16, 48)), strict=True)), *shapes((16, 32))), {})
    assert traced.state and batch_of(traced) == 16


def loss_of(w, x, y):
    return jnp.sum((x @ w - y) ** 2)


def distance(w, teacher, x):
    return jnp.sum((x @ w.T - x @ teacher.T) ** 2)


@pytest.mark.parametrize(
    ("step", "sizes"),
    [
        # The columns of the only matrix do not depend on each other, and the data have them too.
        (lambda w, x, y: (w - jax.grad(loss_of)(w, x, y), loss_of(w, x, y)), [(32, 64), (16, 32), (16, 64)]),
        (lambda w, x, y: (w - jax.grad(loss_of)(w, x, y), x @ w), [(32, 64), (16, 32), (16, 64)]),
        # They are the first dimension of another input.
        (lambda w, t, x: (w - jax.grad(distance)(w, t, x), distance(w, t, x)), [(64, 32), (64, 32), (16, 32)]),
    ],
    ids=["loss", "predictions", "teacher"],
)
def test_the_only_matrix_of_a_train_step_is_not_data(step, sizes):
    traced = trace(step, tuple(shapes(*sizes)), {})
    assert traced.state and batch_of(traced) is None


def test_codes_of_moments_do_not_make_the_state_of_a_train_step_data():
    """All arrays of the state have the blocks of the only matrix, and the moments are integers."""

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(state["w"])
        moment = (state["codes"] * state["scale"]).reshape(gradient.shape) + gradient
        blocks = moment.reshape(state["codes"].shape)
        scale = jnp.max(jnp.abs(blocks), 1, keepdims=True)
        return {"w": state["w"] - moment, "codes": jnp.round(127 * blocks / scale).astype(jnp.int8), "scale": scale}

    w, scale, x = shapes((32, 64), (64, 1), (16, 32))
    traced = trace(step, ({"w": w, "codes": jax.ShapeDtypeStruct((64, 32), jnp.int8), "scale": scale}, x), {})
    assert traced.state and batch_of(traced) is None
