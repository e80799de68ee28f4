"""A Flax NNX module and its train step, each sharded by a decorator: `python examples/flax_nnx.py`."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0"))):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no accelerator here: 8 virtual CPU devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from autoshard import auto_shard

WIDTH, BATCH = 256, 64


class MLP(nnx.Module):
    """A residual block; no sharding annotation anywhere."""

    def __init__(self, width, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def train_step(model, optimizer, inputs, targets):
    """Updates the model and the optimizer in place, as under `nnx.jit`."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(inputs) - targets) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def make_optimizer(model):
    return nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def train(step, model, optimizer, inputs, targets):
    return [float(step(model, optimizer, inputs, targets)) for _ in range(5)]


def main():
    inputs = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    targets = jnp.roll(inputs, 1, axis=1)

    # `.sharded` creates the parameters in the shardings that are best for a call on `example`.
    model = auto_shard(MLP).sharded(WIDTH, rngs=nnx.Rngs(0), example=(inputs,))
    sharded_step = auto_shard(train_step)
    optimizer = make_optimizer(model)  # its state is sharded like the parameters
    print(sharded_step.plan(model, optimizer, inputs, targets))
    losses = train(sharded_step, model, optimizer, inputs, targets)
    print("sharded:   ", losses)
    print("up.kernel: ", model.up.kernel[...].sharding)

    model = MLP(WIDTH, rngs=nnx.Rngs(0))
    expected = train(nnx.jit(train_step), model, make_optimizer(model), inputs, targets)
    print("one device:", expected)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
