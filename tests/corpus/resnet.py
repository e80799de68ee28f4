"""A residual network in Flax Linen: batch norm with running statistics, strided convolutions; Nesterov momentum."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state


class TrainState(train_state.TrainState):
    batch_stats: Any


class Block(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, kernel_size=(3, 3), use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(conv(self.width, strides=self.stride)(x)))
        y = norm()(conv(self.width)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.width, (1, 1), strides=self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    classes: int = 8

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(16, (5, 5), strides=2, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = Block(16, stride=1)(x, train)
        x = Block(32, stride=2)(x, train)
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)))


def loss_fn(params, state, images, labels):
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, changed = state.apply_fn(variables, images, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(params) if w.ndim > 1)
    return loss + 1e-4 * decay / 2, (loss, changed["batch_stats"])


def train_step(state, batch):
    (_, (loss, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state, *batch)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def make():
    model = ResNet()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
    tx = optax.sgd(optax.cosine_decay_schedule(0.05, 100), momentum=0.9, nesterov=True)
    state = TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
    )
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, 32)
    images = rng.normal(size=(32, 16, 16, 3)) + labels[:, None, None, None] / 4
    return train_step, (state,), (jnp.asarray(images, jnp.float32), jnp.asarray(labels, jnp.int32))
