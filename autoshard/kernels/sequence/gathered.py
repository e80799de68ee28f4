"""Causal attention over gathered keys with balanced work: devices exchange chunks of queries (`exchange`).

Without the exchange, the device with the last queries sees all keys. It has twice the mean work, and the others wait
for it. After the exchange, each device has an early and a late chunk of queries. Together, the two chunks
of every device see the same number of keys.

Shapes are those of `ring`, but keys, values and their segments are whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.kernels.sequence.exchange import exchanged, restored
from autoshard.kernels.sequence.partial_results import with_sinks
from autoshard.kernels.sequence.ring import QUERIES_DIM, SEGMENTS_DIM, Keys, Ring, Rows

_DIMS = (QUERIES_DIM, SEGMENTS_DIM, QUERIES_DIM, QUERIES_DIM, QUERIES_DIM)


def gathered_forward(ring: Ring, rows: Rows, keys: Keys, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return attention's result, and the log-sum-exp of each row. The arguments are those of `ring_forward`."""
    parts = [ring.kernel.forward(ring.softmax, own, keys, positions) for own, positions in _chunks(ring, rows)]
    if sinks is not None:
        parts = [with_sinks(part, sinks.astype(jnp.float32)[None, :, :, None]) for part in parts]
    out = restored([part.out.astype(rows.q.dtype) for part in parts], QUERIES_DIM, ring.axes)
    return out, restored([part.log_sum for part in parts], QUERIES_DIM, ring.axes)


def gathered_backward(ring: Ring, rows: Rows, keys: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, and this device's terms of those of keys and values.

    The arguments are those of `ring_backward`.
    """
    early, late = (ring.kernel.backward(ring.softmax, own, keys, at) for own, at in _chunks(ring, rows))
    d_q = restored([early[0], late[0]], QUERIES_DIM, ring.axes)
    d_k, d_v = (a + b for a, b in zip(early[1:], late[1:], strict=True))
    return d_q.astype(rows.q.dtype), d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype)


def _chunks(ring: Ring, rows: Rows) -> Iterator[tuple[Rows, jax.Array]]:
    """Yield the early and the late chunk of this device, with the positions of their queries."""
    devices, index = lax.axis_size(ring.axes), lax.axis_index(ring.axes)
    half = rows.q.shape[QUERIES_DIM] // 2
    pairs = [None if x is None else exchanged(x, dim, ring.axes) for x, dim in zip(rows, _DIMS, strict=True)]
    for n, chunk in enumerate((index, 2 * devices - 1 - index)):
        positions = (chunk * half + jnp.arange(half)).astype(jnp.int32)
        arrays: list[Any] = [None if pair is None else pair[n] for pair in pairs]
        yield Rows(*arrays), positions
