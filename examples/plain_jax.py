"""A train step in plain JAX, written for one device and run on all of them: `python examples/plain_jax.py`."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0"))):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no accelerator here: 8 virtual CPU devices

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard import auto_shard

LAYERS, BATCH, WIDTH = 4, 64, 256
optimizer = optax.adamw(1e-3)


def create_state(rng):
    up, down = jax.random.split(rng)
    params = {
        "up": jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
    }
    return {"params": params, "opt": optimizer.init(params)}


def loss_fn(params, batch):
    def layer(x, weights):
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    outputs, _ = jax.lax.scan(layer, batch["inputs"], params)
    return jnp.mean((outputs - batch["targets"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def train(step, state, batch):
    losses = []
    for _ in range(5):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def main():
    rng = jax.random.key(0)
    inputs = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    batch = {"inputs": inputs, "targets": jnp.roll(inputs, 1, axis=1)}

    sharded_step = auto_shard(train_step, donate_argnums=0)
    print(sharded_step.plan(jax.eval_shape(create_state, rng), batch))  # nothing is allocated yet
    state = sharded_step.init(create_state, rng)  # each device creates its own shards
    losses = train(sharded_step, state, batch)
    print("sharded:   ", losses)

    expected = train(jax.jit(train_step), create_state(rng), batch)
    print("one device:", expected)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
