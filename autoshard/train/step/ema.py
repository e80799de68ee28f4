r"""An exponential moving average of the parameters, stored in the train state and sharded like the parameters.

With decay :math:`d` and the stored parameters :math:`p_i` after the counted update :math:`i`, in float32,

.. math:: m_i = d\,m_{i-1} + (1 - d)\,p_i,\quad w_i = d\,w_{i-1} + (1 - d),\quad m_0 = w_0 = 0,
    \qquad \bar p = m / w

The division corrects the bias towards the initial value (Kingma and Ba, arXiv:1412.6980, section 3): from the first
update on, :math:`\bar p` is a weighted mean of parameters only. The average is updated every k-th step. A step is
skipped if its loss or gradient is not finite, or if its loss exceeds `spike` times the mean loss of the steps before,
which is a moving average of the same form with a decay of 0.99.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard._shown import shown

Tree = Any

LOSS_DECAY = 0.99  # decay of the mean loss: it covers about the last 1 / (1 - 0.99) = 100 steps; chosen, not measured


@shown
@dataclass(frozen=True)
class EmaConfig:
    """How parameters are averaged.

    Attributes:
        decay: decay of the mean per update; 0 for no average.
        every: steps between updates.
        spike: a step is skipped if its loss exceeds this many times the recent mean loss; 0 for no such limit.
    """

    decay: float = 0.0
    every: int = 1
    spike: float = 2.0


NO_AVERAGE = EmaConfig()


@shown
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Average:
    """The moving average of the parameters; see the module's docstring.

    Attributes:
        mean: m, float32, in the structure of the parameters.
        weight: w, float32 `[]`; 0 before the first update.
        loss: m of the loss, float32 `[]`.
        loss_weight: w of the loss, float32 `[]`.
    """

    mean: Tree
    weight: jax.Array
    loss: jax.Array
    loss_weight: jax.Array


def start(params: Tree) -> Average:
    """Make an average without any update."""
    # Each scalar is its own array: two leaves that share a buffer cannot both be donated.
    mean = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    return Average(mean, *(jnp.zeros((), jnp.float32) for _ in range(3)))


def updated(average: Average, params: Tree, loss: jax.Array, sound: jax.Array, step: jax.Array, how: EmaConfig) -> Any:
    """Return the average after a step.

    Args:
        average: the average before the step.
        params: the parameters after the step.
        loss: the step's loss, float32 `[]`.
        sound: whether the step's gradient is finite, bool `[]`.
        step: number of steps done, this one included, int32 `[]`.
        how: the settings.
    """
    counts = sound & jnp.isfinite(loss)
    if how.spike:
        typical = average.loss / jnp.maximum(average.loss_weight, 1e-30)
        # With a negative mean loss, `spike * typical` would be below `typical`, and every loss would be a spike.
        limit = typical + (how.spike - 1.0) * jnp.abs(typical)
        counts &= (average.loss_weight == 0) | (loss <= limit)
    updates = counts & (step % how.every == 0)

    def mix(mean: jax.Array, value: jax.Array, decay: float, when: jax.Array) -> jax.Array:
        # `where`, because multiplication by zero would keep values that are not finite.
        return jnp.where(when, mean * decay + _as_stored(value) * (1.0 - decay), mean)

    one = jnp.ones((), jnp.float32)
    return Average(
        jax.tree.map(lambda mean, leaf: mix(mean, leaf, how.decay, updates), average.mean, params),
        mix(average.weight, one, how.decay, updates),
        mix(average.loss, loss, LOSS_DECAY, counts),
        mix(average.loss_weight, one, LOSS_DECAY, counts),
    )


def _as_stored(value: jax.Array) -> jax.Array:
    """Return a value in float32, rounded to the dtype in which it is stored.

    With `xla_allow_excess_precision`, the default, XLA drops the rounding of a value that is cast to bfloat16 and back:
    the mean would then be taken over values that no parameter has. XLA keeps a `reduce_precision`.
    """
    if jnp.issubdtype(value.dtype, jnp.floating) and jnp.finfo(value.dtype).bits == 16:
        info = jnp.finfo(value.dtype)
        value = jax.lax.reduce_precision(value, info.nexp, info.nmant)
    return value.astype(jnp.float32)


def averaged_params(average: Average, params: Tree) -> Tree:
    """Return the mean in the parameters' dtypes, or the parameters themselves before the first update."""
    started = average.weight > 0
    scale = 1.0 / jnp.where(started, average.weight, 1.0)

    def corrected(mean: jax.Array, leaf: jax.Array) -> jax.Array:
        return jnp.where(started, (mean * scale).astype(leaf.dtype), leaf)

    return jax.tree.map(corrected, average.mean, params)
