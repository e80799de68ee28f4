"""Rotary positions: the angle by which each pair of elements of a query or key turns at each position.

    angle[p, i] = p * frequency[i],    frequency[i] = base ** (-2 i / dims)        for i < dims / 2

Models that were extended to longer contexts scale the frequencies:

- `linear` divides all frequencies by `factor` (arXiv:2306.15595).
- `llama3` divides those whose wavelength exceeds `original_context / low`, keeps those below `original_context / high`,
  and interpolates between them (Llama 3.1, arXiv:2407.21783).
- `yarn` divides those that turn less than `beta_slow` times in the original context, keeps those that turn more than
  `beta_fast` times, interpolates between them by index, and scales queries and keys by `attention_factor`
  (arXiv:2309.00071).

With several axes, such as time, row and column of an image's patch, each pair turns by its position along one axis:
`sections` pairs for each axis (M-RoPE, arXiv:2409.12191).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from autoshard._shown import shown

Scaling = Literal["none", "linear", "llama3", "yarn"]
Table = tuple[jax.Array, jax.Array]


@shown
@dataclass(frozen=True)
class Rotary:
    """The frequencies of rotary positions.

    Attributes:
        base: base of the frequencies.
        scaling: how the frequencies are scaled; see the module.
        factor: how many times longer the context is than the original one.
        original_context: positions of the original context, for `llama3` and `yarn`.
        low: `low_freq_factor` of `llama3`.
        high: `high_freq_factor` of `llama3`.
        beta_fast: turns in the original context above which `yarn` keeps a frequency.
        beta_slow: turns below which `yarn` divides it by `factor`.
        truncate: whether `yarn` rounds the two indices of its ramp to whole numbers.
        interleaved: whether the pairs are `(x[2 i], x[2 i + 1])` instead of `(x[i], x[i + dims / 2])`.
        attention_factor: factor of cosine and sine under `yarn`; None means `0.1 log(factor) + 1`.
        sections: number of pairs that each axis of the positions rotates; empty means one axis.
        restart: whether the frequencies start anew in each section.
        fraction: fraction of the pairs that are rotated: those with the highest frequencies (Gemma 4).
    """

    base: float = 10_000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    original_context: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    interleaved: bool = False
    sections: tuple[int, ...] = ()
    restart: bool = False
    fraction: float = 1.0

    def frequencies(self, dims: int) -> np.ndarray:
        """Return the frequencies of the `dims / 2` pairs, in radians per position, float32.

        >>> Rotary(base=100.0).frequencies(4).tolist()
        [1.0, 0.10000000149011612]
        """
        if self.restart:
            one = replace(self, restart=False, sections=()).frequencies(dims // len(self.sections))
            return np.tile(one, len(self.sections))
        found = self.base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
        found[int(self.fraction * dims // 2) :] = 0.0
        if self.scaling == "linear":
            found = found / self.factor
        elif self.scaling == "llama3":
            turns = self.original_context * found / (2 * math.pi)  # in the original context
            span = self.high - self.low  # 0 for Llama 4: no frequency is interpolated
            kept = np.clip((turns - self.low) / span, 0.0, 1.0) if span else turns >= self.low
            found = found * (kept + (1.0 - kept) / self.factor)
        elif self.scaling == "yarn":
            kept = 1.0 - self._ramp(dims)
            found = found * (kept + (1.0 - kept) / self.factor)
        return found.astype(np.float32)

    def _ramp(self, dims: int) -> np.ndarray:
        """Return 0 for the pairs whose frequency `yarn` keeps, 1 for those that it divides, `[dims / 2]`."""

        def index(turns: float) -> float:  # of the pair that turns this often in the original context
            ratio = self.original_context / (turns * 2 * math.pi)
            return dims * math.log(ratio) / (2 * math.log(self.base))

        first, last = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dims - 1)
        # The published code widens an empty ramp by this amount.
        return np.clip((np.arange(dims // 2) - first) / (last - first or 0.001), 0.0, 1.0)

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine."""
        if self.scaling != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def table(self, dims: int, positions: jax.Array) -> Table:
        """Return cosine and sine of each pair, float32 `[batch, seq, dims / 2]`.

        Args:
            dims: number of elements that are rotated.
            positions: `[batch, seq]`, or `[axes, batch, seq]` with an axis for each section.
        """
        wide, frequencies = positions.astype(jnp.float32)[..., None], self.frequencies(dims)
        if self.sections and positions.ndim == 3:
            parts = np.split(frequencies, np.cumsum(self.sections)[:-1])
            angles = jnp.concatenate([wide[axis] * part for axis, part in enumerate(parts)], axis=-1)
        else:
            angles = wide * frequencies
        return jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude


def rotate(x: jax.Array, table: Table, interleaved: bool = False) -> jax.Array:
    """Rotate the pairs of `[batch, seq, heads, head_dim]`, in float32.

    Args:
        x: queries or keys.
        table: cosine and sine, `[batch or 1, seq, head_dim / 2]`.
        interleaved: whether the pairs are `(x[2 i], x[2 i + 1])` instead of `(x[i], x[i + head_dim / 2])`. The result
            has the pairs in the other order then, which no product of queries and keys sees.
    """
    cos, sin = (part[:, :, None, :] for part in table)
    wide = x.astype(jnp.float32)
    if interleaved:
        pairs = wide.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
