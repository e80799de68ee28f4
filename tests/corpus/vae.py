"""A variational autoencoder in Flax NNX whose noise comes from a random stream in the model; Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Encoder(nnx.Module):
    def __init__(self, pixels, hidden, latent, rngs):
        self.hidden = nnx.Linear(pixels, hidden, rngs=rngs)
        self.mean = nnx.Linear(hidden, latent, rngs=rngs)
        self.log_std = nnx.Linear(hidden, latent, rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, x):
        x = nnx.relu(self.hidden(x))
        mean, std = self.mean(x), jnp.exp(self.log_std(x))
        return mean + std * jax.random.normal(self.rngs.noise(), mean.shape), mean, std


class VAE(nnx.Module):
    def __init__(self, shape, hidden, latent, rngs):
        self.shape, pixels = shape, int(np.prod(shape))
        self.encoder = Encoder(pixels, hidden, latent, rngs)
        self.decoder = nnx.Sequential(
            nnx.Linear(latent, hidden, rngs=rngs), nnx.relu, nnx.Linear(hidden, pixels, rngs=rngs)
        )

    def __call__(self, images):
        z, mean, std = self.encoder(images.reshape(images.shape[0], -1))
        return self.decoder(z).reshape(-1, *self.shape), mean, std


def loss_fn(model, images):
    logits, mean, std = model(images)
    kl = 0.5 * jnp.mean(jnp.sum(mean**2 + std**2 - 2 * jnp.log(std) - 1, axis=-1))
    likelihood = -jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, images), axis=(1, 2)))
    return kl - likelihood


def train_step(model, optimizer, images):
    loss, grads = nnx.value_and_grad(loss_fn)(model, images)
    optimizer.update(model, grads)
    return loss


def make():
    model = VAE((8, 8), hidden=64, latent=16, rngs=nnx.Rngs(0, noise=1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    images = np.random.default_rng(0).random((32, 8, 8)) < 0.3
    return train_step, (model, optimizer), jnp.asarray(images, jnp.float32)
