"""Modules of Flax Linen."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.foreign.one_step import Program, integers, normal


def _regression(module, x, y, *more):
    """Fits a module's output to `y`. Arguments after the first are passed to the module as they are."""
    params = module.init(jax.random.key(0), x, *more)["params"]
    return Program(lambda params, x, y: jnp.mean((module.apply({"params": params}, x, *more) - y) ** 2), params, (x, y))


def attention():
    return _regression(
        nn.MultiHeadDotProductAttention(num_heads=8, qkv_features=64), normal(16, 12, 32), normal(16, 12, 32, seed=1)
    )


def gated_recurrence():
    return _regression(nn.RNN(nn.GRUCell(64)), normal(16, 10, 24), normal(16, 10, 64, seed=1))


def bidirectional_lstm():
    both = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(32)), nn.RNN(nn.OptimizedLSTMCell(32)))
    return _regression(both, normal(16, 10, 24), normal(16, 10, 64, seed=1))


def convolutional_lstm():
    return _regression(nn.RNN(nn.ConvLSTMCell(16, (3, 3))), normal(8, 4, 8, 8, 8), normal(8, 4, 8, 8, 16, seed=1))


class _Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            y = nn.Conv(32, (3, 3), feature_group_count=4)(nn.silu(nn.GroupNorm(8)(x)))
            x = x + nn.ConvTranspose(x.shape[-1], (3, 3))(y)
        return nn.WeightNorm(nn.Dense(16))(nn.avg_pool(x, (2, 2), (2, 2)))


def group_norm_cnn():
    return _regression(_Residual(), normal(8, 8, 8, 32), normal(8, 4, 4, 16, seed=1))


class _Remat(nn.Module):
    """Scanned and rematerialized blocks with a tied embedding."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 32)
        block = nn.scan(nn.remat(_Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = block(name="blocks")(embed(tokens), None)
        return embed.attend(nn.RMSNorm()(x))


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.SelfAttention(4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(32)(nn.gelu(nn.DenseGeneral(128)(nn.LayerNorm()(x)))), None


def scanned_transformer():
    model, tokens = _Remat(), integers(64, 16, 12)
    params = model.init(jax.random.key(0), tokens)["params"]

    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return Program(loss, params, (tokens,))


PROGRAMS = (attention, gated_recurrence, bidirectional_lstm, convolutional_lstm, group_norm_cnn, scanned_transformer)
