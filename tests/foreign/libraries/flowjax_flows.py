"""Normalizing flows of FlowJAX, which are Equinox modules, fitted by maximum likelihood."""

import jax
import jax.numpy as jnp
import paramax
from flowjax import bijections, distributions, flows

from tests.foreign.one_step import Program, normal


def _fit(make, **options):
    flow = make(jax.random.key(0), base_dist=distributions.Normal(jnp.zeros(8)), **options)

    def loss(flow, x):
        return -jnp.mean(paramax.unwrap(flow).log_prob(x))

    return Program(loss, flow, (normal(64, 8),), plans=("fsdp:8", "dp:4 fsdp:2"))


def coupling():
    return _fit(flows.coupling_flow, transformer=bijections.RationalQuadraticSpline(knots=8, interval=4), flow_layers=4)


def autoregressive():
    return _fit(flows.masked_autoregressive_flow, nn_width=64, flow_layers=4)


def block_autoregressive():
    return _fit(flows.block_neural_autoregressive_flow)


def planar():
    return _fit(flows.planar_flow, flow_layers=4)


PROGRAMS = (coupling, autoregressive, block_autoregressive, planar)
