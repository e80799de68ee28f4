"""An MLP that is updated every fourth step, with Optax's `MultiSteps`."""

import jax
import optax

from tests.foreign import optax_mlp
from tests.foreign.optax_mlp import grad_fn, loss_fn

__all__ = ["grad_fn", "make", "train_step"]

tx = optax.MultiSteps(optax.adamw(3e-3), every_k_schedule=4)


def train_step(state, x, y):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def make():
    _, ((params, _),), batches = optax_mlp.make()
    return train_step, ((params, tx.init(params)),), batches
