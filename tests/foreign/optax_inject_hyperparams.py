"""An MLP whose learning rate and momentum are part of the optimizer's state: Optax's `inject_hyperparams`."""

import jax
import optax

from tests.foreign import optax_mlp
from tests.foreign.optax_mlp import grad_fn, loss_fn

__all__ = ["grad_fn", "make", "train_step"]

tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.cosine_decay_schedule(0.05, 20), momentum=0.9)


def train_step(state, x, y):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    hyperparams = {**opt_state.hyperparams, "momentum": 0.99 * opt_state.hyperparams["momentum"]}
    updates, opt_state = tx.update(grads, opt_state._replace(hyperparams=hyperparams), params)
    return (optax.apply_updates(params, updates), opt_state), loss


def make():
    _, ((params, _),), batches = optax_mlp.make()
    return train_step, ((params, tx.init(params)),), batches
