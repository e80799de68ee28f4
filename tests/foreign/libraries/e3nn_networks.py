"""Equivariant networks of e3nn-jax, whose arrays carry their representations."""

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
from e3nn_jax import flax as e3nn_flax

from tests.foreign.one_step import Program, integers, normal

PLANS = ("fsdp:8", "dp:4 fsdp:2")


class _Messages(nn.Module):
    """One layer of messages between atoms: tensor products with spherical harmonics, and gated nonlinearities."""

    @nn.compact
    def __call__(self, features, positions, senders, receivers):
        offsets = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", offsets, True)
        radial = e3nn_flax.MultiLayerPerceptron([32, 16], jax.nn.silu)(e3nn.norm(offsets).array)
        x = e3nn_flax.Linear("16x0e + 8x1o")(e3nn.IrrepsArray("16x0e", features))
        messages = e3nn_flax.Linear("16x0e + 8x1o + 8x2e")(e3nn.tensor_product(x[senders], harmonics)) * radial[:, :1]
        gathered = e3nn.scatter_sum(messages, dst=receivers, output_size=len(features))
        gated = e3nn.gate(e3nn_flax.Linear("16x0e + 16x0e + 8x1o + 8x2e")(gathered))
        return e3nn_flax.Linear("4x0e")(gated).array


def message_passing():
    model = _Messages()
    batch = (normal(64, 16), normal(64, 3, seed=1), integers(64, 256), integers(64, 256, seed=1))
    params = model.init(jax.random.key(0), *batch)["params"]

    def loss(params, *batch):
        return jnp.mean((model.apply({"params": params}, *batch) - 1) ** 2)

    return Program(loss, params, batch, plans=PLANS)


def perceptron():
    model, x = e3nn_flax.MultiLayerPerceptron([64, 64, 8], jax.nn.gelu, output_activation=False), normal(64, 16)
    params = model.init(jax.random.key(0), x)["params"]
    return Program(lambda params, x: jnp.mean((model.apply({"params": params}, x) - 1) ** 2), params, (x,))


PROGRAMS = (message_passing, perceptron)
