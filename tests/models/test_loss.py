"""`cross_entropy`: comparison with its definition, masks, and no gather of a sharded vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.models import cross_entropy
from tests.arrays import array

RNG = np.random.default_rng(0)
LOGITS = array(4 * RNG.normal(size=(2, 5, 16)), jnp.float32)
TARGETS = array(RNG.integers(0, 16, (2, 5)), jnp.int32)


def per_token():
    return -np.take_along_axis(np.asarray(jax.nn.log_softmax(LOGITS)), np.asarray(TARGETS)[..., None], -1)[..., 0]


def test_is_the_negative_log_likelihood():
    total, count = cross_entropy(LOGITS, TARGETS)
    np.testing.assert_allclose(total, per_token().sum(), rtol=1e-6)
    assert count == 10 and total.dtype == count.dtype == jnp.float32


def test_gradient_is_softmax_minus_one_hot():
    grad = jax.grad(lambda logits: cross_entropy(logits, TARGETS)[0])(LOGITS)
    np.testing.assert_allclose(grad, jax.nn.softmax(LOGITS) - jax.nn.one_hot(TARGETS, 16), atol=1e-6)


@pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int32])
def test_masked_tokens_do_not_affect_loss_count_and_gradient(dtype):
    mask = jnp.array([[1, 1, 0, 0, 1], [0, 0, 0, 0, 1]], dtype)
    targets = jnp.where(mask.astype(bool), TARGETS, -100)
    total, count = cross_entropy(LOGITS, targets, mask)
    np.testing.assert_allclose(total, (per_token() * np.asarray(mask, np.float32)).sum(), rtol=1e-6)
    assert count == 4
    grad = jax.grad(lambda logits: cross_entropy(logits, targets, mask)[0])(LOGITS)
    assert np.all(np.asarray(grad)[~np.asarray(mask, bool)] == 0)


def test_losses_of_parts_sum_to_the_loss_of_the_batch():
    parts = [cross_entropy(LOGITS[i : i + 1], TARGETS[i : i + 1]) for i in range(2)]
    total, count = cross_entropy(LOGITS, TARGETS)
    np.testing.assert_allclose(parts[0][0] + parts[1][0], total, rtol=1e-6)
    assert parts[0][1] + parts[1][1] == count


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_large_logits_stay_finite(dtype):
    value, grad = jax.value_and_grad(lambda x: cross_entropy(x, TARGETS)[0])((1e4 * LOGITS).astype(dtype))
    assert np.isfinite(value) and bool(jnp.all(jnp.isfinite(grad))) and grad.dtype == dtype


def test_a_sharded_vocabulary_is_reduced_and_not_gathered():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    fn = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, TARGETS)[0]), in_shardings=spec)
    text = fn.lower(LOGITS).compile().as_text() or ""
    assert "all-gather" not in text and "all-to-all" not in text and "all-reduce" in text
    value, _ = fn(jax.device_put(LOGITS, spec))
    np.testing.assert_allclose(value, per_token().sum(), rtol=1e-6)
