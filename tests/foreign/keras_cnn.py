"""A Keras model with batch statistics and dropout, trained without state: `stateless_call` and `stateless_apply`."""

import os
from functools import cache

os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402


@cache
def parts():
    """Returns the model, its optimizer and its loss, built once; they keep no state between steps."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("silu"),
            layers.SeparableConv2D(32, 3, strides=2, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.1, seed=1),
            layers.Dense(64, activation="relu"),
            layers.Dense(8),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=10.0)
    optimizer.build(model.trainable_variables)
    return model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loss_fn(trainable, others, images, labels):
    model, _, loss = parts()
    logits, others, *_ = model.stateless_call(trainable, others, images, training=True)
    return loss(labels, logits), others


def train_step(state, images, labels):
    trainable, others, opt_variables = state
    (loss, others), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable, others, images, labels)
    trainable, opt_variables = parts()[1].stateless_apply(opt_variables, grads, trainable)
    return (trainable, others, opt_variables), loss


def grad_fn(state, images, labels):
    return jax.grad(loss_fn, has_aux=True)(*state[:2], images, labels)[0]


def make():
    model, optimizer, _ = parts()
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(4):
        labels = rng.integers(0, 8, size=(32,), dtype=np.int32)
        images = rng.normal(size=(32, 8, 8, 3)) + labels[:, None, None, None] / 2
        batches.append((jnp.asarray(images, jnp.float32), jnp.asarray(labels)))
    return train_step, (tuple([v.value for v in part] for part in variables),), batches
