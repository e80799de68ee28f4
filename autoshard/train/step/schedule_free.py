r"""The average of the parameters that a schedule-free optimizer trains (Defazio et al., arXiv:2405.15682).

The gradient is taken at the parameters :math:`y = (1 - b_1) z + b_1 x`. The optimizer's state has :math:`z`; the model
to evaluate, to sample from and to export is

.. math:: x = \frac{y - (1 - b_1) z}{b_1}
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from optax import contrib

Tree = Any


def schedule_free_state(opt_state: Tree) -> Any:
    """Return the `ScheduleFreeState` in the state of an optimizer; None if it has none."""

    def is_one(node: Any) -> bool:
        return isinstance(node, contrib.ScheduleFreeState)

    return next((node for node in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(node)), None)


def evaluated_value(y: jax.Array, z: jax.Array, b1: jax.Array | float) -> jax.Array:
    """Return x of a parameter, in its dtype, computed in float32."""
    share = jnp.asarray(b1, jnp.float32)
    return ((y.astype(jnp.float32) - (1.0 - share) * z.astype(jnp.float32)) / share).astype(y.dtype)
