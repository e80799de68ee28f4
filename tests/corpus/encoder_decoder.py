"""A translation model in Flax Linen: cross attention, padding masks, label smoothing; Adafactor."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

PAD = 0


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4 * x.shape[-1])(x)
        return nn.Dense(x.shape[-1])(nn.relu(y))


class EncoderLayer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(y, mask=mask)
        return x + MLP()(nn.LayerNorm()(x))


class DecoderLayer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, encoded, mask, cross_mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(y, mask=mask)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(y, encoded, mask=cross_mask)
        return x + MLP()(nn.LayerNorm()(x))


class Translator(nn.Module):
    vocab: int = 64
    dim: int = 32
    heads: int = 4

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(self.vocab, self.dim)
        position = self.param("position", nn.initializers.normal(0.02), (16, self.dim))
        x = embed(source) + position[: source.shape[1]]
        x = EncoderLayer(self.heads)(x, nn.make_attention_mask(source != PAD, source != PAD))
        encoded = nn.LayerNorm()(x)
        y = embed(target) + position[: target.shape[1]]
        mask = nn.combine_masks(nn.make_attention_mask(target != PAD, target != PAD), nn.make_causal_mask(target))
        y = DecoderLayer(self.heads)(y, encoded, mask, nn.make_attention_mask(target != PAD, source != PAD))
        return embed.attend(nn.LayerNorm()(y))


def loss_fn(params, apply_fn, source, target):
    logits = apply_fn({"params": params}, source, target[:, :-1])
    labels = optax.smooth_labels(jax.nn.one_hot(target[:, 1:], logits.shape[-1]), 0.1)
    losses = optax.softmax_cross_entropy(logits, labels)
    weights = (target[:, 1:] != PAD).astype(jnp.float32)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch["source"], batch["target"])
    return state.apply_gradients(grads=grads), loss


def make():
    rng = np.random.default_rng(0)

    def sentences(length):
        tokens = rng.integers(1, 64, (16, length))
        ends = rng.integers(4, length + 1, (16, 1))
        return jnp.asarray(np.where(np.arange(length) < ends, tokens, PAD), jnp.int32)

    batch = {"source": sentences(12), "target": sentences(11)}
    model = Translator()
    params = model.init(jax.random.key(0), batch["source"][:1], batch["target"][:1, :-1])["params"]
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    return train_step, (TrainState.create(apply_fn=model.apply, params=params, tx=tx),), batch
