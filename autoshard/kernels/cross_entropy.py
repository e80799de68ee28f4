"""The cross-entropy of a linear head, one chunk of the vocabulary at a time. The full logits are never stored.

With logits `z[v] = x . head[:, v]` and the target y of a token:

    loss = log sum_v exp(z[v]) - z[y]
    d_z  = (softmax(z) - onehot(y)) * d_loss;   d_x = sum_v d_z[v] head[:, v];   d_head[:, v] = sum over tokens d_z[v] x

A soft cap c makes the logits `z = c tanh(a / c)` of the products `a = x . head`, and multiplies d_z by `1 - (z / c)^2`.

The forward pass scans over chunks with a running maximum and sum. The backward pass recomputes each chunk's logits and
their softmax from the saved log-sum-exp, adds to the gradient of `x`, and returns the chunk's gradient of the head as a
result of the scan. So each part of the head's gradient is summed over devices once. Both passes hold `tokens * vocab /
chunks` logits and compute them once; the whole loss keeps them for its backward pass.

Chunk j has the classes j, j + chunks, j + 2 chunks, ... Each device of a sharded vocabulary then has an equal part of
every chunk, and no part of the head moves between devices. Their contributions to the gradient of `x` are summed over
these devices once for each chunk. A head that is stored sharded is gathered chunk by chunk, in both passes.

The idea is that of Wijmans et al. 2024, Cut Your Losses (arXiv:2411.09009).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown
from autoshard.kernels.blockwise_attention import INVISIBLE, soft_cap_slope, soft_capped


def linear_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    chunks: int,
    vocab_axis: int = 1,
    soft_cap: float | None = None,
) -> jax.Array:
    """Compute `log sum_v exp(z[v]) - z[target]` of each token, for logits `z = x @ head` that are never stored in full.

    Logits are float64 for `x` in float64, and float32 for other dtypes. A product `x @ head` in bfloat16 would round
    them.

    Args:
        x: `[..., width]`.
        head: `[width, vocab]`, or an embedding `[vocab, width]` with `vocab_axis=0`. It is cast to the dtype of `x`;
            its gradient has its own dtype.
        targets: integers `[...]`. A target outside the vocabulary has the logit 0.
        chunks: number of chunks. If it does not divide the vocabulary, the last classes are padding with probability
            0, and a sharded vocabulary is gathered. A vocabulary is sharded over n devices if n divides
            `vocab / chunks`.
        vocab_axis: the dimension of `head` that is the vocabulary.
        soft_cap: logits are `soft_cap * tanh(x @ head / soft_cap)` (Gemma 2, arXiv:2408.00118); None for no cap.

    Returns:
        The loss in nats, in the dtype of the logits, `[...]`.

    Raises:
        ValueError: If the shapes do not match, the targets are not integers, `chunks` is not a positive integer, or
            `soft_cap` is not a finite number above 0.

    >>> x, head = jnp.ones((2, 3, 4)), jnp.zeros((4, 10))
    >>> loss = linear_cross_entropy(x, head, jnp.zeros((2, 3), jnp.int32), chunks=4)
    >>> loss.shape, round(float(loss[0, 0]), 4)  # log 10
    ((2, 3), 2.3026)
    """
    _check(x, head, targets, chunks, vocab_axis, soft_cap)
    cap = None if soft_cap is None else float(soft_cap)
    return _loss(_Split(head.shape[vocab_axis], chunks, vocab_axis, cap), x, head, targets.astype(jnp.int32))


@shown
class _Split(NamedTuple):
    """How the head is split into chunks, and how its products become logits.

    Attributes:
        vocab: size of the vocabulary.
        chunks: number of chunks.
        axis: the vocabulary's dimension.
        cap: the soft cap of the logits; None for no cap.
    """

    vocab: int
    chunks: int
    axis: int
    cap: float | None

    def split(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the scan's inputs: the chunks' numbers, and the head with the chunks in a leading dimension."""
        missing = -self.vocab % self.chunks
        if missing:
            head = jnp.pad(head, [(0, missing if dim == self.axis else 0) for dim in range(2)])
        before, after = head.shape[: self.axis], head.shape[self.axis + 1 :]
        head = head.reshape(*before, -1, self.chunks, *after)
        return jnp.arange(self.chunks, dtype=jnp.int32), jnp.moveaxis(head, self.axis + 1, 0)

    def merge(self, chunks: jax.Array) -> jax.Array:
        """Undo `split`."""
        head = jnp.moveaxis(chunks, 0, self.axis + 1)
        head = head.reshape(*head.shape[: self.axis], -1, *head.shape[self.axis + 2 :])
        return lax.slice_in_dim(head, 0, self.vocab, axis=self.axis)

    def logits(self, x: jax.Array, chunk: jax.Array) -> jax.Array:
        """Return a chunk's logits `[..., v]`; those of padding are 0."""
        products = jnp.tensordot(x, chunk, (x.ndim - 1, 1 - self.axis), preferred_element_type=_wide(x))
        return soft_capped(products, self.cap)

    def d_products(self, d_logits: jax.Array, logits: jax.Array) -> jax.Array:
        """Return the gradient of the products `x . head` from that of their logits."""
        return d_logits if self.cap is None else d_logits * soft_cap_slope(logits, self.cap)

    def without_padding(self, logits: jax.Array, classes: jax.Array) -> jax.Array:
        """Return the logits with those of padding so small that their exponentials are 0."""
        return logits if self.vocab % self.chunks == 0 else jnp.where(classes < self.vocab, logits, INVISIBLE)

    def classes(self, x: jax.Array, chunk: jax.Array, number: jax.Array) -> jax.Array:
        """Return the class of each of the chunk's logits, int32 `[..., v]`."""
        shape = (*x.shape[:-1], chunk.shape[self.axis])
        return lax.broadcasted_iota(jnp.int32, shape, x.ndim - 1) * self.chunks + number


def _wide(x: jax.Array) -> jnp.dtype:
    """Return the dtype of logits and sums: float32, or float64 for float64 `x`."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(split: _Split, x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    return _forward(split, x, head, targets)[0]


def _forward(split: _Split, x: jax.Array, head: jax.Array, targets: jax.Array):
    def step(carry, inputs):
        running_max, total, target_logit = carry
        number, chunk = inputs
        classes = split.classes(x, chunk, number)
        logits = split.logits(x, chunk)
        # A comparison and a sum, not indexing: a sharded vocabulary is not gathered.
        target_logit = target_logit + jnp.sum(jnp.where(classes == targets[..., None], logits, 0.0), axis=-1)
        logits = split.without_padding(logits, classes)
        new_max = jnp.maximum(running_max, jnp.max(logits, axis=-1))
        total = total * jnp.exp(running_max - new_max) + jnp.sum(jnp.exp(logits - new_max[..., None]), axis=-1)
        return (new_max, total, target_logit), None

    zeros = jnp.zeros(targets.shape, _wide(x))
    first = jnp.full(targets.shape, INVISIBLE, _wide(x))
    (maximum, total, target_logit), _ = lax.scan(step, (first, zeros, zeros), split.split(head.astype(x.dtype)))
    log_total = maximum + jnp.log(total)
    return log_total - target_logit, (x, head, targets, log_total)


def _backward(split: _Split, saved, d_loss: jax.Array):
    x, head, targets, log_total = saved
    tokens = tuple(range(x.ndim - 1))

    def step(d_x, inputs):
        number, chunk = inputs
        classes = split.classes(x, chunk, number)
        logits = split.logits(x, chunk)
        weights = jnp.exp(split.without_padding(logits, classes) - log_total[..., None])
        d_logits = (weights - (classes == targets[..., None]).astype(weights.dtype)) * d_loss[..., None]
        # The slope is computed from the unmasked logits, which are 0 for padding. At INVISIBLE it would overflow, and
        # its product with a gradient of 0 would be NaN.
        d_products = split.d_products(d_logits, logits).astype(x.dtype)
        # A sum over the devices of a sharded vocabulary is in the dtype of `x`, as for the whole loss.
        d_x = d_x + jnp.tensordot(d_products, chunk, (x.ndim - 1, split.axis)).astype(d_x.dtype)
        operands = (x, d_products) if split.axis else (d_products, x)
        return d_x, jnp.tensordot(*operands, (tokens, tokens), preferred_element_type=head.dtype)

    d_x, d_chunks = lax.scan(step, jnp.zeros(x.shape, _wide(x)), split.split(head.astype(x.dtype)))
    return d_x.astype(x.dtype), split.merge(d_chunks), None


_loss.defvjp(_forward, _backward)


def _check(
    x: jax.Array, head: jax.Array, targets: jax.Array, chunks: int, vocab_axis: int, soft_cap: float | None
) -> None:
    where = f"linear_cross_entropy(x {x.shape}, head {head.shape}, targets {targets.dtype}{list(targets.shape)})"
    problems = []
    if vocab_axis not in (0, 1):
        problems.append(f"vocab_axis is {vocab_axis}; it must be 0 or 1")
    elif x.ndim < 1 or head.ndim != 2 or x.shape[-1] != head.shape[1 - vocab_axis]:
        names = "[width, vocab]" if vocab_axis else "[vocab, width]"
        problems.append(f"x must be [..., width] and, with vocab_axis={vocab_axis}, head {names}")
    if targets.shape != x.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        problems.append(f"targets must be integers of shape {x.shape[:-1]}")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        problems.append(f"chunks is {chunks!r}; it must be an integer of at least 1")
    if soft_cap is not None and not 0.0 < soft_cap < float("inf"):
        problems.append(f"soft_cap is {soft_cap}; it must be a finite number above 0")
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
