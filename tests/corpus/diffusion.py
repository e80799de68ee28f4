"""A denoising diffusion model in Flax Linen: cosine schedule, time embedding, averaged parameters; clipped AdamW."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

STEPS = 100
PHASES = (np.arange(STEPS) / STEPS + 0.008) / 1.008 * np.pi / 2
SIGNAL = jnp.asarray(np.cos(PHASES) ** 2, jnp.float32)  # fraction of the image that remains
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-4))


class State(NamedTuple):
    params: Any
    ema: Any
    opt_state: Any
    key: jax.Array


def time_embedding(t, dim):
    speed = jnp.exp(-jnp.log(10_000.0) * jnp.arange(dim // 2) / (dim // 2))
    angle = t[:, None].astype(jnp.float32) * speed
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, time):
        y = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(4)(x)))
        scale, shift = jnp.split(nn.Dense(2 * self.width)(time)[:, None, None], 2, axis=-1)
        y = nn.GroupNorm(4)(y) * (1 + scale) + shift
        return x + nn.Conv(self.width, (3, 3))(nn.swish(y))


class Denoiser(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, x, t):
        time = nn.swish(nn.Dense(self.width)(time_embedding(t, self.width)))
        y = nn.Conv(self.width, (3, 3))(x)
        for _ in range(2):
            y = Block(self.width)(y, time)
        return nn.Conv(x.shape[-1], (3, 3))(nn.swish(nn.GroupNorm(4)(y)))


model = Denoiser()


def loss_fn(params, key, images):
    time_key, noise_key = jax.random.split(key)
    t = jax.random.randint(time_key, images.shape[:1], 0, STEPS)
    noise = jax.random.normal(noise_key, images.shape)
    signal = SIGNAL[t][:, None, None, None]
    noisy = jnp.sqrt(signal) * images + jnp.sqrt(1 - signal) * noise
    return jnp.mean((model.apply(params, noisy, t) - noise) ** 2)  # pyright: ignore[reportOperatorIssue]


def train_step(state, images):
    key, step_key = jax.random.split(state.key)
    loss, grads = jax.value_and_grad(loss_fn)(state.params, step_key, images)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = jax.tree.map(lambda e, p: 0.999 * e + 0.001 * p, state.ema, params)
    return State(params, ema, opt_state, key), loss


def make():
    images = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (64, 8, 8, 3)), jnp.float32)
    params = model.init(jax.random.key(0), images[:1], jnp.zeros(1, jnp.int32))
    return train_step, (State(params, params, tx.init(params), jax.random.key(1)),), images
