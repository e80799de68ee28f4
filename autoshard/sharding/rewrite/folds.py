"""Reorders and merges the dimensions of an array, and undoes it. Dimensions of size 1 may be anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class Fold:
    """How an array is brought to a kernel's order of dimensions.

    Attributes:
        groups: for each dimension of the kernel's array, the dimensions that it consists of, major to minor.

    >>> Fold(((0,), (2, 1))).fold(np.zeros((2, 3, 4))).shape
    (2, 12)
    """

    groups: tuple[tuple[int, ...], ...]

    def order(self, rank: int) -> list[int]:
        """Return all dimensions in the kernel's order. Those in no group, of size 1, come first."""
        used = [d for group in self.groups for d in group]
        return [*(d for d in range(rank) if d not in used), *used]

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the kernel's array."""
        return tuple(math.prod(shape[d] for d in group) for group in self.groups)

    def fold(self, x: Any, xp: Any = jnp) -> Any:
        """Return the kernel's array. `xp` is `jax.numpy` or NumPy."""
        return xp.reshape(xp.transpose(x, self.order(x.ndim)), self.sizes(x.shape))

    def unfold(self, x: Any, shape: Sequence[int]) -> Any:
        """Return the array of this shape whose `fold` is `x`."""
        order = self.order(len(shape))
        return jnp.transpose(jnp.reshape(x, [shape[d] for d in order]), np.argsort(order).tolist())
