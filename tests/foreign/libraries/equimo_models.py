"""Vision models of Equimo, which are Equinox modules."""

import equimo.models
import jax
import optax

from tests.foreign.one_step import Program, integers, normal


def _classifier(model, size=32):
    def loss(model, images, labels, key):
        logits = jax.vmap(model)(images, jax.random.split(key, len(images)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return Program(loss, model, (normal(8, 3, size, size), integers(16, 8), jax.random.key(1)))


def vision_transformer():
    model = equimo.models.VisionTransformer(
        img_size=32, in_channels=3, dim=64, patch_size=8, num_heads=[4], depths=[2], num_classes=16, reg_tokens=2,
        key=jax.random.key(0),
    )  # fmt: skip
    return _classifier(model)


def convnext():
    model = equimo.models.ConvNeXt(depths=[1, 1, 1, 1], dims=[16, 32, 32, 64], num_classes=16, key=jax.random.key(0))
    return _classifier(model)


def mlla():
    model = equimo.models.Mlla(
        img_size=32, in_channels=3, dim=16, depths=[1, 1], num_heads=[2, 4], num_classes=16, key=jax.random.key(0)
    )
    return _classifier(model)


PROGRAMS = (vision_transformer, convnext, mlla)
