"""Networks of Haiku."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.foreign.one_step import Program, integers, normal


def _classifier(make, x, labels):
    """Trains a network with batch statistics, which are another result."""
    net = hk.transform_with_state(lambda x: make()(x, is_training=True))
    params, statistics = net.init(jax.random.key(0), x)

    def loss(params, statistics, x, labels):
        logits, statistics = net.apply(params, statistics, None, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), statistics

    return Program(loss, params, (statistics, x, labels))


def resnet():
    return _classifier(lambda: hk.nets.ResNet18(16), normal(8, 32, 32, 3), integers(16, 8))


def mobilenet():
    strides, channels = (1, 2, 1, 2), (16, 32, 32, 64)
    return _classifier(
        lambda: hk.nets.MobileNetV1(strides, channels, num_classes=16), normal(8, 16, 16, 3), integers(16, 8)
    )


def vector_quantizer():
    """An autoencoder whose codes pass their gradient straight through."""

    def forward(x):
        codes = hk.nets.VectorQuantizer(embedding_dim=16, num_embeddings=64, commitment_cost=0.25)
        quantized = codes(hk.nets.MLP([64, 16])(x), is_training=True)
        return jnp.mean((hk.nets.MLP([64, 32])(quantized["quantize"]) - x) ** 2) + quantized["loss"]

    net = hk.without_apply_rng(hk.transform(forward))
    x = normal(32, 32)
    return Program(net.apply, net.init(jax.random.key(0), x), (x,))


def attention():
    def forward(tokens):
        x = hk.Embed(64, 32)(tokens)
        x = x + hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling())(x, x, x)
        return hk.nets.MLP([128, 64])(hk.RMSNorm(-1)(x))

    net = hk.without_apply_rng(hk.transform(forward))
    tokens = integers(64, 16, 9)

    def loss(params, tokens):
        logits = net.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return Program(loss, net.init(jax.random.key(0), tokens), (tokens,))


PROGRAMS = (resnet, mobilenet, vector_quantizer, attention)
