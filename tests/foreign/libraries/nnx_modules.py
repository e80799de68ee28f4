"""Modules of Flax NNX, split into a graph definition and its variables."""

import jax.numpy as jnp
import optax
from flax import nnx

from tests.foreign.one_step import Program, integers, normal


def _split(model, loss_of):
    """Trains the parameters of a module; its other variables are another result."""
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params, others, *batch):
        model = nnx.merge(graph, params, others, copy=True)
        return loss_of(model, *batch), nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    return loss, nnx.to_pure_dict(params), others


def _fit(model, x, y):
    loss, _, others = _split(model, lambda model, x, y: jnp.mean((model(x) - y) ** 2))
    return Program(loss, nnx.state(model, nnx.Param), (others, x, y))


def attention():
    rngs = nnx.Rngs(0)
    model = nnx.MultiHeadAttention(8, 32, qkv_features=64, decode=False, normalize_qk=True, rngs=rngs)
    return _fit(model, normal(16, 12, 32), normal(16, 12, 32, seed=1))


def batch_norm_cnn():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Conv(8, 32, (3, 3), rngs=rngs), nnx.BatchNorm(32, rngs=rngs), nnx.silu,
        nnx.Conv(32, 32, (3, 3), feature_group_count=32, rngs=rngs), nnx.GroupNorm(32, 8, rngs=rngs),
        nnx.Dropout(0.1, rngs=rngs), nnx.ConvTranspose(32, 16, (2, 2), (2, 2), rngs=rngs),
    )  # fmt: skip
    return _fit(model, normal(8, 8, 8, 8), normal(8, 16, 16, 16, seed=1))


def recurrence():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.RNN(nnx.GRUCell(24, 64, rngs=rngs)), nnx.LoRALinear(64, 16, lora_rank=8, rngs=rngs))
    return _fit(model, normal(16, 10, 24), normal(16, 10, 16, seed=1))


def embedding():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Embed(64, 32, rngs=rngs), nnx.LinearGeneral(32, (4, 16), rngs=rngs),
        nnx.Einsum("bshd,hdv->bsv", (4, 16, 64), rngs=rngs),
    )  # fmt: skip

    def loss_of(model, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    loss, _, others = _split(model, loss_of)
    return Program(loss, nnx.state(model, nnx.Param), (others, integers(64, 16, 9)))


PROGRAMS = (attention, batch_norm_cnn, recurrence, embedding)
