"""Sampling from a language model.

Keys and values of earlier positions are cached, so each new token costs one position. If the text is longer
than the context, it cannot be cached: its window moves, which changes all positions. The last `context` tokens are then
recomputed for each new token. In both cases, a `MoE` uses `extend`, which drops no choice of an expert.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard.models.decoder.decoder import Decoder
from autoshard.models.gpt import GPT
from autoshard.models.moe import MoE


def generate(
    model: GPT | MoE | Decoder,
    prompt: jax.Array,
    n: int,
    *,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> jax.Array:
    """Continue a prompt by `n` sampled tokens, each predicted from at most the last `context` tokens.

    Args:
        model: the model.
        prompt: integers `[batch, length]`, length at least 1.
        n: number of tokens to add.
        key: random key; unused at temperature 0.
        temperature: divisor of the logits; 0 takes the most probable token.
        top_k: sample only from this many most probable tokens; defaults to all tokens.

    Returns:
        The prompt and its continuation, `[batch, length + n]`.

    >>> from autoshard.models import GPTConfig
    >>> model = GPT(GPTConfig(layers=1, width=8, heads=2, context=4), rngs=nnx.Rngs(0))
    >>> generate(model, jnp.zeros((1, 3), jnp.int32), 5, key=jax.random.key(0)).shape
    (1, 8)
    """
    problems = []
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        problems.append(f"prompt has shape {prompt.shape}; it must be [batch, length] with at least one token")
    if n < 0:
        problems.append(f"n is {n}; it must be at least 0")
    if temperature < 0.0:
        problems.append(f"temperature is {temperature}; it must be at least 0")
    if top_k is not None and not 1 <= top_k <= model.cfg.vocab:
        problems.append(f"top_k is {top_k}; it must be from 1 to {model.cfg.vocab}, the size of the vocabulary")
    if problems:
        raise ValueError("generate: " + "; ".join(problems))
    graph, params = nnx.split(model)
    greedy = temperature == 0.0
    divisor = jnp.float32(1.0 if greedy else temperature)
    return _generate(graph, params, prompt, key, divisor, n=n, top_k=top_k, greedy=greedy)


@partial(jax.jit, static_argnums=0, static_argnames=("n", "top_k", "greedy"))
def _generate(
    graph: Any, params: Any, prompt: jax.Array, key: jax.Array, temperature: jax.Array, **options: Any
) -> Any:
    return sample_tokens(nnx.merge(graph, params), prompt, key, temperature, **options)


def sample_tokens(
    model: Any,
    prompt: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    n: int,
    top_k: int | None,
    greedy: bool,
    context: int | None = None,
) -> jax.Array:
    """Return the prompt and its continuation, `[batch, length + n]`. This is the part of `generate` that JAX traces.

    A model other than `GPT`, `MoE` and `Decoder` maps tokens `[batch, seq]` to logits `[batch, seq, vocab]`. The logits
    of a position may depend only on the tokens up to it. The model is called once for each new token, on at most
    `context` tokens.
    """
    batch, length = prompt.shape
    tokens = jnp.concatenate([prompt, jnp.zeros((batch, n), prompt.dtype)], axis=1)

    def write_choice(tokens: jax.Array, logits: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose tokens from `logits [batch, vocab]` and write them at `index`."""
        logits = logits.astype(jnp.float32)
        if top_k is not None:
            logits = jnp.where(logits < lax.top_k(logits, top_k)[0][:, -1:], -jnp.inf, logits)
        if greedy:
            choice = jnp.argmax(logits, axis=-1)
        else:
            choice = jax.random.categorical(jax.random.fold_in(key, index), logits / temperature)
        choice = choice.astype(tokens.dtype)[:, None]
        return lax.dynamic_update_slice_in_dim(tokens, choice, index, axis=1), choice

    if n == 0:
        return prompt
    built_in = isinstance(model, GPT | MoE | Decoder)
    longest: int = model.cfg.context if context is None else context
    if not built_in or length + n > longest:
        return _generate_windowed(model, tokens, length, n, write_choice, min(longest, length + n))
    cache: Any = model.cache(batch, length + n)
    logits, cache = model.extend(prompt, cache)

    def step(index: jax.Array, carry: Any) -> Any:
        tokens, logits, cache = carry
        tokens, choice = write_choice(tokens, logits, index)
        logits, cache = model.extend(choice, cache)
        return tokens, logits[:, 0], cache

    tokens, logits, _ = lax.fori_loop(length, length + n - 1, step, (tokens, logits[:, -1], cache))
    return write_choice(tokens, logits, jnp.int32(length + n - 1))[0]


def _generate_windowed(model: Any, tokens: jax.Array, length: int, n: int, write_choice: Any, window: int) -> jax.Array:
    """Generate without a cache: each token is predicted from a window of the last tokens."""

    def logits_of(recent: jax.Array) -> jax.Array:
        if not isinstance(model, GPT | MoE):
            accepted = inspect.signature(model).parameters
            return model(recent, **({"deterministic": True} if "deterministic" in accepted else {}))
        # Use `extend`, not a call: in a call of a MoE, the zeros would compete with the text for capacity.
        return model.extend(recent, model.cache(tokens.shape[0], window))[0]

    def step(index: jax.Array, tokens: jax.Array) -> jax.Array:
        # The window holds zeros from `index` on. Causal attention does not see them.
        start = jnp.maximum(index - window, 0)
        recent = lax.dynamic_slice_in_dim(tokens, start, window, axis=1)
        logits = lax.dynamic_index_in_dim(logits_of(recent), index - 1 - start, axis=1, keepdims=False)
        return write_choice(tokens, logits, index)[0]

    return lax.fori_loop(length, length + n, step, tokens)
