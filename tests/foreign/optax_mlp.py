"""An MLP as a dict of arrays, trained by Optax's AdamW in the usual loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

tx = optax.adamw(optax.cosine_decay_schedule(3e-3, 100), weight_decay=0.01)


def mlp(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, x, y):
    return jnp.mean(jnp.square(mlp(params, x) - y))


def train_step(state, x, y):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def grad_fn(state, x, y):
    return jax.grad(loss_fn)(state[0], x, y)


def make():
    rng = np.random.default_rng(0)
    sizes = [16, 64, 64, 8]
    params = [
        {"w": jnp.asarray(rng.normal(size=(m, n)) / m**0.5, jnp.float32), "b": jnp.zeros(n)}
        for m, n in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    teacher = rng.normal(size=(16, 8))
    batches = []
    for _ in range(4):
        x = rng.normal(size=(64, 16))
        batches.append((jnp.asarray(x, jnp.float32), jnp.asarray(np.tanh(x @ teacher), jnp.float32)))
    return train_step, ((params, tx.init(params)),), batches
