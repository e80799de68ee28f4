"""Batches that no input has alone: rows that the state carries from step to step, and concatenated rows."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.program.tracing import trace

ROWS, SEQ, MEMORY, WIDTH, HIDDEN, VOCAB = 16, 24, 20, 32, 80, 48


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def trained(loss, weights, *data):
    """The new weights and the auxiliary result of a loss."""
    grads, extra = jax.grad(loss, has_aux=True)(weights, *data)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), extra


def attention(x, memory, weights):
    context = jnp.concatenate([memory, x], 1)
    scores = jnp.einsum("bqe,bke->bqk", x @ weights["q"], context @ weights["k"])
    return x + jax.nn.softmax(scores) @ (context @ weights["v"])


def with_memory(state, tokens, fresh):
    """Transformer-XL: keys of the last segment come from a memory."""

    def loss(weights, memory, tokens, fresh):
        x = weights["embed"][tokens]
        kept = jax.lax.stop_gradient(jnp.concatenate([memory, x], 1)[:, -MEMORY:])
        x = attention(x, memory * fresh[:, None, None], weights)
        x = x + jnp.tanh(x @ weights["up"]) @ weights["down"]
        return -jnp.mean(jax.nn.log_softmax(x @ weights["embed"].T)[..., 0]), kept

    weights, memory = trained(loss, state["weights"], state["memory"], tokens, fresh)
    return {"weights": weights, "memory": memory}


def recurrent(state, tokens):
    """Truncated backpropagation through time, written out over the positions."""

    def loss(weights, hidden, tokens):
        out = []
        for t in range(3):
            hidden = jnp.tanh(weights["embed"][tokens][:, t] + hidden @ weights["q"])
            out.append(hidden @ weights["up"])
        return jnp.mean(jnp.stack(out, 1) ** 2 * jnp.cumsum(tokens[..., None], 1)), hidden

    weights, memory = trained(loss, state["weights"], state["memory"], tokens)
    return {"weights": weights, "memory": jax.lax.stop_gradient(memory)}


WEIGHTS = {
    "embed": floats(VOCAB, WIDTH), **{name: floats(WIDTH, WIDTH) for name in "qkv"},
    "up": floats(WIDTH, HIDDEN), "down": floats(HIDDEN, WIDTH),
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "memory", "data"),
    [
        (with_memory, floats(ROWS, MEMORY, WIDTH), (ints(ROWS, SEQ), floats(ROWS))),
        (recurrent, floats(ROWS, WIDTH), (ints(ROWS, 3),)),
    ],
)
def test_rows_that_the_state_carries_are_the_batch(step, memory, data):
    traced = trace(step, ({"weights": WEIGHTS, "memory": memory}, *data), {})
    found = analyse(traced)
    names = dict(zip(found.axes.program.inputs, traced.in_names, strict=True))
    roles = {names[v]: role for v, role in found.roles.inputs.items()}
    assert found.roles.batch is not None and found.axes.sizes[found.roles.batch] == ROWS
    assert not found.roles.experts
    assert [path for path, role in roles.items() if role == "data"] == [
        "state/memory",
        *list(names.values())[-len(data) :],
    ]


@pytest.mark.parametrize("deep", [False, True])
def test_features_before_rows_are_not_the_batch(deep):
    def step(state, x):
        def loss(weights, x):
            hidden = jnp.tanh(jnp.einsum("ir,ih->hr", x, weights["in"]))
            if deep:
                hidden = jnp.tanh(jnp.einsum("hr,hk->kr", hidden, weights["square"]))
            return jnp.mean(hidden**2), None

        weights, _ = trained(loss, state["weights"], x)
        return {"weights": weights, "mean": 0.9 * state["mean"] + 0.1 * x.mean(1)}

    weights = {"in": floats(WIDTH, HIDDEN), "square": floats(HIDDEN, HIDDEN)}
    found = analyse(trace(step, ({"weights": weights, "mean": floats(WIDTH)}, floats(WIDTH, ROWS)), {}))
    assert found.roles.batch is not None and found.axes.sizes[found.roles.batch] == ROWS


def test_features_that_all_weights_have_are_not_the_batch():
    """Each feature has its own scale and shift. A penalty couples the features."""

    def step(weights, x, y):
        def loss(weights):
            shifted = x * weights["scale"][:, :1] + weights["shift"][:, :1]
            return jnp.mean((shifted - y) ** 2) + jnp.sum((weights["scale"].T @ weights["shift"]) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = {"scale": floats(WIDTH, 2), "shift": floats(WIDTH, 2)}
    found = analyse(trace(step, (weights, floats(WIDTH, ROWS), floats(WIDTH, ROWS)), {}))
    assert found.roles.batch is not None and found.axes.sizes[found.roles.batch] == ROWS


def pairs(state, chosen, rejected):
    """Chosen and rejected rows pass the model together, as in most implementations of preference losses."""

    def loss(weights, tokens):
        x = weights["embed"][tokens]
        x = attention(x, x, weights)
        x = x + jnp.tanh(x @ weights["up"]) @ weights["down"]
        scores = jax.nn.log_softmax(x @ weights["embed"].T)[..., 0].sum(1)
        good, bad = jnp.split(scores, 2)
        return -jnp.mean(jax.nn.log_sigmoid(good - bad)), None

    return {"weights": trained(loss, state["weights"], jnp.concatenate([chosen, rejected]))[0]}


def views(state, image, key):
    """Two views of each picture pass the model together."""

    def loss(weights, x):
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, weights["kernel"], (1, 1), "SAME", dimension_numbers=NHWC))
        z = x.mean((1, 2)) @ weights["head"]
        return -jnp.mean(jax.nn.log_softmax(z @ z.T)), None

    noise = jax.random.normal(key, (2, *image.shape))
    return {"weights": trained(loss, state["weights"], jnp.concatenate([image + noise[0], image + noise[1]]))[0]}


NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize(
    ("step", "weights", "data"),
    [
        (pairs, WEIGHTS, (ints(ROWS, SEQ), ints(ROWS, SEQ))),
        (views, {"kernel": floats(3, 3, 3, WIDTH), "head": floats(WIDTH, 8)}, (floats(ROWS, SEQ, SEQ, 3),)),
    ],
)
def test_concatenated_rows_are_the_batch(step, weights, data):
    key = () if step is pairs else (jax.random.key(0),)
    found = analyse(trace(step, ({"weights": weights}, *data, *key), {}))
    assert found.roles.batch is not None and found.axes.sizes[found.roles.batch] == 2 * ROWS
    assert {found.axes.sizes[c] for c in found.roles.other_rows} == {ROWS}
    inputs = found.axes.program.inputs
    roles = [found.roles.inputs[v] for v in inputs if len(found.axes.program.avals[v].shape)]
    assert roles == ["parameter"] * len(weights) + ["data"] * len(data)
