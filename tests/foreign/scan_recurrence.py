"""A vanilla recurrent network in plain JAX: `h = tanh(x @ w_in + h @ w_h)` under `lax.scan`, SGD by hand."""

import jax
import jax.numpy as jnp
import numpy as np


def forward(params, xs):
    def cell(h, x):
        h = jnp.tanh(x @ params["w_in"] + h @ params["w_h"] + params["b"])
        return h, h

    h0 = jnp.zeros((xs.shape[0], params["w_h"].shape[0]))
    _, hs = jax.lax.scan(cell, h0, xs.transpose(1, 0, 2))
    return hs[-1] @ params["w_out"]


def loss_fn(params, xs, ys):
    return jnp.mean((forward(params, xs) - ys) ** 2)


def train_step(params, xs, ys):
    loss, grads = jax.value_and_grad(loss_fn)(params, xs, ys)
    return {name: params[name] - 0.05 * grads[name] for name in params}, loss


def grad_fn(params, xs, ys):
    return jax.grad(loss_fn)(params, xs, ys)


def make(h=64, d=8):
    rng = np.random.default_rng(0)
    params = {
        "w_in": rng.normal(size=(d, h)) / d**0.5,
        "w_h": 0.9 * np.linalg.qr(rng.normal(size=(h, h)))[0],
        "b": np.zeros(h),
        "w_out": rng.normal(size=(h, d)) / h**0.5,
    }
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    xs = rng.normal(size=(4, 32, 12, d))
    batches = [(jnp.asarray(x, jnp.float32), jnp.asarray(x.mean(axis=1), jnp.float32)) for x in xs]
    return train_step, (params,), batches
