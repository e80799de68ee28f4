"""Guides of NumPyro, and their evidence lower bounds."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO, autoguide

from tests.foreign.one_step import Program, integers, normal

PLANS = ("fsdp:8", "dp:4 fsdp:2")


def regression(x, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("features", x.shape[1]):
        weights = numpyro.sample("weights", dist.StudentT(4.0, 0.0, scale))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y)


def mixture(x):
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(8)))
    with numpyro.plate("components", 8):
        means = numpyro.sample("means", dist.Normal(0.0, 3.0).expand([4]).to_event(1))
    with numpyro.plate("rows", len(x)):
        components = dist.MultivariateNormal(means, jnp.eye(4))
        numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(shares), components), obs=x)


def _fit(model, guide, elbo, *batch):
    svi = SVI(model, guide, numpyro.optim.SGD(1e-3), elbo)
    state = svi.init(jax.random.key(0), *batch)
    constrain = svi.constrain_fn
    assert constrain is not None

    def loss(params, key, *batch):
        return svi.loss.loss(key, constrain(params), svi.model, svi.guide, *batch)

    return Program(loss, svi.optim.get_params(state.optim_state), (jax.random.key(1), *batch), plans=PLANS)


def multivariate_normal_guide():
    guide = autoguide.AutoMultivariateNormal(regression)
    return _fit(regression, guide, Trace_ELBO(4), normal(64, 15), normal(64, seed=1))


def autoregressive_guide():
    guide = autoguide.AutoIAFNormal(regression, num_flows=2, hidden_dims=[16, 16])
    return _fit(regression, guide, Trace_ELBO(), normal(64, 15), normal(64, seed=1))


def mixture_of_normals():
    return _fit(mixture, autoguide.AutoNormal(mixture), TraceMeanField_ELBO(), normal(64, 4))


def vocabulary(tokens):
    with numpyro.plate("topics", 8):
        words = numpyro.sample("words", dist.Dirichlet(jnp.ones(32)))
    with numpyro.plate("documents", len(tokens)):
        topics = numpyro.sample("topics_of", dist.Dirichlet(jnp.ones(8)))
        numpyro.sample("tokens", dist.Categorical((topics @ words)[:, None]).to_event(1), obs=tokens)


def topics():
    return _fit(vocabulary, autoguide.AutoDelta(vocabulary), Trace_ELBO(), integers(32, 16, 24))


PROGRAMS = (multivariate_normal_guide, autoregressive_guide, mixture_of_normals, topics)
