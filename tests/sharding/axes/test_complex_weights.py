"""Complex parameters are sharded like those of floats."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import auto_shard, plan

ROWS, TIME, WIDTH = 32, 16, 32
OPTIMIZER = optax.adam(1e-2)


def perceptron(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def spectral(params, x):
    modes = jnp.fft.rfft(x, axis=1)
    return jnp.fft.irfft(jnp.einsum("bmi,mio->bmo", modes, params["modes"]), TIME, axis=1) @ params["out"]


def scanned(params, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jax.lax.scan(layer, x, params["stack"])[0]


SHAPES = {
    perceptron: {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)},
    spectral: {"modes": (TIME // 2 + 1, WIDTH, WIDTH), "out": (WIDTH, WIDTH)},
    scanned: {"stack": (4, WIDTH, WIDTH)},
}


def arguments(network):
    drawn = np.random.default_rng(0)

    def draw(*shape, real=False):
        values = drawn.normal(size=shape) / 8
        return jnp.array(values if real else values + 1j * drawn.normal(size=shape) / 8)

    params = {name: draw(*shape, real=name == "out") for name, shape in SHAPES[network].items()}
    return (params, OPTIMIZER.init(params)), draw(ROWS, TIME, WIDTH, real=network is spectral)


def step_of(network):
    def step(state, x):
        params, moments = state
        value, gradients = jax.value_and_grad(lambda p: jnp.mean(jnp.abs(network(p, x)) ** 2))(params)
        changes, moments = OPTIMIZER.update(jax.tree.map(jnp.conj, gradients), moments, params)
        return (optax.apply_updates(params, changes), moments), value

    return step


@pytest.mark.parametrize("words", ["fsdp:8", "dp:2 fsdp:4", "fsdp:4 tp:2", "dp:2 zero1:4"])
@pytest.mark.parametrize("network", SHAPES)
def test_updates_are_those_of_one_device(network, words):
    with jax.enable_x64(True):
        args = arguments(network)
        want, got = jax.jit(step_of(network))(*args), auto_shard(step_of(network), plan=words)(*args)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("network", SHAPES)
def test_they_and_their_moments_are_stored_in_shards(network):
    made = plan(step_of(network), *jax.eval_shape(lambda: arguments(network)), target="cpu:8", plan="fsdp:8")
    stored = [leaf for leaf in made.inputs if leaf.role in ("parameter", "optimizer") and leaf.shape]
    assert len(stored) == 3 * len(SHAPES[network])  # with two moments each
    assert all("fsdp" in str(leaf.spec) for leaf in stored)
