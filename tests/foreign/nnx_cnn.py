"""An image classifier in Flax NNX, after Flax's MNIST tutorial: convolutions, batch norm, dropout."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.linear1 = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear2 = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.silu(self.norm1(self.conv1(x))), (2, 2), strides=(2, 2))
        x = nnx.avg_pool(nnx.silu(self.norm2(self.conv2(x))), (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nnx.silu(self.linear1(x))
        return self.linear2(self.dropout(x))


def loss_fn(model, images, labels):
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(model, optimizer, images, labels):
    loss, grads = nnx.value_and_grad(loss_fn)(model, images, labels)
    optimizer.update(model, grads)
    return loss


def grad_fn(model, optimizer, images, labels):
    return nnx.grad(loss_fn)(model, images, labels)


def make():
    model = CNN(nnx.Rngs(0))
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(0.02, momentum=0.9), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(4):
        labels = rng.integers(0, 16, size=(32,), dtype=np.int32)
        images = rng.normal(size=(32, 16, 16, 8)) + labels[:, None, None, None] / 8
        batches.append((jnp.asarray(images, jnp.float32), jnp.asarray(labels)))
    return train_step, (model, optimizer), batches
