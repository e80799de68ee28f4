"""A step of a few layers, each with two matrices and a scale, and its arguments."""

from functools import partial

import jax
import jax.numpy as jnp

from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.sharding.planner.bound_plan import bound_or_error

LAYERS, BATCH, SEQ, WIDTH, HIDDEN = 2, 16, 32, 32, 64  # so many rows that it is cheaper to gather a parameter


@partial(jax.jit, static_argnums=0)
def parameters(dtype=jnp.float32):
    def one(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (WIDTH, HIDDEN), dtype) * 0.1,
            "down": jax.random.normal(down, (HIDDEN, WIDTH), dtype) * 0.1,
            "scale": jnp.ones(WIDTH, dtype),
        }

    return [one(key) for key in jax.random.split(jax.random.key(0), LAYERS)]


def inputs(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (BATCH, SEQ, WIDTH), dtype)


def layer(p, h):
    x = h * p["scale"] / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return h + jnp.tanh(jnp.einsum("bsd,df->bsf", x, p["up"])) @ p["down"]


def step(layers, x):
    """A step of layers that are written out, or of stacked ones."""

    def loss(layers):
        if isinstance(layers, dict):
            h, _ = jax.lax.scan(lambda h, p: (jax.checkpoint(layer)(p, h), None), x, layers)
        else:
            h = x
            for p in layers:
                h = layer(p, h)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(layers)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / (1 + norm), layers, gradients), value


def overlap_of(made) -> ModuleOverlap:
    """The table of a plan, resolved."""
    found = bound_or_error(made.bound).problem.overlap
    assert found is not None
    return found


def stacked(layers):
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)
