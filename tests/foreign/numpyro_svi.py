"""A Bayesian logistic regression in NumPyro, fitted by stochastic variational inference (`SVI.update`)."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal


def model(x, y, size):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("hidden", 32):
        projection = numpyro.param("projection", lambda key: jax.random.normal(key, (16, 32)) / 4)
        weights = numpyro.sample("weights", dist.Normal(0.0, scale))
    bias = numpyro.sample("bias", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", size, subsample_size=len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(x @ projection) @ weights + bias), obs=y)


svi = SVI(model, AutoNormal(model), numpyro.optim.SGD(2e-5), Trace_ELBO(num_particles=4), size=512)


def train_step(state, x, y):
    return svi.update(state, x, y)


def grad_fn(state, x, y):
    constrain = svi.constrain_fn
    assert constrain is not None

    def loss_fn(params):
        return svi.loss.loss(jax.random.key(1), constrain(params), svi.model, svi.guide, x, y, size=512)

    return jax.grad(loss_fn)(svi.optim.get_params(state.optim_state))


@cache
def make():
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=16)
    batches = []
    for _ in range(4):
        x = rng.normal(size=(64, 16))
        batches.append((jnp.asarray(x, jnp.float32), jnp.asarray(x @ teacher > 0, jnp.float32)))
    return train_step, (svi.init(jax.random.key(0), *batches[0]),), batches
