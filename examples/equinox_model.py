"""An Equinox model, whose arrays are the state of the train step: `python examples/equinox_model.py`."""

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


# An Equinox model contains arrays and functions, such as `gelu`. The arguments of a sharded function are arrays
# only, so the train step takes the arrays and combines them with the rest inside. No array is allocated here.
MODEL_SHAPES = eqx.filter_eval_shape(create_model, jax.random.key(0))
_, STATIC = eqx.partition(MODEL_SHAPES, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))


def create_state(rng):
    arrays, _ = eqx.partition(create_model(rng), eqx.is_array)
    return {"model": arrays, "opt": optimizer.init(arrays)}


def loss_fn(arrays, inputs, targets):
    model = eqx.combine(arrays, STATIC)
    return jnp.mean((jax.vmap(model)(inputs) - targets) ** 2)


def train_step(state, inputs, targets):
    loss, grads = jax.value_and_grad(loss_fn)(state["model"], inputs, targets)
    updates, opt = optimizer.update(grads, state["opt"], state["model"])
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
