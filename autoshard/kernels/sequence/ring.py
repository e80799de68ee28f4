"""Ring attention: each device keeps its queries, while keys and values travel from device to device.

    forward    at hop s, device i has the keys of device i - s. It computes attention over these alone, and combines the
               result with that of the hops before (`partial_results`), while the keys of the next hop arrive.
    backward   keys travel again, and their gradients with them: each device adds its terms, in float32. One more
               transfer takes the gradients home.

With a causal mask, devices exchange chunks first, so that all have the same work (`exchange`). Device i then has chunks
i (early) and 2n - 1 - i (late). At each later hop it computes two pairs of chunks, and no key of them is masked. The
first pair is the late queries with the early keys. The second pair is the early queries with the early keys if the keys
come from a device before i, and the late queries with the late keys if they come from a device after i.

Queries are `[batch, kv_heads, group, queries, head_dim]`, keys and values `[batch, kv_heads, keys, head_dim]`, all of
them shards. The functions run under `shard_map`, manual over all mesh axes.

Sources: Liu et al. 2023, arXiv:2310.01889 (the ring); Brandon et al. 2023, arXiv:2311.09431 (balanced causal work).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown
from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.sequence.exchange import Axes, exchanged, restored
from autoshard.kernels.sequence.partial_results import UNSEEN, Partial, combined, with_sinks
from autoshard.kernels.sequence.schedule import Schedule, schedule
from autoshard.kernels.visibility import Visibility

KEYS_DIM, QUERIES_DIM, SEGMENTS_DIM = 2, 3, 1  # the dimension of the sequence in keys, in queries, in segments


@shown
class Rows(NamedTuple):
    """Queries with their segments and, in the backward pass, results, log-sum-exps and cotangents."""

    q: jax.Array
    segments: jax.Array | None = None
    out: jax.Array | None = None
    log_sum: jax.Array | None = None
    d_out: jax.Array | None = None


@shown
class Keys(NamedTuple):
    """The arrays that travel: keys, values and their segments."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None = None


class Kernel(Protocol):
    """Attention of some queries over some keys, on one device."""

    @property
    def lanes(self) -> int:
        """The kernel takes only multiples of this number of positions."""
        ...

    def forward(self, softmax: Softmax, rows: Rows, keys: Keys, positions: jax.Array | None) -> Partial:
        """Return the result over these keys; `positions` of the queries count from the first key."""
        ...

    def backward(self, softmax: Softmax, rows: Rows, keys: Keys, positions: jax.Array | None) -> tuple[Any, ...]:
        """Return the gradients of queries, keys and values, float32; the rows have the results over all keys."""
        ...


@shown
@dataclass(frozen=True)
class Ring:
    """One call on a ring.

    Attributes:
        axes: the mesh axes over which the sequence is sharded, major to minor.
        softmax: the static part of attention.
        kernel: what computes attention on one device.
    """

    axes: Axes
    softmax: Softmax
    kernel: Kernel

    def schedule(self, rows: Rows) -> Schedule:
        """Return how keys travel."""
        devices, length = lax.axis_size(self.axes), rows.q.shape[QUERIES_DIM]
        return schedule(self.softmax.visibility, devices, length, self.kernel.lanes)

    def shifted(self, moving: Any, hops: int = 1) -> Any:
        """Send arrays `hops` devices ahead in the ring; return those that arrive here."""
        devices = lax.axis_size(self.axes)
        pairs = [(i, (i + hops) % devices) for i in range(devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), moving)


def ring_forward(ring: Ring, rows: Rows, keys: Keys, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return attention's result in the dtype of the queries, and the log-sum-exp of each row.

    Args:
        ring: the call.
        rows: the queries of this device, and their segments.
        keys: its keys.
        sinks: for each head the score of a key without a value, `[kv_heads, group]`, or None.
    """
    plan, dtype = ring.schedule(rows), rows.q.dtype
    visit = _Balanced(ring, plan) if plan.balanced else _Consecutive(ring, plan)
    own, moving = visit.rows(rows), visit.keys(keys)

    def at(hop: Any, found: Any, moving: Any, first: bool = False) -> Any:
        return visit.forward(hop, found, own, moving, first)

    found = at(0, None, moving, first=True)
    if plan.hops:
        moving = ring.shifted(moving)

        def step(carry: Any, hop: Any) -> tuple[Any, None]:
            found, moving = carry
            following = ring.shifted(moving)  # travels while this hop computes
            return (at(hop, found, moving), following), None

        if plan.hops > 1:
            (found, moving), _ = lax.scan(step, (found, moving), jnp.arange(1, plan.hops))
        found = at(plan.hops, found, moving)
    if sinks is not None:
        scores = sinks.astype(jnp.float32)[None, :, :, None]
        found = [with_sinks(part, scores) for part in found]
    out = visit.together([part.out.astype(dtype) for part in found])
    return out, visit.together([part.log_sum for part in found])


def ring_backward(ring: Ring, rows: Rows, keys: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values, in their dtypes.

    Args:
        ring: the call.
        rows: the queries of this device with results, log-sum-exps and cotangents.
        keys: its keys.
    """
    plan = ring.schedule(rows)
    visit = _Balanced(ring, plan) if plan.balanced else _Consecutive(ring, plan)
    own, moving = visit.rows(rows), visit.keys(keys)

    d_q, d_keys = visit.backward(0, own, moving, first=True)
    if plan.hops:
        moving = ring.shifted(moving)

        def step(carry: Any, hop: Any, last: bool = False) -> Any:
            d_q, d_keys, moving = carry
            following = moving if last else ring.shifted(moving)  # travels while this hop computes
            d_keys = ring.shifted(d_keys)
            more_q, more_keys = visit.backward(hop, own, moving)
            return jax.tree.map(jnp.add, d_q, more_q), jax.tree.map(jnp.add, d_keys, more_keys), following

        carry = d_q, d_keys, moving
        if plan.hops > 1:
            carry, _ = lax.scan(lambda c, hop: (step(c, hop), None), carry, jnp.arange(1, plan.hops))
        d_q, d_keys, _ = step(carry, plan.hops, last=True)
        d_keys = ring.shifted(d_keys, -plan.hops)
    d_k, d_v = (visit.keys_together([part[n] for part in d_keys]) for n in range(2))
    return visit.together(d_q).astype(rows.q.dtype), d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype)


class _Consecutive:
    """Each device has consecutive positions. There is one chunk of queries and one of keys."""

    def __init__(self, ring: Ring, plan: Schedule):
        self.ring, self.plan = ring, plan
        self.visibility = ring.softmax.visibility

    def rows(self, rows: Rows) -> list[Rows]:
        return [rows]

    def keys(self, keys: Keys) -> list[Keys]:
        return [keys]

    def together(self, parts: list[jax.Array]) -> jax.Array:
        return parts[0]

    keys_together = together

    def positions(self, hop: Any) -> jax.Array | None:
        """Return the positions of the queries, counted from the first key of this hop."""
        if self.visibility.is_full:
            return None
        index, length = lax.axis_index(self.ring.axes), self.plan.length
        devices = jnp.where(index >= hop, hop, hop - self.plan.devices)  # devices from the keys to the queries
        return (devices * length + jnp.arange(length)).astype(jnp.int32)

    def if_seen(self, positions: Any, hop: Any, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns. If no query sees a key of this hop, return the result over no keys instead."""
        if positions is None or (isinstance(hop, int) and hop == 0):
            return compute()
        low, high = self.visibility.keys_of(positions[0], positions[-1], self.plan.length, jnp)
        nothing = jax.eval_shape(compute)

        def unseen() -> Any:
            if isinstance(nothing, Partial):
                return Partial(jnp.zeros_like(nothing.out), jnp.full_like(nothing.log_sum, UNSEEN))
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)

        return lax.cond(low <= high, compute, unseen)

    def forward(self, hop: Any, found: Any, rows: list[Rows], keys: list[Keys], first: bool) -> list[Partial]:
        positions, kernel = self.positions(hop), self.ring.kernel
        part = self.if_seen(positions, hop, lambda: kernel.forward(self.ring.softmax, rows[0], keys[0], positions))
        return [part if first else combined(found[0], part)]

    def backward(self, hop: Any, rows: list[Rows], keys: list[Keys], first: bool = False) -> tuple[list, list]:
        positions, kernel = self.positions(hop), self.ring.kernel
        d_q, d_k, d_v = self.if_seen(
            positions, hop, lambda: kernel.backward(self.ring.softmax, rows[0], keys[0], positions)
        )
        return [d_q], [(d_k, d_v)]


class _Balanced:
    """Each device has an early and a late chunk of a causal sequence."""

    def __init__(self, ring: Ring, plan: Schedule):
        self.ring, self.plan, self.kernel = ring, plan, ring.kernel
        self.seen = replace(ring.softmax, visibility=Visibility())
        self.positions = jnp.arange(plan.length // 2, dtype=jnp.int32)

    def rows(self, rows: Rows) -> list[Rows]:
        return self._split(rows, (QUERIES_DIM, SEGMENTS_DIM, QUERIES_DIM, QUERIES_DIM, QUERIES_DIM))

    def keys(self, keys: Keys) -> list[Keys]:
        return self._split(keys, (KEYS_DIM, KEYS_DIM, SEGMENTS_DIM))

    def _split(self, arrays: Any, dims: Sequence[int]) -> list[Any]:
        pairs = [None if x is None else exchanged(x, d, self.ring.axes) for x, d in zip(arrays, dims, strict=True)]
        return [type(arrays)(*(None if pair is None else pair[n] for pair in pairs)) for n in range(2)]

    def together(self, parts: list[jax.Array]) -> jax.Array:
        return restored(parts, QUERIES_DIM, self.ring.axes)

    def keys_together(self, parts: list[jax.Array]) -> jax.Array:
        return restored(parts, KEYS_DIM, self.ring.axes)

    def is_earlier(self, hop: Any) -> jax.Array:
        """Whether the keys of this hop are those of an earlier device."""
        return lax.axis_index(self.ring.axes) >= hop

    def chosen(self, hop: Any, rows: list[Rows], keys: list[Keys]) -> tuple[Rows, Keys]:
        """Return the queries and keys of the second pair of chunks that a later hop computes."""
        earlier = self.is_earlier(hop)
        return tuple(jax.tree.map(lambda a, b: jnp.where(earlier, a, b), *pair) for pair in (rows, keys))

    def forward(self, hop: Any, found: Any, rows: list[Rows], keys: list[Keys], first: bool) -> list[Partial]:
        across = self.kernel.forward(self.seen, rows[1], keys[0], None)
        if first:
            early, late = (
                self.kernel.forward(self.ring.softmax, r, k, self.positions) for r, k in zip(rows, keys, strict=True)
            )
            return [early, combined(late, across)]
        part, earlier = self.kernel.forward(self.seen, *self.chosen(hop, rows, keys), None), self.is_earlier(hop)
        late = combined(combined(found[1], across), part.where(~earlier))
        return [combined(found[0], part.where(earlier)), late]

    def backward(self, hop: Any, rows: list[Rows], keys: list[Keys], first: bool = False) -> tuple[list, list]:
        d_late, *d_early_keys = self.kernel.backward(self.seen, rows[1], keys[0], None)
        if first:
            (d_q0, *d_keys0), (d_q1, *d_keys1) = (
                self.kernel.backward(self.ring.softmax, r, k, self.positions) for r, k in zip(rows, keys, strict=True)
            )
            return [d_q0, d_q1 + d_late], [_sum(d_keys0, d_early_keys), tuple(d_keys1)]
        earlier = self.is_earlier(hop)
        d_q, *d_keys = self.kernel.backward(self.seen, *self.chosen(hop, rows, keys), None)
        d_keys0, d_keys1 = ([jnp.where(here, x, 0.0) for x in d_keys] for here in (earlier, ~earlier))
        d_q0, d_q1 = (jnp.where(here, d_q, 0.0) for here in (earlier, ~earlier))
        return [d_q0, d_q1 + d_late], [_sum(d_keys0, d_early_keys), tuple(d_keys1)]


def _sum(a: Any, b: Any) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
