"""A sequence classifier in Flax Linen with a `TrainState`, Adam, gradient clipping and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState


class EncoderBlock(nn.Module):
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, train):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=self.heads)(y, y)
        x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.LayerNorm()(x)
        y = nn.Dense(4 * x.shape[-1])(y)
        y = nn.Dense(x.shape[-1])(nn.gelu(y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class Classifier(nn.Module):
    vocab: int = 64
    dim: int = 32
    heads: int = 8
    layers: int = 2
    classes: int = 8

    @nn.compact
    def __call__(self, tokens, train=False):
        x = nn.Embed(self.vocab, self.dim)(tokens)
        x = x + self.param("pos", nn.initializers.normal(0.02), (tokens.shape[1], self.dim))
        for _ in range(self.layers):
            x = EncoderBlock(self.heads, 0.1)(x, train)
        x = nn.LayerNorm()(x).mean(axis=1)
        return nn.Dense(self.classes)(x)


def loss_fn(params, state, tokens, labels):
    key = jax.random.fold_in(jax.random.key(1), state.step)
    logits = state.apply_fn({"params": params}, tokens, train=True, rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(state, tokens, labels):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state, tokens, labels)
    return state.apply_gradients(grads=grads), loss


def grad_fn(state, tokens, labels):
    return jax.grad(loss_fn)(state.params, state, tokens, labels)


def make():
    model = Classifier()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(4):
        tokens = rng.integers(0, 64, (32, 16))
        batches.append((jnp.asarray(tokens, jnp.int32), jnp.asarray(tokens.sum(1) % 8, jnp.int32)))
    return train_step, (state,), batches
