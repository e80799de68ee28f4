"""Choose each row's next token from its logits, with settings of its own.

    l = logits, divided (l > 0) or multiplied (l < 0) by the repetition penalty where the text has the token
    greedy: argmax l                          for temperature 0
    sample: argmax (l / temperature + Gumbel noise), over the tokens that top_k, then top_p, then min_p leave

A vocabulary may be sharded, so it is split into chunks. Each device finds the likeliest tokens of its own chunks. The
likeliest tokens of the vocabulary are among them. All scores are sorted only if `top_k` or `top_p` need more tokens.

The noise of a row is a function of its seed, its number and the position of the token. So the tokens of a prompt depend
neither on the other rows nor on the plan.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.serve.constants import CANDIDATES, CHUNKS


@shown
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a prompt are chosen.

    Attributes:
        temperature: divisor of the logits; 0 always takes the most likely token.
        top_k: sample from this many of the most likely tokens, and those as likely as the last; 0 for all.
        top_p: sample from the most likely tokens that together have this probability, at least one.
        min_p: sample from tokens with at least this fraction of the most likely token's probability.
        repetition_penalty: divides the positive logits of tokens of the prompt and the text so far, and multiplies the
            negative ones (arXiv:1909.05858). 1 changes nothing.
        seed: random seed, from 0 to 2**32 - 1.

    Raises:
        ConfigError: a value is invalid; the message names all that are.

    >>> Sampling(temperature=0.7, top_p=0.9).top_k
    0
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < math.inf:
            problems.append(f"temperature is {self.temperature}; it must be at least 0 and finite")
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}; it must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            problems.append(f"min_p is {self.min_p}; it must be from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            problems.append(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 and finite")
        if not 0 <= self.seed < 2**32:
            problems.append(f"seed is {self.seed}; it must be from 0 to 2**32 - 1")
        if problems:
            raise ConfigError("; ".join(problems))


GREEDY = Sampling()


@shown
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """The fields of `Sampling` for each row, and the number of the row's prompt. All are arrays `[rows]`."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    seed: jax.Array
    number: jax.Array

    @classmethod
    def of(cls, rows: list[Sampling], numbers: list[int]) -> Settings:
        """Collect the settings of rows, as NumPy arrays."""

        def column(name: str, dtype: type) -> np.ndarray:
            return np.array([getattr(row, name) for row in rows], dtype)

        floats = ("temperature", "top_p", "min_p", "repetition_penalty")
        found = {name: column(name, np.float32) for name in floats}
        found |= {"top_k": column("top_k", np.int32), "seed": column("seed", np.uint32)}
        return cls(**found, number=np.array(numbers, np.uint32))  # pyright: ignore[reportArgumentType]


def choose(logits: jax.Array, settings: Settings, seen: jax.Array, positions: jax.Array) -> jax.Array:
    """Choose the next token of each row.

    Args:
        logits: `[rows, vocab]`.
        settings: of each row.
        seen: which tokens the row's text has, booleans `[rows, vocab]`.
        positions: position of the token that is chosen, int32 `[rows]`.

    Returns:
        int32 `[rows]`.
    """
    scores = penalized(logits.astype(jnp.float32), seen, settings.repetition_penalty)
    greedy = jnp.argmax(scores, axis=-1).astype(jnp.int32)

    def sampled() -> jax.Array:
        scaled = scores / jnp.where(settings.temperature > 0, settings.temperature, 1.0)[:, None]
        keys = jax.vmap(_key)(settings.seed, settings.number, positions)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:], jnp.float32))(keys)
        drawn = jnp.argmax(filtered(scaled, settings) + noise, axis=-1).astype(jnp.int32)
        return jnp.where(settings.temperature > 0, drawn, greedy)

    return lax.cond(jnp.any(settings.temperature > 0), sampled, lambda: greedy)


def penalized(scores: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Apply the repetition penalty of each row."""
    factor = penalty[:, None]
    return jnp.where(seen, jnp.where(scores > 0, scores / factor, scores * factor), scores)


def filtered(scores: jax.Array, settings: Settings) -> jax.Array:
    """Set the scores of tokens that `top_k`, `top_p` or `min_p` exclude to minus infinity."""
    vocab = scores.shape[-1]
    limits = (settings.top_k > 0) & (settings.top_k < vocab) | (settings.top_p < 1)

    def by_rank() -> jax.Array:
        ordered = likeliest(scores, CANDIDATES)
        ranks = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab), vocab)
        found, known = jnp.minimum(ranks, ordered.shape[-1]), ranks <= ordered.shape[-1]
        last = jnp.take_along_axis(ordered, found[:, None] - 1, axis=-1)
        last = jnp.where(known[:, None], last, -jnp.inf)
        lowest, left_out = _lowest(scores, ordered, last, settings.top_p)
        # Without `top_k`, the candidates decide if `top_p` leaves out one of them.
        unlimited = (ranks == vocab) & (settings.top_p >= 1)
        sure = known | ((ranks == vocab) & left_out) | unlimited
        return lax.cond(jnp.all(sure), lambda: jnp.where(unlimited, -jnp.inf, lowest), lambda: by_sorting(ranks))

    def by_sorting(ranks: jax.Array) -> jax.Array:
        ordered = _descending(scores)
        last = jnp.take_along_axis(ordered, ranks[:, None] - 1, axis=-1)
        return _lowest(scores, ordered, last, settings.top_p)[0]

    lowest = lax.cond(jnp.any(limits), by_rank, lambda: jnp.full(scores.shape[:-1], -jnp.inf))
    # log(0) is minus infinity, which excludes nothing.
    lowest = jnp.maximum(lowest, jnp.max(scores, axis=-1) + jnp.log(settings.min_p))
    return jnp.where(scores >= lowest[:, None], scores, -jnp.inf)


def likeliest(scores: jax.Array, count: int) -> jax.Array:
    """Return the largest scores of each row in descending order, `[rows, count]`, or all if there are fewer.

    Only the largest scores of each chunk of the vocabulary leave the device that has the chunk.

    >>> likeliest(jnp.arange(96.0)[None], 3).tolist()
    [[95.0, 94.0, 93.0]]
    """
    rows, vocab = scores.shape
    chunks = math.gcd(vocab, CHUNKS)
    # Sorts, because XLA's partitioner gathers the operand of a `top_k` with several leading dimensions.
    of_chunks = _descending(scores.reshape(rows, chunks, -1))[..., :count]
    return _descending(of_chunks.reshape(rows, -1))[:, :count]


def _descending(scores: jax.Array) -> jax.Array:
    return -jnp.sort(-scores, axis=-1)


def _lowest(
    scores: jax.Array, ordered: jax.Array, last: jax.Array, top_p: jax.Array
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the lowest score that `top_p` leaves, and whether it leaves out one of the ordered scores, both `[rows]`.

    Args:
        scores: `[rows, vocab]`.
        ordered: the largest of them in descending order, `[rows, count]`.
        last: the lowest score that `top_k` leaves, `[rows, 1]`.
        top_p: `[rows]`.
    """
    largest = ordered[:, :1]
    total = jnp.sum(jnp.where(scores >= last, jnp.exp(scores - largest), 0), axis=-1, keepdims=True)
    probability = jnp.where(ordered >= last, jnp.exp(ordered - largest), 0) / total
    before = jnp.cumsum(probability, axis=-1) - probability
    enough = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    return jnp.min(jnp.where(enough & (ordered >= last), ordered, jnp.inf), axis=-1), ~enough[:, -1]


def _key(seed: jax.Array, number: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)
