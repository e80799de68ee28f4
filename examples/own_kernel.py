"""A Pallas kernel of one's own, with a rule that says how it may be sharded: `python examples/own_kernel.py`."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0"))):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no accelerator here: 8 virtual CPU devices

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import autoshard

BATCH, SEQ, EMBED = 16, 32, 128


def kernel(x_ref, scale_ref, out_ref):
    x = x_ref[...]
    out_ref[...] = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale_ref[...]


def plain_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def forward(x, scale):
    return fused_norm(x, scale), (x, scale)


def backward(saved, gradient):
    return jax.vjp(plain_norm, *saved)[1](gradient)


# Batch and sequence may be sharded. Each shard needs the whole of `d`, which the kernel reduces. The result is linear
# in operand 1, the scale.
@autoshard.operator("b s d, d -> b s d; whole d; linear 1", vjp=(forward, backward))
def fused_norm(x, scale):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, scale)


def loss_fn(params, batch):
    hidden = fused_norm(batch, params["scale"]) @ params["weight"]
    return jnp.mean((hidden - batch) ** 2)


def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda value, grad: value - 10 * grad, params, grads), loss


def train(step, params, batch):
    losses = []
    for _ in range(5):
        params, loss = step(params, batch)
        losses.append(float(loss))
    return losses


def main():
    batch = jax.random.normal(jax.random.key(1), (BATCH, SEQ, EMBED))
    params = {"scale": jnp.ones(EMBED), "weight": jnp.zeros((EMBED, EMBED))}

    # Runs the kernel on the shards that its rule allows and compares: an empty list means that the rule holds.
    assert autoshard.check_rule(fused_norm, batch, params["scale"], partitioner=False) == []

    sharded_step = autoshard.auto_shard(train_step)
    print(sharded_step.plan(params, batch))
    losses, expected = train(sharded_step, params, batch), train(jax.jit(train_step), params, batch)
    print("sharded:   ", losses)
    print("one device:", expected)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
