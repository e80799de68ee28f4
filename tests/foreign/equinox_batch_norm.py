"""An Equinox model with batch statistics: `eqx.nn.BatchNorm` averages over the axis that `jax.vmap` names."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

tx = optax.sgd(0.05, momentum=0.9)
jit = eqx.filter_jit


class Classifier(eqx.Module):
    conv: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    linear1: eqx.nn.Linear
    norm2: eqx.nn.BatchNorm
    linear2: eqx.nn.Linear
    slope: float  # a number: static

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(3, 16, 3, stride=2, padding=1, key=keys[0])
        self.norm1 = eqx.nn.BatchNorm(16, axis_name="batch", momentum=0.9, mode="batch")
        self.linear1 = eqx.nn.Linear(256, 64, key=keys[1])
        self.norm2 = eqx.nn.BatchNorm(64, axis_name="batch", momentum=0.9, mode="ema")
        self.linear2 = eqx.nn.Linear(64, 8, key=keys[2])
        self.slope = 0.1

    def __call__(self, x, state):
        x, state = self.norm1(self.conv(x), state)
        x = self.linear1(jax.nn.leaky_relu(x, self.slope).reshape(-1))
        x, state = self.norm2(x, state)
        return self.linear2(jax.nn.relu(x)), state


def loss_fn(model, statistics, images, labels):
    batched = jax.vmap(model.__call__, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, statistics = batched(images, statistics)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), statistics


def train_step(state, images, labels):
    model, statistics, opt_state = state
    (loss, statistics), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, statistics, images, labels)
    updates, opt_state = tx.update(grads, opt_state)
    return (eqx.apply_updates(model, updates), statistics, opt_state), loss


def grad_fn(state, images, labels):
    return eqx.filter_grad(loss_fn, has_aux=True)(state[0], state[1], images, labels)[0]


def make():
    model, statistics = eqx.nn.make_with_state(Classifier)(jax.random.key(0))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(4):
        labels = rng.integers(0, 8, size=(32,), dtype=np.int32)
        images = rng.normal(size=(32, 3, 8, 8)) + labels[:, None, None, None] / 2
        batches.append((jnp.asarray(images, jnp.float32), jnp.asarray(labels)))
    return train_step, ((model, statistics, tx.init(eqx.filter(model, eqx.is_inexact_array))),), batches
