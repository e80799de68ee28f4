"""A diagonal state-space model (S5) in plain JAX: complex recurrence by `associative_scan`, gated; Muon."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

tx = optax.contrib.muon(2e-3)


def layer_norm(x, scale, bias):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-6) * scale + bias


def combine(before, after):
    (a, x), (b, y) = before, after
    return a * b, b * x + y


def state_space(layer, x):
    """`s_t = a s_{t-1} + b x_t`, `y_t = Re(c s_t) + d x_t` on `[batch, seq, dim]`, discretised by zero-order hold."""
    pole = -jnp.exp(layer["log_decay"]) + 1j * layer["frequency"]
    a = jnp.exp(pole * jnp.exp(layer["log_step"]))
    b = ((a - 1) / pole)[:, None] * (layer["b_re"] + 1j * layer["b_im"])
    driven = jnp.einsum("bsd,pd->bsp", x, b)
    _, states = jax.lax.associative_scan(combine, (jnp.broadcast_to(a, driven.shape), driven), axis=1)
    return jnp.einsum("bsp,dp->bsd", states, layer["c_re"] + 1j * layer["c_im"]).real + layer["d"] * x


def forward(params, x):
    x = x @ params["inputs"]
    for layer in params["layers"]:
        y = jax.nn.gelu(state_space(layer, layer_norm(x, layer["scale"], layer["bias"])))
        x = x + y * jax.nn.sigmoid(y @ layer["gate"])
    return jnp.mean(x, axis=1) @ params["outputs"]


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], *batch)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def make(channels=4, dim=32, poles=16, classes=8, layers=2):
    rng = np.random.default_rng(0)

    def weight(*shape, fan_in):
        return jnp.asarray(rng.normal(size=shape) / fan_in**0.5, jnp.float32)

    def layer():
        return {
            "scale": jnp.ones(dim),
            "bias": jnp.zeros(dim),
            "log_decay": jnp.full(poles, np.log(0.5), jnp.float32),
            "frequency": jnp.asarray(np.pi * np.arange(poles), jnp.float32),
            "log_step": jnp.asarray(rng.uniform(np.log(0.001), np.log(0.1), poles), jnp.float32),
            "b_re": weight(poles, dim, fan_in=dim),
            "b_im": weight(poles, dim, fan_in=dim),
            "c_re": weight(dim, poles, fan_in=poles),
            "c_im": weight(dim, poles, fan_in=poles),
            "d": weight(dim, fan_in=1),
            "gate": weight(dim, dim, fan_in=dim),
        }

    params = {
        "inputs": weight(channels, dim, fan_in=channels),
        "layers": [layer() for _ in range(layers)],
        "outputs": weight(dim, classes, fan_in=dim),
    }
    labels = rng.integers(0, classes, 16)
    series = np.sin(np.arange(24)[:, None] * (1 + labels[:, None, None]) / 8) + 0.1 * rng.normal(
        size=(16, 24, channels)
    )
    batch = (jnp.asarray(series, jnp.float32), jnp.asarray(labels, jnp.int32))
    return train_step, ({"params": params, "opt_state": tx.init(params)},), batch
