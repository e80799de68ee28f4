"""Random operators: a key gives the same mask in every setting, and samples have the right distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.spmdrules.catalogue import random as module
from autoshard.spmdrules.propagation.propagate import propagate
from tests.arrays import array
from tests.spmdrules.catalogue.compiled import compiled

random = compiled(module)
pytestmark = pytest.mark.usefixtures("strict_numerics")
RNG = np.random.default_rng(0)
KEY = jax.random.key(7)
X, RESIDUAL = (array(RNG.normal(size=(8, 16, 32)), jnp.bfloat16) for _ in range(2))
SPECS = ((dict(data=2), P("data")), (dict(data=8), P(None, "data")), (dict(data=2, model=4), P("data", None, "model")))


def mask_of(key):
    """The elements that `dropout` keeps, from applying it to ones."""
    return np.asarray(random.dropout(key, jnp.ones(X.shape))) != 0


def run(x, residual):
    """`dropout_add` and its gradients for a cotangent of ones: the gradient of x is the scaled mask."""
    y, pull = jax.vjp(lambda *args: random.dropout_add(KEY, *args), x, residual)
    return y, *pull(jnp.ones_like(y))


def assert_masked(y, d_x, d_residual):
    kept = mask_of(KEY)
    assert 0.7 < kept.mean() < 0.8
    exact = np.asarray(RESIDUAL, np.float32) + np.where(kept, np.asarray(X, np.float32) / np.float32(0.75), 0)
    assert np.array_equal(np.asarray(y), exact.astype(jnp.bfloat16))  # added in float32, rounded once
    assert np.array_equal(np.asarray(d_x != 0), kept)
    assert (np.asarray(d_residual) == 1).all()


def test_the_mask_is_the_same_forward_and_backward():
    assert_masked(*run(X, RESIDUAL))


def test_rounding_twice_gives_another_result():
    twice = RESIDUAL + random.dropout(KEY, X)
    assert (np.asarray(twice) != np.asarray(run(X, RESIDUAL)[0])).any()


def test_the_mask_is_the_same_under_remat():
    plain = lambda *args: jnp.exp(random.dropout_add(KEY, *args))  # noqa: E731

    def gradient(fn):
        return lambda x, residual: jax.vjp(fn, x, residual)[1](jnp.ones_like(x))[0]

    rematerialized = gradient(jax.checkpoint(plain))
    recomputed = [e for e in jax.make_jaxpr(rematerialized)(X, RESIDUAL).eqns if "policy" in e.params]
    assert recomputed and all("random_bits" in str(e.params["jaxpr"]) for e in recomputed)  # it is drawn twice
    actual = np.asarray(jax.jit(rematerialized)(X, RESIDUAL))
    assert np.array_equal(actual != 0, mask_of(KEY))
    expected = jax.jit(gradient(plain))(X, RESIDUAL)
    np.testing.assert_allclose(actual.astype(np.float32), np.asarray(expected, np.float32), rtol=0.02)


@pytest.mark.parametrize("axes, spec", SPECS)
def test_the_mask_is_the_same_on_every_mesh(axes, spec, mesh_of):
    sharding = NamedSharding(mesh_of(**axes), spec)
    x, residual = jax.device_put((X, RESIDUAL), sharding)
    compiled = jax.jit(run, out_shardings=sharding).lower(x, residual).compile()
    assert_masked(*compiled(x, residual))
    assert not any(word in (compiled.as_text() or "") for word in ("all-gather", "all-reduce", "all-to-all"))


@pytest.mark.parametrize("axes, spec", SPECS)
def test_masks_need_no_communication(axes, spec):
    propagation = propagate(run, X, RESIDUAL, in_specs=spec, mesh=axes)
    assert not propagation.reshards and propagation.out_specs == (spec, spec, spec)


def test_another_key_gives_another_mask():
    assert (mask_of(KEY) != mask_of(jax.random.fold_in(KEY, 1))).any()


def test_whole_examples_and_channels_are_dropped():
    ones = jnp.ones((64, 5, 16))
    for fn, axes in ((random.drop_path, (1, 2)), (random.spatial_dropout, (1,))):
        dropped = np.asarray(fn(KEY, ones))
        assert (dropped.max(axes) == dropped.min(axes)).all() and 0 < (dropped == 0).mean() < 0.5


def test_alpha_dropout_keeps_mean_and_variance():
    actual = random.alpha_dropout(KEY, array(RNG.normal(size=200_000), jnp.float32))
    np.testing.assert_allclose((actual.mean(), actual.var()), (0, 1), atol=0.02)


def test_stochastic_rounding_keeps_the_mean():
    x = jnp.full(200_000, 1 + 2**-10, jnp.float32)  # an eighth of the way to the next bfloat16
    actual = random.stochastic_rounding(KEY, x).astype(jnp.float32)
    assert set(np.unique(actual)) == {1, 1 + 2**-7}
    np.testing.assert_allclose((actual - 1).mean(), 2**-10, rtol=0.05)
    exact = jnp.asarray([jnp.inf, -jnp.inf, 1.0, -0.0])
    assert np.array_equal(random.stochastic_rounding(KEY, exact).astype(jnp.float32), exact)


def test_samples_come_from_the_allowed_classes():
    logits = jnp.broadcast_to(jnp.log(jnp.asarray([0.05, 0.5, 0.15, 0.3])), (5000, 4))
    assert set(np.unique(random.sample_top_k(KEY, logits, k=2))) == {1, 3}
    chosen = np.asarray(random.sample_top_p(KEY, logits, p=0.9))
    assert set(np.unique(chosen)) == {1, 2, 3}
    np.testing.assert_allclose((chosen == 1).mean(), 0.5 / 0.95, atol=0.03)


def test_mixtures_and_noise():
    x = array(RNG.normal(size=(8, 3)), jnp.float32)
    mixed, labels = random.mixup(KEY, x, jnp.eye(8))
    np.testing.assert_allclose(labels.sum(-1), np.ones(8), rtol=1e-6)
    np.testing.assert_allclose(mixed, labels @ x, rtol=1e-5, atol=1e-6)
    noisy, noise = random.diffusion_noise(KEY, x, jnp.full(8, 0.36))
    np.testing.assert_allclose(noisy, 0.6 * x + 0.8 * noise, rtol=1e-5, atol=1e-6)
    kept, which = random.random_mask(KEY, x[None, :, :], kept=4)
    assert np.array_equal(kept[0], x[which[0]]) and len(set(np.asarray(which[0]).tolist())) == 4
