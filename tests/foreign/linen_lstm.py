"""A two-layer LSTM in Flax Linen that predicts a series' next value; the update is written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class Forecaster(nn.Module):
    hidden: int = 32

    @nn.compact
    def __call__(self, series):
        x = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(series)
        x = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x)  # pyright: ignore[reportArgumentType]
        return nn.Dense(series.shape[-1])(x)


model = Forecaster()


def loss_fn(params, series):
    return jnp.mean((model.apply(params, series[:, :-1]) - series[:, 1:]) ** 2)


def train_step(params, series):
    loss, grads = jax.value_and_grad(loss_fn)(params, series)
    params = jax.tree.map(lambda p, g: p - 2.0 * g, params, grads)
    return params, loss


def grad_fn(params, series):
    return jax.grad(loss_fn)(params, series)


def make():
    params = model.init(jax.random.key(0), jnp.zeros((1, 16, 8)))
    rng = np.random.default_rng(0)
    phase, speed = rng.uniform(0, 6, (4, 16, 1, 8)), rng.uniform(0.2, 1.0, (4, 16, 1, 8))
    series = np.sin(phase + speed * np.arange(17)[:, None])
    return train_step, (params,), [(jnp.asarray(s, jnp.float32),) for s in series]
