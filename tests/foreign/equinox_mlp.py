"""An Equinox model of arrays, functions, numbers and text, trained by Optax in Equinox's usual loop."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

tx = optax.adamw(3e-3)
jit = eqx.filter_jit


class Classifier(eqx.Module):
    embed: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout  # its rate and `inference` are Python numbers
    mlp: eqx.nn.MLP
    name: str = "classifier"

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.embed = eqx.nn.Linear(16, 64, key=first)
        self.norm = eqx.nn.LayerNorm(64)
        self.dropout = eqx.nn.Dropout(0.1)
        self.mlp = eqx.nn.MLP(64, 8, 128, depth=2, activation=jax.nn.gelu, key=second)

    def __call__(self, x, key):
        assert self.name == "classifier"
        return self.mlp(self.dropout(self.norm(self.embed(x)), key=key))


def loss_fn(model, x, y, key):
    predicted = jax.vmap(model)(x, jax.random.split(key, len(x)))
    return jnp.mean(jnp.square(predicted - y))


def train_step(state, x, y, key):
    model, opt_state = state
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y, key)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return (eqx.apply_updates(model, updates), opt_state), loss


def grad_fn(state, x, y, key):
    return eqx.filter_grad(loss_fn)(state[0], x, y, key)


def make():
    rng = np.random.default_rng(0)
    model = Classifier(jax.random.key(0))
    teacher = rng.normal(size=(16, 8))
    batches = []
    for index in range(4):
        x = rng.normal(size=(64, 16))
        y = np.tanh(x @ teacher)
        batches.append((jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), jax.random.key(index)))
    return train_step, ((model, tx.init(eqx.filter(model, eqx.is_inexact_array))),), batches
