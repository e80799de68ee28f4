"""A Haiku LSTM over characters (`hk.transform`, `hk.dynamic_unroll`), trained by Optax."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.03, momentum=0.9))


@hk.transform
def net(tokens):
    core = hk.LSTM(64)
    x = hk.Embed(32, 64)(tokens)
    outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(len(tokens)), time_major=False)
    return hk.Linear(32)(hk.LayerNorm(-1, True, True)(outputs))


def loss_fn(params, tokens):
    logits = net.apply(params, None, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = tx.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


def grad_fn(state, tokens):
    return jax.grad(loss_fn)(state[0], tokens)


def make():
    rng = np.random.default_rng(0)
    tokens = [(rng.integers(0, 32, (16, 1)) + np.arange(13)) % 32 for _ in range(4)]
    params = net.init(jax.random.key(0), jnp.asarray(tokens[0][:, :-1]))
    return train_step, ((params, tx.init(params)),), [(jnp.asarray(t, jnp.int32),) for t in tokens]
