"""Models and layers of Keras on JAX, called without state."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import dataclasses  # noqa: E402

import keras  # noqa: E402
from keras import layers  # noqa: E402

from tests.foreign.one_step import Program, integers, normal  # noqa: E402


def _train(model, loss, x, y):
    """Trains a model; batch statistics and the seeds of dropout are another result."""

    def total(params, others, x, y):
        out, others, *_ = model.stateless_call(params, others, x, training=True)
        return loss(y, out), others

    params, others = ([v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables))
    return Program(total, params, (others, x, y))


def _classify(model, x):
    return _train(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), x, integers(16, len(x)))


def mobilenet():
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2((32, 32, 3), 0.35, weights=None, classes=16, classifier_activation=None)
    # Inputs that are changed by 1e-7 change its gradients by 7e-5, on one device.
    return dataclasses.replace(_classify(model, normal(8, 32, 32, 3)), tolerance=1e-3)


def recurrence():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((10, 24)),
            layers.Bidirectional(layers.LSTM(32, return_sequences=True)),
            layers.GRU(64),
            layers.Dense(16),
        ]
    )
    return _classify(model, normal(16, 10, 24))


def transformer():
    keras.utils.set_random_seed(0)
    tokens = layers.Input((12,), dtype="int32")
    x = layers.Embedding(64, 32)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8, dropout=0.1)(x, x, use_causal_mask=True))
    x = layers.RMSNormalization()(x + layers.Dense(32)(layers.Dense(128, "gelu")(x)))
    outputs = layers.Dense(16)(layers.GlobalMaxPooling1D()(x))
    return _classify(keras.Model(tokens, outputs), integers(64, 16, 12, seed=1))


def convolutions():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((8, 8, 8)),
            layers.Conv2D(32, 3, padding="same"),
            layers.GroupNormalization(8),
            layers.PReLU(),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.UpSampling2D(2, interpolation="bilinear"),
            layers.Conv2DTranspose(16, 3, padding="same"),
            layers.SpatialDropout2D(0.1, seed=1),
            layers.Flatten(),
            layers.Dense(16),
        ]
    )
    return _classify(model, normal(16, 8, 8, 8))


def convolutional_lstm():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((4, 8, 8, 8)),
            layers.ConvLSTM2D(16, 3),
            layers.Flatten(),
            layers.UnitNormalization(),
            layers.Dense(16),
        ]
    )
    return _classify(model, normal(8, 4, 8, 8, 8))


PROGRAMS = (mobilenet, recurrence, transformer, convolutions, convolutional_lstm)
