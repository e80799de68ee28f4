"""Layers of Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.foreign.one_step import Program, integers, normal


def _regression(model, x, y):
    return Program(lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2), model, (x, y))


def convolutions():
    keys = jax.random.split(jax.random.key(0), 4)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 32, 3, padding="SAME", key=keys[0]),
            eqx.nn.GroupNorm(8, 32),
            eqx.nn.Lambda(jax.nn.silu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.ConvTranspose2d(32, 32, 3, padding="SAME", key=keys[1]),
            eqx.nn.WeightNorm(eqx.nn.Conv2d(32, 32, 1, key=keys[2])),
            eqx.nn.AdaptiveAvgPool2d(2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(128, 16, key=keys[3]),
        ]
    )
    return _regression(model, normal(16, 3, 8, 8), normal(16, 16, seed=1))


class _Recurrent(eqx.Module):
    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __call__(self, xs):
        zeros = jnp.zeros(self.cell.hidden_size)
        (h, _), _ = jax.lax.scan(lambda state, x: (self.cell(x, state), None), (zeros, zeros), xs)
        return self.head(h)


def recurrence():
    model = _Recurrent(eqx.nn.LSTMCell(24, 64, key=jax.random.key(0)), eqx.nn.Linear(64, 8, key=jax.random.key(1)))
    return _regression(model, normal(16, 10, 24), normal(16, 8, seed=1))


class _Encoder(eqx.Module):
    embed: eqx.nn.Embedding
    attend: eqx.nn.MultiheadAttention
    rotate: eqx.nn.RotaryPositionalEmbedding
    norm: eqx.nn.RMSNorm

    def __call__(self, tokens):
        x = jax.vmap(self.norm)(jax.vmap(self.embed)(tokens))
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))

        def rotated(q, k, v):
            return jax.vmap(self.rotate, 1, 1)(q), jax.vmap(self.rotate, 1, 1)(k), v

        return self.attend(x, x, x, mask=mask, process_heads=rotated) @ self.embed.weight.T


def attention():
    keys = jax.random.split(jax.random.key(0))
    attend = eqx.nn.MultiheadAttention(8, 64, use_query_bias=True, key=keys[1])
    model = _Encoder(
        eqx.nn.Embedding(32, 64, key=keys[0]), attend, eqx.nn.RotaryPositionalEmbedding(8), eqx.nn.RMSNorm(64)
    )

    def loss(model, tokens):
        logits = jax.vmap(model)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return Program(loss, model, (integers(32, 16, 9),))


def spectral_norm():
    """A layer with state, mapped over the batch, which returns its new estimate of the largest singular value."""
    make = eqx.nn.make_with_state(lambda key: eqx.nn.SpectralNorm(eqx.nn.Linear(32, 64, key=key), "weight", key=key))
    model, state = make(jax.random.key(0))

    def loss(model, state, x, y):
        out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((out - y) ** 2), state

    return Program(loss, model, (state, normal(16, 32), normal(16, 64, seed=1)))


PROGRAMS = (convolutions, recurrence, attention, spectral_norm)
