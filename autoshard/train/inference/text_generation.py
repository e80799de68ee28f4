"""Sample text from a model in a running program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import ConfigError
from autoshard.models import GPT, MoE, generate
from autoshard.models.decoder import Decoder
from autoshard.train.data.tokenizer import Codec
from autoshard.train.step.train_state import Program, TrainState
from autoshard.train.step.train_step import eval_params


def sample_text(
    program: Program,
    state: TrainState,
    codec: Codec,
    prompt: str,
    tokens: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int | None = None,
    use_ema: bool = True,
) -> str | None:
    """Continue a prompt. Returns None if the model is neither a built-in language model nor a pretrained one.

    Args:
        program: The model.
        state: Its arrays.
        codec: Encodes and decodes text.
        prompt: Text to continue.
        tokens: Number of tokens to add.
        seed: Random seed.
        temperature: Divisor of the logits; 0 always takes the most likely token.
        top_k: Sample from this many of the most likely tokens; None samples from all.
        use_ema: Use the moving average of the parameters, if there is one.

    Raises:
        ConfigError: The prompt is empty, or `top_k` exceeds the vocabulary.
    """
    model = program.model(eval_params(state, use_ema), state.frozen, state.variables, None)
    if not isinstance(model, GPT | MoE | Decoder):
        return None
    start = codec.encode(prompt).astype(np.int32)
    if not len(start):
        raise ConfigError("the prompt is empty: give at least one character")
    if top_k is not None and top_k > model.cfg.vocab:
        raise ConfigError(
            f"top-k is {top_k}, but the model's vocabulary has {model.cfg.vocab} tokens: give at most that number"
        )
    generated = generate(
        model,
        jnp.asarray(start[None]),
        tokens,
        key=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
    )
    return codec.decode(np.asarray(jax.device_get(generated))[0])
