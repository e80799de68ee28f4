r"""Direct preference optimization (DPO, arXiv:2305.18290): the loss of pairs of answers.

For a prompt x with a chosen answer c and a rejected answer r, the model :math:`\pi` and the frozen reference
:math:`\pi_0`,

.. math:: m = \beta \left( \log\frac{\pi(c|x)}{\pi_0(c|x)} - \log\frac{\pi(r|x)}{\pi_0(r|x)} \right),\quad
    L = -(1 - s) \log\sigma(m) - s \log\sigma(-m)

with label smoothing s, the assumed probability that a pair is the wrong way round (arXiv:2305.18290, section 4, and
cDPO). A log-probability is a sum over the tokens of the answer.

The reference is computed in each step, without residuals, because nothing that it depends on is trained. It costs one
forward pass. To compute it once for all rows would save that, but needs a pass over the data before each run, and
values on disk that must fit the data, the model and the order of a resumed run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import ConfigError
from autoshard.models.adapters import without_adapters

REFERENCE = "reference"
"""Attribute of a model that is trained without adapters: its frozen copy."""


@dataclass(frozen=True)
class DpoConfig:
    """How pairs of answers are compared."""

    beta: float = 0.1
    """Factor of the margin: the larger, the closer the model stays to the reference."""
    label_smoothing: float = 0.0
    """Assumed probability that the rejected answer is the better one; below 0.5."""

    def __post_init__(self) -> None:
        """Refuse invalid numbers, all in one error."""
        problems = []
        if not 0 < self.beta < float("inf"):
            problems.append(f"dpo.beta is {self.beta}; it must be positive and finite")
        if not 0 <= self.label_smoothing < 0.5:
            problems.append(f"dpo.label_smoothing is {self.label_smoothing}; it must be at least 0 and below 0.5")
        if problems:
            raise ConfigError("; ".join(problems))


def dpo_loss(model: Any, batch: Mapping[str, jax.Array], config: DpoConfig) -> tuple[jax.Array, jax.Array]:
    """Compute the sum of the losses of pairs, and the number of pairs, both float32 `[]`.

    Args:
        model: a `Decoder`, with adapters or with a frozen copy of itself as its attribute `reference`.
        batch: `inputs` and `targets`, integers, and `mask`, `[batch, 2, seq]`: the chosen answer, then the rejected
            one. A pair without a token that counts is padding.
        config: the settings.
    """
    inputs, targets, mask = (x.reshape(-1, x.shape[-1]) for x in (batch["inputs"], batch["targets"], batch["mask"]))

    def log_probabilities(model: Any) -> jax.Array:
        losses = model.token_losses(model.features(inputs), targets)
        return -jnp.sum(losses * mask.astype(jnp.float32), axis=-1)

    reference = getattr(model, REFERENCE) if hasattr(model, REFERENCE) else without_adapters(model)
    ratios = log_probabilities(model) - jax.lax.stop_gradient(log_probabilities(reference))
    ratios = ratios.reshape(-1, 2)
    margins = config.beta * (ratios[:, 0] - ratios[:, 1])
    smoothing = config.label_smoothing
    losses = -(1 - smoothing) * jax.nn.log_sigmoid(margins) - smoothing * jax.nn.log_sigmoid(-margins)
    weights = jnp.any(batch["mask"] > 0, axis=(1, 2)).astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)
