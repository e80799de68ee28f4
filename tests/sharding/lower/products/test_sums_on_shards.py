"""Operators that run on shards, so that their partial sums are reduced as planned: complex sums, and tables."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard, plan
from autoshard.sharding.layout.operator_sharding import strategy_in_layout
from autoshard.sharding.lower.products.sums_on_shards import sums_on_shards
from autoshard.sharding.planner.bound_plan import bound_or_error

ROWS, TIME, WIDTH, MODES, VOCAB = 16, 32, 16, 8, 64


def filtered(weights, x):
    """A long convolution with a filter of the whole sequence."""
    spectrum = jnp.fft.rfft(x, 2 * TIME, axis=1) * jnp.fft.rfft(weights["filter"], 2 * TIME, axis=0)
    return jnp.fft.irfft(spectrum, 2 * TIME, axis=1)[:, :TIME] @ weights["out"]


def spectral(weights, x):
    """A layer of a Fourier neural operator."""
    modes = jnp.fft.rfft(x, axis=1)[:, :MODES]
    made = jnp.einsum("bmi,mio->bmo", modes, jax.lax.complex(weights["real"], weights["imaginary"]))
    whole = jnp.zeros((x.shape[0], TIME // 2 + 1, WIDTH), made.dtype).at[:, :MODES].set(made)
    return jax.nn.gelu(jnp.fft.irfft(whole, TIME, axis=1) + x @ weights["out"])


def complex_weights(weights, x):
    return jnp.abs(x * weights["complex"] + 1) @ weights["out"]


def looked_up(weights, tokens):
    return jnp.tanh(weights["table"][tokens]) @ weights["out"]


SHAPES = {
    filtered: {"filter": (TIME, WIDTH)},
    spectral: {"real": (MODES, WIDTH, WIDTH), "imaginary": (MODES, WIDTH, WIDTH)},
    complex_weights: {"complex": (TIME, WIDTH)},
    looked_up: {"table": (VOCAB, WIDTH)},
}


def step_of(network):
    def step(weights, x):
        value, gradients = jax.value_and_grad(lambda weights: jnp.mean(network(weights, x) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * jnp.conj(g), weights, gradients), value

    return step


def arguments(network, dtype="float32", rows=ROWS):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {"out": (WIDTH, WIDTH)} | SHAPES[network]
    weights = {name: jax.random.normal(next(keys), shape, dtype) for name, shape in shapes.items()}
    if network is complex_weights:
        weights["complex"] = jax.lax.complex(weights["complex"], weights["complex"] - 1)
    if network is looked_up:
        return weights, jax.random.randint(next(keys), (rows, TIME), 0, VOCAB)
    return weights, jax.random.normal(next(keys), (rows, TIME, WIDTH), dtype)


@pytest.mark.parametrize("words", ["dp:8", "fsdp:8", "dp:2 fsdp:4", "fsdp:2 tp:4"])
@pytest.mark.parametrize("network", SHAPES)
def test_loss_and_gradients_are_those_of_one_device(network, words):
    if network is spectral:
        words = words.replace("tp", "ep")  # its modes are the batch of a product, as experts are
    with jax.enable_x64(True):
        weights, x = arguments(network, "float64")
        want, got = step_of(network)(weights, x), auto_shard(step_of(network), plan=words)(weights, x)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


def reductions(network, words):
    """The types of the results of all reductions over devices in the compiled step."""
    text = auto_shard(step_of(network), plan=words).lower(*arguments(network)).compile().as_text()
    results = re.findall(r" = (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
    return {dtype for result in results for dtype in re.findall(r"\b([a-z]+\d+)\[", result)}


@pytest.mark.parametrize("words", ["dp:8", "fsdp:8"])
@pytest.mark.parametrize("network", [filtered, spectral, complex_weights])
def test_real_and_imaginary_parts_are_reduced(network, words):
    assert reductions(network, words) == {"f32"}


def test_the_gradient_of_a_table_is_scattered_before_it_is_reduced():
    text = auto_shard(step_of(looked_up), plan="dp:2 fsdp:4").lower(*arguments(looked_up, rows=64)).compile().as_text()
    assert re.search(rf" = .*f32\[{VOCAB // 4},{WIDTH}\]\S* reduce-scatter\(", text)
    assert not re.search(rf" = .*f32\[{VOCAB},{WIDTH}\]\S* all-reduce\(", text)


@pytest.mark.parametrize(("words", "expected"), [("dp:2 fsdp:4", True), ("fsdp:8", False), ("dp:8", False)])
def test_tables_that_are_summed_over_one_mesh_axis_are_left_to_the_partitioner(words, expected):
    shapes = jax.eval_shape(lambda: arguments(looked_up, rows=64))
    bound = bound_or_error(plan(step_of(looked_up), *shapes, target="v5e:2x4", plan=words).bound)
    layout, prices = bound.layout, bound.problem.machine.target.link_prices
    (scatter,) = (op for op in bound.problem.program.ops() if op.name == "scatter-add")
    assert sums_on_shards(layout, scatter, strategy_in_layout(layout, scatter, prices)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("network", [filtered, complex_weights, looked_up])
def test_the_tpu_compiler_reduces_as_planned(network):
    shapes = jax.eval_shape(lambda: arguments(network, rows=256))
    audit = plan(step_of(network), *shapes, target="v5e:2x4", plan="dp:2 fsdp:4").verify()
    assert audit.unplanned_bytes < 0.1 * sum(c.wire_bytes for c in audit.collectives)
