"""Compares normalisation with Flax, and checks float32 statistics and the communication of batch norm."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.spmdrules.catalogue import norms as module
from autoshard.spmdrules.propagation.propagate import propagate
from tests.arrays import array
from tests.spmdrules.catalogue.compiled import compiled
from tests.spmdrules.jitted import jitted

norms = compiled(module)
pytestmark = pytest.mark.usefixtures("strict_numerics")
BATCH, SPACE, CHANNELS = 8, (4, 6), 12
RNG = np.random.default_rng(0)
X = array(RNG.normal(size=(BATCH, *SPACE, CHANNELS)) * 2 + 3, jnp.float32)
SCALE, BIAS, MEAN = (array(RNG.normal(size=CHANNELS), jnp.float32) for _ in range(3))
VARIANCE = array(RNG.uniform(0.5, 2, CHANNELS), jnp.float32)
PARAMS = {"params": {"scale": SCALE, "bias": BIAS}, "batch_stats": {"mean": MEAN, "var": VARIANCE}}
STATE = (SCALE, BIAS, MEAN, VARIANCE)


def assert_close(a, b, tolerance=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b)


def flax(module, x):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return module.apply(PARAMS, x, mutable=["batch_stats"])


@pytest.mark.parametrize("name, module", [
    ("layer_norm", nn.LayerNorm(1e-5, use_fast_variance=False)),
    ("instance_norm", nn.InstanceNorm(epsilon=1e-5, use_fast_variance=False)),
    ("group_norm", nn.GroupNorm(4, epsilon=1e-5, use_fast_variance=False)),
])  # fmt: skip
def test_norms_equal_flax(name, module):
    keywords = {"groups": 4} if name == "group_norm" else {}
    run = jitted(getattr(norms, name))
    assert_close(run(X, SCALE, BIAS, **keywords), jax.jit(flax, static_argnums=0)(module, X)[0])


def test_rms_norm_equals_flax():
    assert_close(norms.rms_norm(X, SCALE), flax(nn.RMSNorm(epsilon=1e-5), X)[0])


def test_training_batch_norm_equals_flax_with_its_gradient_and_running_statistics():
    module = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, use_fast_variance=False)

    @functools.partial(jax.jit, static_argnums=0)
    def run(fn):
        y, pull, state = jax.vjp(fn, X, has_aux=True)
        return y, pull(COTANGENT), state

    *expected, [state] = run(lambda x: (flax(module, x)[0], [flax(module, x)[1]["batch_stats"]]))
    *actual, (mean, variance) = run(lambda x: (norms.batch_norm(x, *STATE)[0], norms.batch_norm(x, *STATE)[1:]))
    assert_close(actual, expected)
    assert_close((mean, variance), (state["mean"], state["var"]))


COTANGENT = array(RNG.normal(size=X.shape), jnp.float32)


def test_batch_norm_at_inference_equals_flax():
    assert_close(norms.batch_norm_inference(X, *STATE), flax(nn.BatchNorm(use_running_average=True), X)[0])


def test_ghost_batch_norm_is_batch_norm_of_each_part():
    actual, mean, _ = norms.ghost_batch_norm(X, *STATE, groups=4)
    parts = [norms.batch_norm(part, *STATE) for part in jnp.split(X, 4)]
    assert_close(actual, jnp.concatenate([part[0] for part in parts]))
    assert_close(mean, sum(part[1] for part in parts) / 4)
    assert not np.allclose(actual, norms.batch_norm(X, *STATE)[0], atol=1e-2)


def test_batch_renorm_without_correction_equals_batch_norm():
    assert_close(norms.batch_renorm(X, *STATE, max_ratio=1.0, max_shift=0.0, epsilon=1e-5), norms.batch_norm(X, *STATE))


def test_batch_renorm_with_unlimited_correction_uses_running_statistics():
    actual = norms.batch_renorm(X, *STATE, max_ratio=1e6, max_shift=1e6, epsilon=1e-5)[0]
    assert_close(actual, norms.batch_norm_inference(X, *STATE), 1e-3)


def test_statistics_of_bfloat16_are_float32():
    x = (array(RNG.normal(size=(4, 1024))) + 100).astype(jnp.bfloat16)
    ones, zeros = jnp.ones(1024), jnp.zeros(1024)
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    actual = norms.layer_norm(x, ones, zeros)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=1e-2, atol=1e-2)


def test_local_response_norm_sums_adjacent_channels():
    padded = np.pad(np.square(X), [(0, 0)] * 3 + [(2, 2)])
    total = sum(padded[..., i : i + CHANNELS] for i in range(5))
    assert_close(norms.local_response_norm(X, alpha=0.1), X / (1 + 0.1 * total) ** 0.75)


def test_weights():
    kernel = array(RNG.normal(size=(6, CHANNELS)), jnp.float32)
    assert_close(jnp.linalg.norm(norms.weight_norm(kernel, SCALE), axis=0), jnp.abs(SCALE))
    whole = norms.weight_standardization(kernel, epsilon=0.0)
    assert_close((whole.mean(0), whole.std(0)), (jnp.zeros(CHANNELS), jnp.ones(CHANNELS)))


def test_spectral_norm_reaches_the_largest_singular_value():
    kernel = array(RNG.normal(size=(6, CHANNELS)), jnp.float32)
    vector, step = jnp.ones(6), jax.jit(norms.spectral_norm)
    for _ in range(200):
        normal, vector = step(kernel, vector)
    assert_close(normal, kernel / np.linalg.svd(kernel)[1][0], 1e-4)


def test_l2_normalize_of_zeros_has_a_finite_gradient():
    gradient = jitted(jax.grad(lambda x: norms.l2_normalize(x)[0]))(jnp.zeros(4))
    assert np.isfinite(gradient).all()


def test_a_sharded_batch_reduces_only_statistics():
    propagation = propagate(norms.batch_norm, X, *STATE, in_specs=(P("data"), *(P(),) * 4), mesh={"data": 4})
    assert propagation.out_specs == (P("data"), P(), P())
    assert {r.kind for r in propagation.reshards} == {"all-reduce"}
    assert propagation.bytes_moved == 2 * (
        2 * 3 / 4 * 4 * CHANNELS
    )  # all-reduces of a mean and a variance, each 1.5 times its bytes

    def gradient(x, scale, bias, d_y):
        return jax.vjp(lambda x, s, b: norms.batch_norm(x, s, b, MEAN, VARIANCE)[0], x, scale, bias)[1](d_y)

    propagation = propagate(gradient, X, SCALE, BIAS, X, in_specs=(P("data"), P(), P(), P("data")), mesh={"data": 4})
    assert propagation.out_specs[0] == P("data")
    assert propagation.out_partial[1:] == ({"data": "sum"}, {"data": "sum"})
    assert "all-gather" not in {r.kind for r in propagation.reshards}


@pytest.mark.slow
def test_ghost_batch_norm_with_whole_groups_per_device_reduces_only_running_statistics():
    fn = lambda *args: norms.ghost_batch_norm(*args, groups=4)  # noqa: E731
    propagation = propagate(fn, X, *STATE, in_specs=(P("data"), *(P(),) * 4), mesh={"data": 4})
    assert propagation.out_specs == (P("data"), P(), P())
    assert propagation.bytes_moved == 2 * (2 * 3 / 4 * 4 * CHANNELS)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["batch_norm", "ghost_batch_norm"])
def test_every_mesh_gives_the_same_result(name, mesh_of):
    keywords = {"groups": 4} if name == "ghost_batch_norm" else {}

    def run(x, d_y):
        y, pull = jax.vjp(lambda x, *p: getattr(norms, name)(x, *p, *STATE[2:], **keywords)[0], x, *STATE[:2])
        return y, pull(d_y)

    expected = jax.jit(run)(X, COTANGENT)
    for devices in (2, 8):
        sharding = NamedSharding(mesh_of(data=devices), P("data"))
        assert_close(jax.jit(run)(*jax.device_put((X, COTANGENT), sharding)), expected, 1e-4)
