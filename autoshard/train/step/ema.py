r"""An exponential moving average of the parameters, kept in the train state, sharded as they are.

With decay :math:`d`, over the updates :math:`i` that count, and parameters :math:`p_i` in float32,

.. math:: m_i = d\,m_{i-1} + (1 - d)\,p_i,\quad w_i = d\,w_{i-1} + (1 - d),\quad m_0 = w_0 = 0,
    \qquad \bar p = m / w

so that the mean is one of the parameters alone from the first update on, and no initial value has a share in it
(Kingma and Ba, arXiv:1412.6980, section 3). An update counts at every k-th step, unless the step's loss or gradient is
not finite, or the loss is more than `spike` times its own mean over the steps before, which are averaged in the same
way with a decay of 0.99.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard._shown import shown

Tree = Any

LOSS_DECAY = 0.99  # of the mean that a spike is told by: about the last hundred steps


@shown
@dataclass(frozen=True)
class EmaConfig:
    """How parameters are averaged.

    Attributes:
        decay: of the mean at one update; 0 for no average.
        every: steps between updates.
        spike: times the recent mean of the loss, above which a step is left out; 0 for no such limit.
    """

    decay: float = 0.0
    every: int = 1
    spike: float = 2.0


NO_AVERAGE = EmaConfig()


@shown
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Average:
    """The moving average of parameters; see the head of this module.

    Attributes:
        mean: m, float32, in the structure of the parameters.
        weight: w, float32 `[]`; 0 before the first update.
        loss: The same mean of the loss, float32 `[]`.
        loss_weight: Its weight, float32 `[]`.
    """

    mean: Tree
    weight: jax.Array
    loss: jax.Array
    loss_weight: jax.Array


def start(params: Tree) -> Average:
    """An average of nothing yet."""
    # Four arrays: two leaves that share a buffer could not both be donated.
    mean = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    return Average(mean, *(jnp.zeros((), jnp.float32) for _ in range(3)))


def updated(average: Average, params: Tree, loss: jax.Array, sound: jax.Array, step: jax.Array, how: EmaConfig) -> Any:
    """The average after a step.

    Args:
        average: before it.
        params: after it.
        loss: of the step, float32 `[]`.
        sound: whether what the step computed is finite, bool `[]`.
        step: how many steps were done, this one included, int32 `[]`.
        how: the settings.
    """
    counts = sound & jnp.isfinite(loss)
    if how.spike:
        typical = average.loss / jnp.maximum(average.loss_weight, 1e-30)
        # A loss below zero is no reason to call everything a spike.
        limit = typical + (how.spike - 1.0) * jnp.abs(typical)
        counts &= (average.loss_weight == 0) | (loss <= limit)
    moves = counts & (step % how.every == 0)

    def mix(mean: jax.Array, value: jax.Array, decay: float, when: jax.Array) -> jax.Array:
        # Chosen, not multiplied by zero, which would keep what is not finite.
        return jnp.where(when, mean * decay + value.astype(jnp.float32) * (1.0 - decay), mean)

    one = jnp.ones((), jnp.float32)
    return Average(
        jax.tree.map(lambda mean, leaf: mix(mean, leaf, how.decay, moves), average.mean, params),
        mix(average.weight, one, how.decay, moves),
        mix(average.loss, loss, LOSS_DECAY, counts),
        mix(average.loss_weight, one, LOSS_DECAY, counts),
    )


def averaged(average: Average, params: Tree) -> Tree:
    """The mean in the parameters' dtypes; the parameters themselves before the first update."""
    some = average.weight > 0
    scale = 1.0 / jnp.where(some, average.weight, 1.0)

    def corrected(mean: jax.Array, leaf: jax.Array) -> jax.Array:
        return jnp.where(some, (mean * scale).astype(leaf.dtype), leaf)

    return jax.tree.map(corrected, average.mean, params)
