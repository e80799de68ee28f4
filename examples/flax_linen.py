"""A Flax Linen module in a train step over `TrainState`: `python examples/flax_linen.py`."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0"))):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no accelerator here: 8 virtual CPU devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from autoshard import auto_shard

BATCH, SEQ, EMBED, HEADS = 16, 32, 128, 8


class Block(nn.Module):
    """A transformer block; no sharding annotation anywhere."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * EMBED)(nn.LayerNorm()(x)))
        return x + nn.Dense(EMBED)(hidden)


model, optimizer = Block(), optax.adamw(1e-3)


def create_state(rng):
    variables = model.init(rng, jnp.zeros((1, SEQ, EMBED)))
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)


def train_step(state, inputs, targets):
    def loss_fn(params):
        return jnp.mean((state.apply_fn({"params": params}, inputs) - targets) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(step, state, inputs, targets):
    losses = []
    for _ in range(5):
        state, loss = step(state, inputs, targets)
        losses.append(float(loss))
    return losses


def main():
    rng = jax.random.key(0)
    inputs = jax.random.normal(jax.random.key(1), (BATCH, SEQ, EMBED))
    targets = jnp.roll(inputs, 1, axis=1)

    sharded_step = auto_shard(train_step, donate_argnums=0)
    print(sharded_step.plan(jax.eval_shape(create_state, rng), inputs, targets))  # nothing is allocated yet
    state = sharded_step.init(create_state, rng)  # each device creates its own shards
    losses = train(sharded_step, state, inputs, targets)
    print("sharded:   ", losses)

    expected = train(jax.jit(train_step), create_state(rng), inputs, targets)
    print("one device:", expected)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
