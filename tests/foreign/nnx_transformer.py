"""A small language model in Flax NNX whose head is its embedding (`nnx.Embed.attend`)."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.ln1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, dim, decode=False, rngs=rngs)
        self.ln2 = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attn(self.ln1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class LanguageModel(nnx.Module):
    def __init__(self, vocab, dim, heads, layers, length, rngs):
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.pos = nnx.Embed(length, dim, rngs=rngs)
        self.blocks = nnx.List([Block(dim, heads, rngs) for _ in range(layers)])
        self.ln = nnx.LayerNorm(dim, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.pos(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.ln(x))


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def grad_fn(model, optimizer, tokens):
    return nnx.grad(loss_fn)(model, tokens)


def make():
    model = LanguageModel(vocab=64, dim=32, heads=8, layers=2, length=16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    # Counting up by a stride that differs from row to row.
    start, stride = rng.integers(0, 64, (4, 16, 1)), rng.integers(1, 5, (4, 16, 1))
    tokens = (start + stride * np.arange(17)) % 64
    return train_step, (model, optimizer), [(jnp.asarray(t, jnp.int32),) for t in tokens]
