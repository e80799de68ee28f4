"""A vision transformer in Flax Linen: patches, class token, dropout; AdamW without decay on norms, parameter EMA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state


class TrainState(train_state.TrainState):
    ema: Any
    key: jax.Array


class Block(nn.Module):
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, train):
        drop = nn.Dropout(self.dropout, deterministic=not train)
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            self.heads, use_bias=False, dropout_rate=self.dropout, deterministic=not train
        )(y)
        x = x + drop(y)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(x.shape[-1])(drop(y)))


class ViT(nn.Module):
    classes: int = 8
    dim: int = 32
    layers: int = 2

    @nn.compact
    def __call__(self, images, train=False):
        x = nn.Conv(self.dim, (4, 4), strides=(4, 4), padding="VALID")(images)
        x = x.reshape(x.shape[0], -1, self.dim)
        token = self.param("token", nn.initializers.normal(0.02), (1, 1, self.dim))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], self.dim))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        for _ in range(self.layers):
            x = Block(heads=4, dropout=0.1)(x, train)
        return nn.Dense(self.classes)(nn.LayerNorm()(x)[:, 0])


def train_step(state, batch):
    key, dropout = jax.random.split(state.key)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"], train=True, rngs={"dropout": dropout})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads, key=key)
    return state.replace(ema=optax.incremental_update(state.params, state.ema, 0.01)), loss


def make():
    model = ViT()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
    tx = optax.adamw(1e-3, weight_decay=0.05, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx, ema=params, key=jax.random.key(1))
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, 16)
    images = rng.normal(size=(16, 16, 16, 3)) + labels[:, None, None, None] / 4
    batch = {"image": jnp.asarray(images, jnp.float32), "label": jnp.asarray(labels, jnp.int32)}
    return train_step, (state,), batch
