"""A factor of the queries that grows with the position, so that attention stays sharp in long texts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class Temperature:
    r"""The factor :math:`1 + a \log(1 + \lfloor (p + 1) / n \rfloor)` of the queries at position p.

    Source: arXiv:2501.19399, as in Llama 4.

    Attributes:
        scale: a.
        step: n, the number of positions after which the factor changes.

    >>> [round(float(factor), 2) for factor in Temperature(scale=1.0, step=4).factors(jnp.arange(5))]
    [1.0, 1.0, 1.0, 1.69, 1.69]
    """

    scale: float
    step: int

    def factors(self, positions: jax.Array) -> jax.Array:
        """Return the factors, float32 in the shape of `positions`, which are integers.

        The division is one of integers. XLA replaces a division of floats by a constant with a multiplication by its
        reciprocal. The result can then be just below a whole number, and its floor is one too low.
        """
        return 1.0 + self.scale * jnp.log1p(((positions + 1) // self.step).astype(jnp.float32))
