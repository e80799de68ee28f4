"""An Equinox model in the state of a train step, used as it is: `python examples/equinox_model.py`."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0"))):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no accelerator here: 8 virtual CPU devices

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard import auto_shard

BATCH, WIDTH = 64, 256
optimizer = optax.adamw(1e-3)


def create_model(rng):
    return eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=rng)


def create_state(rng):
    model = create_model(rng)  # arrays, and functions such as `gelu`, which are static
    return {"model": model, "opt": optimizer.init(eqx.filter(model, eqx.is_array))}


def loss_fn(model, inputs, targets):
    return jnp.mean((jax.vmap(model)(inputs) - targets) ** 2)


def train_step(state, inputs, targets):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(state["model"], inputs, targets)
    updates, opt = optimizer.update(grads, state["opt"], eqx.filter(state["model"], eqx.is_array))
    return {"model": eqx.apply_updates(state["model"], updates), "opt": opt}, loss


def train(step, state, inputs, targets):
    losses = []
    for _ in range(5):
        state, loss = step(state, inputs, targets)
        losses.append(float(loss))
    return losses


def main():
    rng = jax.random.key(0)
    inputs = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    targets = jnp.roll(inputs, 1, axis=1)

    sharded_step = auto_shard(train_step, donate_argnums=0)
    print(sharded_step.plan(eqx.filter_eval_shape(create_state, rng), inputs, targets))  # nothing is allocated yet
    state = sharded_step.init(create_state, rng)  # each device creates its own shards
    losses = train(sharded_step, state, inputs, targets)
    print("sharded:   ", losses)

    expected = train(eqx.filter_jit(train_step), create_state(rng), inputs, targets)
    print("one device:", expected)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
