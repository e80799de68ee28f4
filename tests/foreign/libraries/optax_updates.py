"""Losses and optimizers of Optax and `optax.contrib`, on a multilayer perceptron."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tests.foreign.one_step import Program, integers, normal


def _perceptron(params, x):
    return jax.nn.gelu(x @ params["w"] + params["b"]) @ params["v"]


def _params():
    return {"w": normal(32, 64) / 6, "b": jnp.zeros(64), "v": normal(64, 32, seed=1) / 8}


def _regression(optimizer):
    def loss(params, x, y):
        return jnp.mean(optax.losses.huber_loss(_perceptron(params, x), y))

    return Program(loss, _params(), (normal(64, 32, seed=2), normal(64, 32, seed=3)), optimizer)


def muon():
    return _regression(contrib.muon(1e-2))


def schedule_free():
    return _regression(contrib.schedule_free_adamw(1e-2, warmup_steps=2))


def prodigy():
    return _regression(contrib.prodigy())


def adafactor():
    return _regression(optax.adafactor(1e-2, min_dim_size_to_factor=16))


def plateau():
    return _regression(optax.chain(optax.lamb(1e-2), contrib.reduce_on_plateau(patience=1)))


def contrastive():
    """A loss that compares every row of the batch with every other."""

    def loss(params, x, y):
        similar = optax.losses.ntxent(_perceptron(params, x), y, temperature=0.5)
        return jnp.mean(similar) + jnp.mean(
            optax.losses.triplet_margin_loss(x @ params["w"], x[::-1] @ params["w"], 2 * x @ params["w"])
        )

    return Program(loss, _params(), (normal(16, 32, seed=2), integers(4, 16)), optax.noisy_sgd(0.1, 0.01, key=1))


def connectionist():
    """Connectionist temporal classification of sequences."""

    def loss(params, x, labels):
        logits, zeros = _perceptron(params, x), jnp.zeros(x.shape[:2])
        return jnp.mean(optax.losses.ctc_loss(logits, zeros, labels, jnp.zeros(labels.shape)))

    return Program(loss, _params(), (normal(16, 12, 32, seed=2), 1 + integers(31, 16, 4)), optax.lion(1e-3))


PROGRAMS = (muon, schedule_free, prodigy, adafactor, plateau, contrastive, connectionist)
