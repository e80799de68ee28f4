"""`generate`: the cache, sampling, and texts longer than the context."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models import GPTConfig, generate
from tests.models.small import filled

CFG = GPTConfig(vocab=16, layers=1, heads=2, width=16, context=6)


def make(**change):
    return filled(dataclasses.replace(CFG, **change), std=0.5)


@pytest.mark.few(1)
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_greedy_is_the_argmax_of_the_last_window_step_by_step(positions):
    model = make(positions=positions)
    run = nnx.jit(lambda model, x: model(x))
    prompt = jnp.array([[1, 2, 3], [4, 5, 6]])
    out = generate(model, prompt, 7, key=jax.random.key(0), temperature=0.0)
    expected = prompt
    for _ in range(7):
        window = jnp.pad(expected[:, -6:], ((0, 0), (0, max(0, 6 - expected.shape[1]))))
        logits = run(model, window)[:, min(expected.shape[1], 6) - 1]
        expected = jnp.concatenate([expected, jnp.argmax(logits, -1)[:, None]], axis=1)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [dict(), dict(positions="learned"), dict(kv_heads=1), dict(attention="blockwise")])
def test_a_cache_gives_the_logits_of_the_whole_sequence(shape, scan_layers):
    """Any split of a sequence into calls gives the logits of the whole sequence."""
    model = make(**dict(layers=3, context=12, block_size=4, scan_layers=scan_layers) | shape)
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 16)
    whole = model(tokens)
    extend = nnx.jit(lambda model, tokens, cache: model.extend(tokens, cache))
    for ends in ([12], [5, 12], [1, 2, 3, 9, 12]):
        cache, begin, parts = model.cache(2), 0, []
        for end in ends:
            logits, cache = extend(model, tokens[:, begin:end], cache)
            parts.append(logits)
            begin = end
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-5)
        assert int(cache.length) == 12


@pytest.mark.slow
def test_within_the_context_each_token_costs_one_position():
    """The text equals that of recomputing all positions, and each token runs one position only."""
    model, prompt = make(context=24, layers=2), jnp.array([[1, 2, 3], [4, 5, 6]])
    cached = generate(model, prompt, 6, key=jax.random.key(0), temperature=0.0)
    np.testing.assert_array_equal(cached[:, :3], prompt)
    choices = jnp.argmax(model(cached), -1)  # the logits of a position depend on it and the earlier ones alone
    np.testing.assert_array_equal(cached[:, 3:], choices[:, 2:-1])
    flops = []
    for n in (2, 20):
        run = jax.jit(lambda tokens, n=n: generate(model, tokens, n, key=jax.random.key(0), temperature=0.0))
        analysis = run.lower(prompt).compile().cost_analysis()
        assert analysis is not None
        flops.append(analysis["flops"])
    assert flops[1] < 3 * flops[0]  # the loop's body is counted once and does not grow with the text


def test_top_1_is_greedy_and_sampling_depends_on_the_key():
    model, prompt = make(), jnp.zeros((4, 1), jnp.int32)
    greedy = generate(model, prompt, 8, key=jax.random.key(0), temperature=0.0)
    np.testing.assert_array_equal(generate(model, prompt, 8, key=jax.random.key(1), top_k=1), greedy)
    a, b, again = (generate(model, prompt, 8, key=jax.random.key(s), temperature=5.0) for s in (1, 2, 1))
    np.testing.assert_array_equal(a, again)
    assert np.any(np.asarray(a) != np.asarray(b))
    assert np.any(np.asarray(a[0]) != np.asarray(a[1]))  # rows of a batch are sampled independently
    even = np.asarray(generate(model, prompt, 8, key=jax.random.key(1), temperature=1e6))[:, 1:]
    assert np.any(even != even[:, :1], axis=1).all()  # and so are the tokens of a row


def test_samples_follow_the_models_distribution():
    model, prompt = make(), jnp.full((4000, 1), 3, jnp.int32)
    samples = generate(model, prompt, 1, key=jax.random.key(0), temperature=3.0)[:, 1]
    expected = jax.nn.softmax(model(prompt[:1])[0, 0] / 3.0)
    np.testing.assert_allclose(np.bincount(samples, minlength=16) / 4000, expected, atol=0.03)
    top = generate(model, prompt, 1, key=jax.random.key(0), temperature=3.0, top_k=3)[:, 1]
    assert set(np.unique(top)) == set(np.argsort(-np.asarray(expected))[:3].tolist())


def test_a_prompt_longer_than_the_context_and_nothing_to_add():
    model, prompt = make(), jnp.arange(9, dtype=jnp.int32)[None]
    out = generate(model, prompt, 2, key=jax.random.key(0))
    assert out.shape == (1, 11) and out.dtype == prompt.dtype
    np.testing.assert_array_equal(out[:, :9], prompt)
    np.testing.assert_array_equal(generate(model, prompt, 0, key=jax.random.key(0)), prompt)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": jnp.zeros((1, 0), jnp.int32)}, "at least one token"),
        ({"n": -1}, "n is -1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": 17}, "from 1 to 16, the size of the vocabulary"),
    ],
)
def test_invalid_arguments_are_errors(change, message):
    arguments = {"prompt": jnp.zeros((1, 1), jnp.int32), "n": 1, "key": jax.random.key(0)} | change
    with pytest.raises(ValueError, match=message):
        generate(make(), **arguments)
