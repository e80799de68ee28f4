"""A Penzai MLP of named arrays with dropout, whose parameters are bound to the model in the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz
from penzai.models.simple_mlp import DropoutMLP

tx = optax.adamw(3e-3)


def loss_fn(params, model, x, y, key):
    model = pz.bind_variables(model, [p.unfreeze_as_copy() for p in params])
    stream = pz.RandomStream(key, offset=pz.StateVariable(value=0))
    predicted = model(pz.nx.wrap(x).tag("batch", "features"), random_stream=stream)
    return jnp.mean(jnp.square(predicted.unwrap("batch", "features") - y))


def train_step(state, x, y, key):
    model, params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, model, x, y, key)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (model, optax.apply_updates(params, updates), opt_state), loss


def grad_fn(state, x, y, key):
    return jax.grad(loss_fn)(state[1], state[0], x, y, key)


def make():
    model = DropoutMLP.from_config(jax.random.key(0), [16, 64, 64, 8], drop_rate=0.1)
    model, params = pz.unbind_params(model, freeze=True)
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(16, 8))
    batches = []
    for index in range(4):
        x = rng.normal(size=(64, 16))
        y = np.tanh(x @ teacher)
        batches.append((jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), jax.random.key(index)))
    return train_step, ((model, params, tx.init(params)),), batches
