"""A segmentation network in Flax NNX: group norm, strided and transposed convolutions, resizing, skips; RMSProp."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Stage(nnx.Module):
    def __init__(self, inputs, outputs, rngs, strides=1):
        self.conv = nnx.Conv(inputs, outputs, (3, 3), strides=strides, use_bias=False, rngs=rngs)
        self.norm = nnx.GroupNorm(outputs, num_groups=4, rngs=rngs)

    def __call__(self, x):
        return nnx.silu(self.norm(self.conv(x)))


class UNet(nnx.Module):
    def __init__(self, channels, classes, rngs, width=16):
        self.stem = Stage(channels, width, rngs)
        self.down1 = Stage(width, 2 * width, rngs, strides=2)
        self.down2 = Stage(2 * width, 4 * width, rngs, strides=2)
        self.up1 = nnx.ConvTranspose(4 * width, 2 * width, (3, 3), strides=2, rngs=rngs)
        self.join1 = Stage(4 * width, 2 * width, rngs)
        self.join2 = Stage(3 * width, width, rngs)
        self.head = nnx.Conv(width, classes, (1, 1), rngs=rngs)

    def __call__(self, x):
        a = self.stem(x)
        b = self.down1(a)
        c = self.up1(self.down2(b))
        c = self.join1(jnp.concatenate([b, c], axis=-1))
        c = jax.image.resize(c, (*a.shape[:3], c.shape[-1]), "bilinear")
        return self.head(self.join2(jnp.concatenate([a, c], axis=-1)))


def loss_fn(model, images, masks):
    logits = model(images)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, masks).mean()
    predicted, expected = jax.nn.softmax(logits), jax.nn.one_hot(masks, logits.shape[-1])
    overlap = jnp.sum(predicted * expected, axis=(1, 2))
    dice = 2 * overlap / (jnp.sum(predicted + expected, axis=(1, 2)) + 1.0)
    return cross_entropy + 1 - jnp.mean(dice)


def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch["image"], batch["mask"])
    optimizer.update(model, grads)
    return loss


def make():
    model = UNet(channels=3, classes=4, rngs=nnx.Rngs(0))
    tx = optax.chain(optax.clip(1.0), optax.rmsprop(1e-3, momentum=0.9))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rng = np.random.default_rng(0)
    masks = np.kron(rng.integers(0, 4, (16, 4, 4)), np.ones((4, 4), int))
    images = rng.normal(size=(16, 16, 16, 3)) + masks[..., None]
    batch = {"image": jnp.asarray(images, jnp.float32), "mask": jnp.asarray(masks, jnp.int32)}
    return train_step, (model, optimizer), batch
