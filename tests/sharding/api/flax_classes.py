"""Flax module classes for tests of `auto_shard` on classes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx


def nnx_class() -> Any:
    class Net(nnx.Module):
        def __init__(self, width, hidden, *, rngs):
            self.up = nnx.Linear(width, hidden, rngs=rngs)
            self.norm = nnx.BatchNorm(hidden, rngs=rngs)
            self.down = nnx.Linear(hidden, width, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.norm(self.up(x))))

    return Net


def linen_class() -> Any:
    class Net(linen.Module):
        hidden: int = 128

        @linen.compact
        def __call__(self, x, train=False):
            x = linen.relu(linen.Dense(self.hidden)(x))
            return linen.Dense(64)(linen.Dropout(0.1, deterministic=not train)(x))

    return Net


def layout_of(tree: Any) -> list[Any]:
    """Return the shardings of the arrays of a tree."""
    return [x.sharding for x in jax.tree.leaves(tree)]
