"""Moments in 8 bits and masks of weights are stored in shards, and decoded there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard, plan

WIDTH, BLOCK = 32, 32
SHAPES = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
LEVELS = np.linspace(-1, 1, 256)


def loss_of(p, x):
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)


def scaled(codes):
    return codes.astype(jnp.float64) / 127


def codes_of(values):
    return jnp.round(values * 127).astype(jnp.int8)


def level(codes):
    return jnp.asarray(LEVELS)[codes.astype(jnp.int32)]


def nearest_level(values):
    return jnp.searchsorted(jnp.asarray((LEVELS[1:] + LEVELS[:-1]) / 2), values).astype(jnp.uint8)


CODINGS = {"arithmetic": (scaled, codes_of, np.int8), "table": (level, nearest_level, np.uint8)}


def momentum_of(decode, encode):
    """A step with momentum, whose moments are codes in blocks with one scale each."""

    def step(state, x):
        value, grads = jax.value_and_grad(loss_of)(state["p"], x)
        new = {"p": {}, "codes": {}, "scales": {}}
        for name, gradient in grads.items():
            old = (decode(state["codes"][name]) * state["scales"][name]).reshape(gradient.shape)
            moment = 0.9 * old + gradient
            blocks = moment.reshape(-1, BLOCK)
            scales = jnp.max(jnp.abs(blocks), 1, keepdims=True)
            new["codes"][name], new["scales"][name] = encode(blocks / scales), scales
            new["p"][name] = state["p"][name] - 0.1 * moment
        return new, value

    return step


def inputs(dtype):
    drawn = np.random.default_rng(0)
    blocks = {name: (int(np.prod(shape)) // BLOCK, BLOCK) for name, shape in SHAPES.items()}
    state = {
        "p": {name: drawn.normal(size=shape) / 8 for name, shape in SHAPES.items()},
        "codes": {name: drawn.integers(0, 100, shape).astype(dtype) for name, shape in blocks.items()},
        "scales": {name: drawn.random((rows, 1)) / 100 for name, (rows, _) in blocks.items()},
    }
    return state, drawn.normal(size=(128, WIDTH))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("coding", CODINGS)
def test_moments_in_8_bits_are_stored_and_decoded_in_shards(coding):
    decode, encode, dtype = CODINGS[coding]
    given = inputs(dtype)
    made = plan(momentum_of(decode, encode), *given, target="v5e:2x4", plan="fsdp:8")
    stored = {leaf.path: (leaf.role, "fsdp" in str(leaf.spec)) for leaf in made.inputs}
    assert {stored[f"0/codes/{name}"] for name in SHAPES} == {("optimizer", True)}
    # The only gathers are those of both weights, and of both arrays of new scales.
    gathered = sorted(sent for kind, _, sent, _ in made.traffic if kind == "all-gather")
    assert sum(gathered) == sum(8 * 7 / 8 * np.prod(shape) * (1 + 1 / BLOCK) for shape in SHAPES.values())


@pytest.mark.parametrize("coding", CODINGS)
def test_codes_of_moments_equal_those_of_one_device(coding):
    decode, encode, dtype = CODINGS[coding]
    given, step = inputs(dtype), momentum_of(decode, encode)
    expected, value = jax.jit(step)(*given)
    for words in ("fsdp:8", "zero1:8", "fsdp:2 tp:4"):
        state, own = auto_shard(step, plan=words)(*given)
        np.testing.assert_allclose(own, value, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), state, expected)


def test_masks_of_weights_are_stored_like_the_weights():
    def step(state, x):
        def loss(p):
            return loss_of(jax.tree.map(jnp.multiply, p, state["mask"]), x)

        value, grads = jax.value_and_grad(loss)(state["p"])
        return {**state, "p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads)}, value

    p = {name: np.ones(shape) for name, shape in SHAPES.items()}
    state = {"p": p, "mask": {name: np.ones(shape, bool) for name, shape in SHAPES.items()}}
    made = plan(step, state, np.ones((128, WIDTH)), target="v5e:2x4", plan="fsdp:8")
    specs = {leaf.path: leaf.spec for leaf in made.inputs}
    for name in SHAPES:
        assert specs[f"0/mask/{name}"] == specs[f"0/p/{name}"] and "fsdp" in str(specs[f"0/p/{name}"])
    gathered = sum(sent for kind, _, sent, _ in made.traffic if kind == "all-gather")
    assert gathered == sum(8 * 7 / 8 * np.prod(shape) for shape in SHAPES.values())
