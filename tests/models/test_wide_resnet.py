"""Wide-ResNet: published sizes, its batch norm compared with the definition, and training and evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from autoshard.models import ALPA_WIDE_RESNET, WideResNet, WideResNetConfig, workload
from autoshard.models.wide_resnet import BatchNorm, Bottleneck, Conv
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import make_train_step
from tests.models.small import called, count, filled_as, quickly, stripes_batch, trained

SMALL = WideResNetConfig(stages=(1, 1), channels=4, image_size=16, classes=8, remat="none", dtype="float32")
RESNET50 = WideResNetConfig(channels=64, width_factor=1, classes=1000)


def model_factory(cfg):
    return lambda rngs: WideResNet(cfg, rngs=rngs)


def batch(rows=6, seed=0):
    return stripes_batch(seed, rows, 16)


def statistics(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


@pytest.mark.parametrize("stages, published", [((3, 4, 6, 3), 25_557_032), ((3, 4, 23, 3), 44_549_160)])
def test_with_a_factor_of_one_it_is_resnet(stages, published):
    """The published parameter counts of ResNet-50 and ResNet-101."""
    assert count(model_factory(dataclasses.replace(RESNET50, stages=stages))) == published


def test_resnet_50_does_the_published_work():
    """4.1e9 multiply-adds per image (torchvision's resnet50: 4.09e9)."""
    graph, state = nnx.split(nnx.eval_shape(lambda: model_factory(RESNET50)(nnx.Rngs(0))))
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    lowered = jax.jit(lambda state, images: nnx.merge(graph, state)(images)).lower(state, images)
    analysis = lowered.cost_analysis()
    assert analysis is not None and analysis["flops"] / 2e9 == pytest.approx(4.09, rel=0.03)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ALPA_WIDE_RESNET)
def test_parameters_of_alpas_sizes(name):
    label = name.removeprefix("wide-resnet-")
    named = float(label[:-1]) * {"m": 1e6, "b": 1e9}[label[-1]]
    assert count(model_factory(ALPA_WIDE_RESNET[name])) == pytest.approx(named, rel=0.03)


def test_batch_norm_matches_its_definition():
    norm = filled_as(lambda rngs: BatchNorm(SMALL, 3), 0.3)
    before = jax.tree.map(np.asarray, statistics(norm))
    x = np.random.default_rng(0).normal(2.0, 3.0, (4, 5, 6, 3)).astype(np.float32)
    mean, variance = x.mean((0, 1, 2), np.float64), x.var((0, 1, 2), np.float64)
    scale, bias = np.asarray(norm.scale[...]), np.asarray(norm.bias[...])

    def normalised(mean, variance):
        return (x - mean) / np.sqrt(variance + 1e-5) * scale + bias

    np.testing.assert_allclose(norm(jnp.asarray(x), False), normalised(**before), rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, statistics(norm), before)
    np.testing.assert_allclose(norm(jnp.asarray(x), True), normalised(mean, variance), rtol=1e-4, atol=1e-5)
    after = statistics(norm)
    np.testing.assert_allclose(after["mean"], 0.9 * before["mean"] + 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(after["variance"], 0.9 * before["variance"] + 0.1 * variance, rtol=1e-5)


def test_batch_norm_keeps_float32_statistics_of_bfloat16():
    """bfloat16 can represent 256 and 258, but not the 257 between them that is their mean."""
    norm = BatchNorm(dataclasses.replace(SMALL, dtype="bfloat16"), 1)
    x = jnp.where(jnp.arange(64).reshape(1, 8, 8, 1) % 2 == 0, 256.0, 258.0).astype(jnp.bfloat16)
    y = norm(x, True)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(jnp.abs(y.astype(jnp.float32)), 1.0)
    np.testing.assert_allclose(norm.mean[...], 25.7, rtol=1e-6)
    np.testing.assert_allclose(norm.variance[...], 0.9 + 0.1, rtol=1e-6)


@pytest.mark.parametrize("size, stride", [(1, 1), (1, 2), (3, 1), (3, 2), (7, 2)])
def test_convolutions_match_their_definition(size, stride):
    conv = filled_as(lambda rngs: Conv(SMALL, rngs.params(), size, 2, 3, stride))
    x = np.random.default_rng(1).normal(size=(1, 8, 8, 2)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    actual = conv(jnp.asarray(x))
    assert actual.shape == (1, 8 // stride, 8 // stride, 3)
    for row in range(8 // stride):
        for column in range(8 // stride):
            window = padded[0, row * stride :, column * stride :][:size, :size]
            expected = np.einsum("hwi,hwio->o", window, conv.kernel[...])
            np.testing.assert_allclose(actual[0, row, column], expected, rtol=1e-4, atol=1e-5)


def test_a_block_starts_as_its_shortcut():
    block = nnx.eval_shape(lambda: Bottleneck(SMALL, jax.random.key(0), 16, 4, 1))
    assert block.shortcut is None
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 16)).astype(np.float32)
    actual = quickly(lambda x: Bottleneck(SMALL, jax.random.key(0), 16, 4, 1)(x, True), x)
    np.testing.assert_array_equal(actual, np.maximum(x, 0.0))


def train_once(model):
    """Returns loss, gradients and statistics of a training step."""
    graph, params, averages = nnx.split(model, nnx.Param, nnx.BatchStat)
    averages = nnx.to_pure_dict(averages)

    def loss(params):
        copy = nnx.merge(graph, params, averages)
        total, weight = copy.loss(batch(), deterministic=False)
        return total / weight, statistics(copy)

    (value, moved), gradients = quickly(jax.value_and_grad(loss, has_aux=True), params)
    return value, nnx.to_pure_dict(gradients), moved


@pytest.mark.slow
def test_remat_changes_nothing():
    plain, recomputed = (
        train_once(filled_as(model_factory(dataclasses.replace(SMALL, remat=remat)))) for remat in ("none", "full")
    )
    whole = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(plain[1])))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
        assert np.linalg.norm(one - other) < 1e-5 * max(np.linalg.norm(one), whole)
    before = statistics(filled_as(model_factory(SMALL)))
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, recomputed[2])
    assert all(jax.tree.leaves(changed)) and len(jax.tree.leaves(changed)) == 2 * 9  # each norm's mean and variance


def test_in_evaluation_an_image_does_not_see_the_others():
    model, images = filled_as(model_factory(SMALL)), batch()["images"]

    def both(model, images):
        return model(images), model(images, deterministic=False)

    (evaluated, trained), (few, few_trained) = (called(model, both, x) for x in (images, images[:2]))
    np.testing.assert_allclose(few, evaluated[:2], rtol=1e-4, atol=1e-5)
    assert np.max(np.abs(trained - evaluated)) > 1e-3
    assert np.max(np.abs(few_trained - trained[:2])) > 1e-3


def test_the_loss_is_the_cross_entropy_of_the_labels():
    model = filled_as(model_factory(SMALL))
    logits, (total, weight) = called(model, lambda model, batch: (model(batch["images"]), model.loss(batch)), batch())
    log_probabilities = np.asarray(jax.nn.log_softmax(logits))
    expected = -sum(log_probabilities[i, label] for i, label in enumerate(batch()["labels"]))
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert weight == 6


@pytest.mark.slow
def test_microbatches_move_the_averages_one_after_the_other():
    """The trainer's step passes the statistics from microbatch to microbatch: two microbatches update them twice."""
    program = make_program(model_factory(SMALL), optax.sgd(0.0))
    state = jax.jit(program.create_state)(jax.random.key(0))
    step = jax.jit(make_train_step(program, optax.constant_schedule(0.0), microbatches=2))
    after, _ = step(state, batch(8))
    expected = state.variables["stem_norm"]["mean"]
    model = program.model(state.params, state.frozen, state.variables, None)
    for micro in range(2):  # rows i, i + 2, ...
        images = jnp.asarray(batch(8)["images"][micro::2])
        expected = 0.9 * expected + 0.1 * jnp.mean(model.stem(images), axis=(0, 1, 2))
    np.testing.assert_allclose(after.variables["stem_norm"]["mean"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_promotion_is_implicit(dtype, strict_numerics):
    cfg = dataclasses.replace(SMALL, dtype=dtype, remat="full")
    graph, params, averages = nnx.split(
        nnx.eval_shape(lambda: model_factory(cfg)(nnx.Rngs(0))), nnx.Param, nnx.BatchStat
    )

    def loss(params, averages):
        return nnx.merge(graph, params, averages).loss(batch(), deterministic=False)[0]

    gradients = jax.eval_shape(jax.grad(loss), params, nnx.to_pure_dict(averages))
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stages": ()}, "stages is empty"),
        ({"stages": (1, 0)}, r"stages\[1\] is 0; it must be at least 1"),
        ({"stages": ()}, "stages is empty; give the number of blocks of each stage"),
        ({"remat": "some", "channels": 0}, "channels is 0.*remat is 'some'; choose one of none, full"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be a finite number above 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_an_invalid_config_is_an_error(change, message):
    with pytest.raises(ValueError, match=f"WideResNetConfig: .*{message}"):
        dataclasses.replace(SMALL, **change)


def test_an_image_of_another_size_is_an_error():
    with pytest.raises(ValueError, match=r"images must be \[batch, 16, 16, 3\], not \[2, 17, 16, 3\]"):
        filled_as(model_factory(SMALL))(jnp.zeros((2, 17, 16, 3)))


@pytest.mark.whole
@pytest.mark.slow
def test_it_learns():
    """Learns stripes of eight directions, and recognises new images with the running averages."""
    losses, state, evaluate = trained(workload("wide-resnet-tiny"), 40, rate=1e-2)
    assert losses[0] > 1.5 and np.mean(losses[-5:]) < 0.7
    assert evaluate(40) < 1.2
    assert jnp.all(state.variables["stem_norm"]["variance"] != 1.0)
