"""A language model in Flax NNX: rotary positions, grouped queries, SwiGLU, remat; AdamW with warm-up and clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def rotate(x):
    """Rotary positions on `[batch, seq, heads, head_dim]`."""
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * speed
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


class Attention(nnx.Module):
    def __init__(self, dim, heads, kv_heads, rngs):
        head_dim = dim // heads
        self.q = nnx.LinearGeneral(dim, (heads, head_dim), use_bias=False, rngs=rngs)
        self.kv = nnx.LinearGeneral(dim, (2, kv_heads, head_dim), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((heads, head_dim), dim, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x):
        kv = self.kv(x)
        k, v = kv[:, :, 0], kv[:, :, 1]
        return self.out(jax.nn.dot_product_attention(rotate(self.q(x)), rotate(k), v, is_causal=True))


class Block(nnx.Module):
    def __init__(self, dim, heads, kv_heads, rngs):
        self.norm1 = nnx.RMSNorm(dim, rngs=rngs)
        self.attention = Attention(dim, heads, kv_heads, rngs)
        self.norm2 = nnx.RMSNorm(dim, rngs=rngs)
        self.gate_up = nnx.Linear(dim, 2 * 3 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        gate, up = jnp.split(self.gate_up(self.norm2(x)), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * up)


class Decoder(nnx.Module):
    def __init__(self, vocab, dim, heads, kv_heads, layers, rngs):
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.blocks = nnx.List([Block(dim, heads, kv_heads, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x)
        return self.head(self.norm(x))


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def make():
    model = Decoder(vocab=64, dim=32, heads=4, kv_heads=2, layers=2, rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 3e-3, 10, 100)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17))
    return train_step, (model, optimizer), jnp.asarray(tokens, jnp.int32)
