"""Text sampled from a trained model: by default from the moving average of its parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.models import GPT, GPTConfig
from autoshard.train.data.tokenizer import ByteCodec
from autoshard.train.inference.text_generation import sample_text
from autoshard.train.step.ema import EmaConfig, updated
from autoshard.train.step.train_state import make_program

SHAPE = GPTConfig(vocab=256, layers=1, heads=2, width=8, context=8, tie_head=False)


@pytest.mark.slow
def test_the_moving_average_is_sampled() -> None:
    program = make_program(lambda rngs: GPT(SHAPE, rngs=rngs), optax.sgd(1.0), ema=EmaConfig(0.5))
    one, other = (jax.jit(program.create_state)(jax.random.key(seed)) for seed in (0, 1))
    means = updated(one.ema, other.params, jnp.float32(1), jnp.array(True), jnp.int32(1), program.ema)
    states = one, other, replace(one, ema=means)
    first, second, mixed = (sample_text(program, s, ByteCodec(), "the ", 6, temperature=0.0) for s in states)
    assert first is not None and first.startswith("the ")
    assert mixed == second != first
    assert sample_text(program, states[2], ByteCodec(), "the ", 6, temperature=0.0, use_ema=False) == first
    with pytest.raises(ConfigError, match="the prompt is empty"):
        sample_text(program, one, ByteCodec(), "", 6)
    with pytest.raises(ConfigError, match="top-k is 257, but the model's vocabulary has 256 tokens"):
        sample_text(program, one, ByteCodec(), "the ", 6, top_k=257)


def test_a_model_that_is_not_built_in_is_not_sampled() -> None:
    program = make_program(lambda rngs: nnx.Linear(2, 2, rngs=rngs), optax.sgd(1.0))
    state = program.create_state(jax.random.key(0))
    assert sample_text(program, state, ByteCodec(), "the ", 6) is None
