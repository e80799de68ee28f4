"""The vision transformer: published sizes, patches, both kinds of pooling, and training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from autoshard.models import VIT, ViT, ViTConfig, workload
from tests.arrays import array
from tests.models.small import called, count, filled_as, stripes_batch, trained

SMALL = ViTConfig(image_size=16, patch=4, classes=8, layers=2, heads=2, width=16)
MEAN = dataclasses.replace(SMALL, pool="mean")

# Counted in the published checkpoints, with a head of 1000 classes.
PARAMETERS = {
    "vit-ti16": 5_717_416,
    "vit-s16": 22_050_664,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
}


def model_factory(cfg):
    return lambda rngs: ViT(cfg, rngs=rngs)


def images(rows=3):
    return array(np.random.default_rng(0).normal(size=(rows, 16, 16, 3)), jnp.float32)


def patches(x):
    """Splits `[batch, 16, 16, 3]` into `[batch, 16 patches, 4, 4, 3]`, row by row."""
    return jnp.stack([x[:, r : r + 4, c : c + 4] for r in range(0, 16, 4) for c in range(0, 16, 4)], axis=1)


def test_every_size_is_published():
    assert set(VIT) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    assert count(model_factory(VIT[name])) == PARAMETERS[name]


def test_patches_are_a_convolution():
    model = filled_as(model_factory(MEAN))
    numbers = ("NHWC", "HWIO", "NHWC")
    convolved = lax.conv_general_dilated(images(), model.patch[...], (4, 4), "VALID", dimension_numbers=numbers)
    expected = (convolved + model.patch_bias[...]).reshape(3, 16, 16) + model.position[...]
    np.testing.assert_allclose(model._embed(images()), expected, rtol=1e-4, atol=1e-5)


def test_the_class_token_precedes_the_patches():
    token, mean = filled_as(model_factory(SMALL)), filled_as(model_factory(MEAN))
    for name in ("patch", "patch_bias"):
        getattr(token, name)[...] = getattr(mean, name)[...]
    position = jnp.concatenate([token.position[...][:1], mean.position[...]])
    token.position[...] = position
    embedded = token._embed(images())
    assert embedded.shape == (3, 17, 16) and SMALL.positions == 17 and MEAN.positions == 16
    np.testing.assert_allclose(embedded[:, 0], jnp.tile(token.token[...] + position[0], (3, 1)), rtol=1e-6)
    np.testing.assert_allclose(embedded[:, 1:], mean._embed(images()), rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("cfg", [SMALL, MEAN], ids=["token", "mean"])
def test_without_positions_the_order_of_patches_does_not_matter(cfg):
    """Attention has no causal mask: only the position embedding encodes the order of patches."""
    model = filled_as(model_factory(cfg), 0.3)
    order = np.random.default_rng(1).permutation(16)
    shuffled = patches(images())[:, order].reshape(3, 4, 4, 4, 4, 3).swapaxes(2, 3).reshape(3, 16, 16, 3)
    np.testing.assert_array_equal(patches(shuffled), patches(images())[:, order])
    ordered, other = called(model, lambda model, *both: [model(x) for x in both], images(), shuffled)
    assert np.max(np.abs(ordered - other)) > 1e-2
    model.position[...] = jnp.zeros_like(model.position[...])
    one, other = called(model, lambda model, *both: [model(x) for x in both], images(), shuffled)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert np.max(np.abs(one - ordered)) > 1e-2


@pytest.mark.slow
def test_scanned_and_unrolled_are_the_same_model():
    cfg = dataclasses.replace(SMALL, dropout=0.2)
    scanned = filled_as(model_factory(cfg))
    graph, state = nnx.split(
        nnx.eval_shape(lambda: model_factory(dataclasses.replace(cfg, scan_layers=False))(nnx.Rngs(0)))
    )
    values = nnx.to_pure_dict(nnx.state(scanned))
    stacked = values["blocks"]
    values["blocks"] = {i: jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(cfg.layers)}
    nnx.replace_by_pure_dict(state, values)

    def logits(model, images, key):
        return model(images, deterministic=False, rngs=key)

    one, other = (called(model, logits, images(), jax.random.key(0)) for model in (scanned, nnx.merge(graph, state)))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert np.max(np.abs(one - called(scanned, logits, images(), jax.random.key(1)))) > 1e-3


def test_the_loss_is_the_cross_entropy_of_the_labels():
    model, batch = filled_as(model_factory(MEAN)), stripes_batch(0, 3, 16)
    logits, (total, weight) = called(model, lambda model, batch: (model(batch["images"]), model.loss(batch)), batch)
    log_probabilities = np.asarray(jax.nn.log_softmax(logits))
    expected = -sum(log_probabilities[i, label] for i, label in enumerate(batch["labels"]))
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert weight == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_no_promotion_is_implicit(pool, dtype, strict_numerics):
    cfg = dataclasses.replace(SMALL, pool=pool, dtype=dtype, dropout=0.1)
    graph, params = nnx.split(nnx.eval_shape(lambda: model_factory(cfg)(nnx.Rngs(0))))

    def loss(params, key):
        return nnx.merge(graph, params).loss(stripes_batch(0, 3, 16), deterministic=False, rngs=key)[0]

    gradients = jax.eval_shape(jax.grad(loss), params, jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"patch": 5}, "image_size 16 is not a multiple of patch 5"),
        (
            {"pool": "max", "classes": 0},
            "classes is 0; it must be at least 1.*pool is 'max'; choose",
        ),
        ({"heads": 3}, "width 16 is not a multiple of heads 3"),
        ({"remat": "some"}, "remat is 'some'"),
    ],
)
def test_an_invalid_config_is_an_error(change, message):
    with pytest.raises(ValueError, match=f"ViTConfig: .*{message}"):
        dataclasses.replace(SMALL, **change)


def test_an_image_of_another_size_is_an_error():
    with pytest.raises(ValueError, match=r"images must be \[batch, 16, 16, 3\], not \[2, 16, 12, 3\]"):
        filled_as(model_factory(SMALL))(jnp.zeros((2, 16, 12, 3)))


@pytest.mark.slow
@pytest.mark.whole
def test_it_learns():
    losses, *_ = trained(workload("vit-tiny"), 60, rate=1e-2)
    assert losses[0] == pytest.approx(np.log(8), abs=0.3)
    assert np.mean(losses[-5:]) < 1.0
