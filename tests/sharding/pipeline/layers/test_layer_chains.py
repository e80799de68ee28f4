"""Layers that carry values that do not depend on the batch: results in stages equal those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat, auto_shard
from autoshard.errors import PlanError
from autoshard.sharding.pipeline.pipelining import with_stages
from autoshard.sharding.pipeline.schedules import SCHEDULES
from autoshard.sharding.program.tracing import trace

LAYERS, WIDTH, ROWS = 4, 6, 8
KINDS = ("key", "words", "counter", "scale", "weights", "penalty", "before", "matrix", "tokens")


@pytest.fixture(autouse=True)
def float64():
    """Run in float64."""
    with jax.enable_x64(True):
        yield


def layer(kind, x, carried, w):
    """Return what leaves a layer, and the carried value after it."""
    y = jnp.tanh(x @ w)
    if kind in ("key", "words"):
        carried, own = jax.random.split(carried)
        return x + y * jax.random.bernoulli(own, 0.8, y.shape) / 0.8, carried
    if kind == "matrix":
        carried = jnp.tanh(carried @ w)
        return x + x @ carried, carried
    after = {
        "counter": carried + 1,
        "weights": carried * (w**2).mean(),
        "penalty": carried + (w**2).sum(),
        "before": (w**2).mean(),
    }
    return x + (y if kind == "penalty" else y * carried), after.get(kind, carried * 0.9)


def make_step(kind, remat=False, unrolled=False):
    """Return `step(weights, rows, key) -> (value and rest, gradients)`."""

    def loss(weights, rows, key):
        start = {
            "key": key, "words": jax.random.key_data(key), "counter": 1, "weights": weights["scale"],
            "before": weights["scale"], "matrix": jnp.eye(WIDTH), "tokens": 1 / (1 + (rows[:, 0] > 0).sum()),
        }.get(kind, 1.0)  # fmt: skip

        def body(carry, w):
            x, carried = carry
            after = layer(kind, x, carried, w)
            return after, after[1]

        body = jax.checkpoint(body) if remat else body
        carry, made = (rows @ weights["in"], start), []
        if unrolled:
            for n in range(LAYERS):
                carry, y = body(carry, weights["layers"][n])
                made.append(y)
            made = jnp.stack(made)
        else:
            carry, made = jax.lax.scan(body, carry, weights["layers"], reverse=kind == "before")
        x, end = carry
        value = (x**2).mean() + (1e-2 * end.sum() if kind in ("penalty", "matrix") else 0)
        return value, (made, end) if kind in ("words", "counter", "weights") else ()

    return jax.value_and_grad(loss, has_aux=True)


def arguments():
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape) * 0.4  # noqa: E731
    weights = {"layers": draw(0, LAYERS, WIDTH, WIDTH), "in": draw(1, WIDTH, WIDTH), "scale": jnp.float64(0.7)}
    return weights, draw(2, ROWS, WIDTH), jax.random.key(3)


def assert_equal(made, want):
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def check(kind, schedule, *, stages=2, replicas=1, **options):
    fn, args = make_step(kind, **options), arguments()
    cut = with_stages(trace(fn, args, {}), 4, stages=stages, schedule=schedule, replicas=replicas)
    assert cut.stages == stages
    assert_equal(jax.jit(_compat.jaxpr_as_function(cut.closed))(*jax.tree.leaves(args)), jax.jit(fn)(*args))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_one_backward(kind):
    check(kind, "1f1b", remat=kind == "penalty")


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved:2"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_schedules(kind, schedule, remat):
    check(kind, schedule, remat=remat, replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["key", "weights"])
def test_stages_with_different_numbers_of_layers(kind):
    check(kind, "1f1b", stages=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["key", "words", "counter", "scale", "penalty", "tokens"])
def test_layers_one_after_another(kind):
    check(kind, "1f1b", unrolled=True)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize(
    ("kind", "words", "schedule"),
    [
        ("key", "pp:2 dp:2 tp:2", "1f1b"),
        ("penalty", "pp:4 dp:2", "zb"),
        *(pytest.param(kind, "pp:2 dp:2 tp:2", "1f1b", marks=pytest.mark.slow) for kind in KINDS[1:]),
        pytest.param("key", "pp:2 dp:4", "interleaved:2", marks=pytest.mark.slow),
        pytest.param("key", "pp:4 fsdp:2", "ftb", marks=pytest.mark.slow),
    ],
)
def test_planned_pipelines(kind, words, schedule):
    """Their layers stay on stages: the loop over the chain is no loop over the layers' weights."""
    fn, args = make_step(kind), arguments()
    step = auto_shard(fn, plan=words, microbatches=4, schedule=schedule)
    assert_equal(step(*args), jax.jit(fn)(*args))
    layers = next(leaf for leaf in step.plan(*args).inputs if leaf.path == "0/layers")
    assert schedule == "interleaved:2" or layers.spec[0] == "pp"


def test_a_key_that_depends_on_the_batch_is_no_chain():
    """Its words can be carried: the message is right."""

    def loss(weights, rows, wrap):
        keys = jax.vmap(jax.random.key)(jnp.arange(ROWS) + (rows[:, 0] > 0))

        def body(carry, w):
            x, keys = carry
            own = jax.vmap(jax.random.split)(jax.random.wrap_key_data(keys) if wrap else keys)
            noise = jax.vmap(lambda key: jax.random.uniform(key, (WIDTH,), rows.dtype))(own[:, 0])
            return (x + jnp.tanh(x @ w) * noise, jax.random.key_data(own[:, 1]) if wrap else own[:, 1]), None

        start = jax.random.key_data(keys) if wrap else keys
        return (jax.lax.scan(body, (rows, start), weights["layers"])[0][0] ** 2).mean()

    weights, rows, _ = arguments()
    with pytest.raises(PlanError, match="pass on a typed random key; pass its jax.random.key_data instead"):
        with_stages(trace(lambda w, x: jax.grad(loss)(w, x, False), (weights, rows), {}), 4, stages=2)
    fn = lambda w, x: jax.grad(loss)(w, x, True)  # noqa: E731
    cut = with_stages(trace(fn, (weights, rows), {}), 4, stages=2)
    made = jax.jit(_compat.jaxpr_as_function(cut.closed))(*jax.tree.leaves((weights, rows)))
    assert_equal(made, jax.jit(fn)(weights, rows))
