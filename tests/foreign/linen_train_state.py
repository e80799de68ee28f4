"""A Linen MLP in Flax's `TrainState`, whose `apply_fn` and `tx` are functions."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.foreign import optax_mlp


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (64, 64):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(8)(x)


def loss_fn(params, state, x, y):
    return jnp.mean(jnp.square(state.apply_fn({"params": params}, x) - y))


def train_step(state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state, x, y)
    return state.apply_gradients(grads=grads), loss


def grad_fn(state, x, y):
    return jax.grad(loss_fn)(state.params, state, x, y)


def make():
    batches = optax_mlp.make()[2]
    model = MLP()
    params = model.init(jax.random.key(0), batches[0][0])["params"]
    return train_step, (TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3)),), batches
