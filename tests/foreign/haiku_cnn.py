"""A Haiku CNN with batch statistics and dropout (`hk.transform_with_state`), trained by Optax."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

tx = optax.sgd(0.02, momentum=0.9)


def forward(images, is_training):
    x = hk.Conv2D(16, 3, name="conv1")(images)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9, name="norm1")(x, is_training))
    x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    x = jax.nn.relu(hk.Conv2D(32, 3, stride=2, name="conv2")(x))
    x = hk.Flatten()(x)
    x = hk.dropout(hk.next_rng_key(), 0.1, x) if is_training else x
    return hk.nets.MLP([64, 8])(x)


net = hk.transform_with_state(forward)


def loss_fn(params, statistics, key, images, labels):
    logits, statistics = net.apply(params, statistics, key, images, True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), statistics


def train_step(state, key, images, labels):
    params, statistics, opt_state = state
    (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, statistics, key, images, labels)
    updates, opt_state = tx.update(grads, opt_state)
    return (optax.apply_updates(params, updates), statistics, opt_state), loss


def grad_fn(state, key, images, labels):
    return jax.grad(loss_fn, has_aux=True)(*state[:2], key, images, labels)[0]


def make():
    rng = np.random.default_rng(0)
    batches = []
    for index in range(4):
        labels = rng.integers(0, 8, size=(32,), dtype=np.int32)
        images = rng.normal(size=(32, 8, 8, 3)) + labels[:, None, None, None] / 2
        batches.append((jax.random.key(index), jnp.asarray(images, jnp.float32), jnp.asarray(labels)))
    params, statistics = net.init(jax.random.key(0), batches[0][1], True)
    return train_step, ((params, statistics, tx.init(params)),), batches
