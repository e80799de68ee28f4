"""Text written by a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import ConfigError
from autoshard.models import GPT, MoE, generate
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
    """Continue a prompt; None for a model that is not a built-in one that writes.

    Args:
        program: The model.
        state: Its arrays.
        codec: Between text and tokens.
        prompt: Text to continue.
        tokens: How many tokens to add.
        seed: Decides the choices.
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_k: Choose among so many likeliest tokens; all where None.
        use_ema: Take the moving average of the parameters, where there is one.

    Raises:
        ConfigError: An empty prompt, or more likeliest tokens than the vocabulary has.
    """
    model = program.model(eval_params(state, use_ema), state.frozen, state.variables, None)
    if not isinstance(model, GPT | MoE):
        return None
    start = codec.encode(prompt).astype(np.int32)
    if not len(start):
        raise ConfigError("the prompt is empty: give at least one character")
    if top_k is not None and top_k > model.cfg.vocab:
        raise ConfigError(
            f"top-k is {top_k}, the model's vocabulary has {model.cfg.vocab} tokens: take at most as many"
        )
    written = generate(
        model,
        jnp.asarray(start[None]),
        tokens,
        key=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
    )
    return codec.decode(np.asarray(jax.device_get(written))[0])
