"""Which keys a query sees: a static function of their positions.

    causal        a query sees its own position and earlier ones
    window = w    a query sees its own position and the `w - 1` before it; without `causal` also the `w - 1` after it

The keys that a query sees are consecutive, and so are the queries that see a key. Kernels rely on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees.

    Attributes:
        causal: whether a query sees no later position than its own.
        window: number of positions that a query sees in one direction, its own included; None for all.

    >>> Visibility(causal=True, window=2)(np.array([[2]]), np.arange(4)).tolist()
    [[False, True, True, False]]
    """

    causal: bool = False
    window: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether each query sees every key."""
        return not self.causal and self.window is None

    def __call__(self, queries: Any, keys: Any) -> Any:
        """Return whether queries at some positions see keys at others. The positions broadcast."""
        visible = queries >= keys if self.causal else (queries == queries) & (keys == keys)
        if self.window is not None:
            visible = visible & (queries - keys < self.window)
            if not self.causal:
                visible = visible & (keys - queries < self.window)
        return visible

    def keys_of(self, first: Any, last: Any, keys: int, xp: Any = np) -> tuple[Any, Any]:
        """Return the first and the last key that any of the queries `first` to `last` sees, out of `keys` keys.

        If they see none, the last is below the first. `xp` is NumPy, or `jax.numpy` for traced positions.
        """
        low, high = xp.zeros_like(first), xp.full_like(last, keys - 1)
        if self.causal:
            high = xp.minimum(high, last)
        if self.window is not None:
            low = xp.maximum(low, first - (self.window - 1))
            if not self.causal:
                high = xp.minimum(high, last + (self.window - 1))
        return low, high

    def queries_of(self, first: Any, last: Any) -> tuple[Any, Any]:
        """Return the first and the last position of a query that sees any of the keys `first` to `last`.

        None stands for no bound.
        """
        behind = None if self.window is None else self.window - 1
        low = first if self.causal else None if behind is None else first - behind
        return low, None if behind is None else last + behind

    def pairs(self, queries: int, keys: int) -> int:
        """Return the number of visible pairs of `queries` and `keys` positions, both counted from 0.

        >>> Visibility(causal=True).pairs(4, 4)
        10
        """
        position = np.arange(queries)
        low, high = self.keys_of(position, position, keys)
        return int(np.maximum(high - low + 1, 0).sum())
