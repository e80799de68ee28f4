"""A character model in plain JAX: a two-layer LSTM, scanned over time. It keeps its state between batches.

Clipped gradients are accumulated over two batches for each update of momentum SGD (`optax.MultiSteps`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.25), optax.sgd(1.0, momentum=0.9)), every_k_schedule=2)


def cell(layer, memory, x):
    h, c = memory
    gates = x @ layer["w_x"] + h @ layer["w_h"] + layer["b"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h, c


def loss_fn(params, memory, tokens):
    def step(memory, token):
        x = params["embed"][token]
        after = []
        for layer, before in zip(params["layers"], memory, strict=True):
            x, c = cell(layer, before, x)
            after.append((x, c))
        return after, x @ params["head"]

    memory, logits = jax.lax.scan(step, memory, tokens[:, :-1].T)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].T)
    return jnp.mean(losses), memory


def train_step(state, tokens):
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, memory), grads = gradient(state["params"], state["memory"], tokens)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "memory": memory}, loss


def make(vocab=64, dim=32, batch=128, length=12):
    rng = np.random.default_rng(0)

    def weight(*shape):
        return jnp.asarray(rng.uniform(-1, 1, shape) / shape[0] ** 0.5, jnp.float32)

    params = {
        "embed": weight(vocab, dim),
        "layers": [
            {"w_x": weight(dim, 4 * dim), "w_h": weight(dim, 4 * dim), "b": jnp.zeros(4 * dim)} for _ in range(2)
        ],
        "head": weight(dim, vocab),
    }
    memory = [(jnp.zeros((batch, dim)), jnp.zeros((batch, dim))) for _ in params["layers"]]
    tokens = jnp.asarray(rng.integers(0, vocab, (batch, length + 1)), jnp.int32)
    return train_step, ({"params": params, "opt_state": tx.init(params), "memory": memory},), tokens
