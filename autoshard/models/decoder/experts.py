"""A mixture of experts in place of the MLP of a `Decoder`'s layer. No choice is dropped.

Sources: softmax over the chosen experts, Mixtral (arXiv:2401.04088); groups of experts and shared experts, DeepSeek-V2
(arXiv:2405.04434); sigmoid scores and a bias of the choice, DeepSeek-V3 (arXiv:2412.19437); limited gated units with
biases, gpt-oss (arXiv:2508.10925); gates that multiply the experts' inputs, Llama 4
(https://huggingface.co/meta-llama/Llama-4-Scout-17B-16E).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard._shown import shown
from autoshard.models import dropless
from autoshard.models.block_scales import ScaledCodes, StackedCodes
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import ExpertsConfig
from autoshard.models.decoder.layers import MLP, normal, zeros
from autoshard.models.decoder.quantized_weight import QuantizedWeight


@shown
class Load(NamedTuple):
    r"""How much each expert of one or several layers is used.

    The loss that balances it is :math:`E \sum_e \bar c_e \bar p_e` for E experts, where :math:`\bar c_e` is how often
    the expert is chosen and :math:`\bar p_e` its probability, both means over the positions of all layers
    (arXiv:2101.03961, section 2.2; over all layers together, as in transformers).

    Attributes:
        counts: how often each expert was chosen, float32 `[experts]`.
        probabilities: the sum of its probabilities, float32 `[experts]`.
        positions: number of positions, float32 `[]`.
    """

    counts: jax.Array
    probabilities: jax.Array
    positions: jax.Array

    @classmethod
    def none(cls, experts: int) -> Load:
        """Return the load of no layer."""
        return cls(jnp.zeros((experts,)), jnp.zeros((experts,)), jnp.zeros(()))

    @classmethod
    def of(cls, logits: jax.Array, chosen: jax.Array) -> Load:
        """Return the load of a layer, from the router's logits `[batch, seq, experts]` and its choices."""
        picked = (chosen[..., None] == jnp.arange(logits.shape[-1])).astype(jnp.float32)
        probabilities = jax.nn.softmax(logits, axis=-1)
        positions = jnp.float32(math.prod(logits.shape[:-1]))
        return cls(jnp.sum(picked, (0, 1, 2)), jnp.sum(probabilities, (0, 1)), positions)

    def plus(self, other: Load) -> Load:
        """Return the load of both."""
        return Load(*(a + b for a, b in zip(self, other, strict=True)))

    def loss(self) -> jax.Array:
        """Return the loss that balances the load, float32 `[]`."""
        return self.counts.size * jnp.sum(self.counts * self.probabilities) / jnp.square(self.positions)


def route(cfg: ExpertsConfig, logits: jax.Array, choice_bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token.

    Args:
        cfg: the experts.
        logits: the router's logits, float32 `[..., experts]`.
        choice_bias: added to the scores for the choice, `[experts]`.

    Returns:
        The gates of the chosen experts, float32 `[..., top_k]`, and their indices, int32 `[..., top_k]`.
    """
    softmax = cfg.scoring == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
    choice = scores if choice_bias is None else scores + choice_bias
    choice = lax.stop_gradient(choice)
    if cfg.groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], cfg.groups, -1)
        best = jnp.sum(lax.top_k(grouped, cfg.group_best)[0], axis=-1)
        chosen_groups = lax.top_k(best, cfg.top_groups)[1]
        allowed = jnp.any(chosen_groups[..., None] == jnp.arange(cfg.groups), axis=-2)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    chosen = lax.top_k(choice, cfg.top_k)[1]
    # Comparisons and sums in place of a gather: they stay local if the experts are sharded.
    picked = chosen[..., None] == jnp.arange(cfg.experts)
    gates = jnp.sum(jnp.where(picked, scores[..., None, :], 0.0), axis=-1)
    if cfg.renormalize:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)  # as published
    return gates * cfg.scale, chosen


class Experts(nnx.Module):
    """A mixture of experts.

    Parameters: `router [width, experts]`, `w_gate` and `w_up [experts, width, ffn]`, `w_down [experts, ffn, width]`,
    their biases `[experts]`, `[experts, ffn]` and `[experts, width]`, `choice_bias [experts]`, and the MLP `shared`.
    """

    def __init__(self, cfg: DecoderConfig, key: jax.Array):
        assert cfg.experts is not None
        self.own: ExpertsConfig = cfg.experts
        router_key, gate_key, up_key, down_key, shared_key = jax.random.split(key, 5)
        count, ffn, bias = cfg.experts.experts, cfg.experts.ffn, cfg.experts.bias
        self.router = normal(router_key, cfg, cfg.width, count)
        self.w_gate = normal(gate_key, cfg, count, cfg.width, ffn)
        self.w_up = normal(up_key, cfg, count, cfg.width, ffn)
        self.w_down = normal(down_key, cfg, count, ffn, cfg.width)
        self.b_router = zeros(cfg, count, wanted=bias)
        self.b_gate = zeros(cfg, count, ffn, wanted=bias)
        self.b_up = zeros(cfg, count, ffn, wanted=bias)
        self.b_down = zeros(cfg, count, cfg.width, wanted=bias)
        # It has no gradient: training rules other than gradients change it.
        self.choice_bias = nnx.Variable(jnp.zeros((count,), jnp.float32)) if cfg.experts.choice_bias else None
        self.shared = MLP(cfg, shared_key, cfg.experts.shared_ffn) if cfg.experts.shared_ffn else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the experts to each position of `[batch, seq, width]`."""
        return self._routed(x)[0]

    def with_load(self, x: jax.Array) -> tuple[jax.Array, Load]:
        """Apply the experts, and return their load, too."""
        y, logits, chosen = self._routed(x)
        return y, Load.of(logits, chosen)

    def _routed(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Apply the experts. Returns also the router's logits and its choices."""
        # Small differences between logits decide the choice: compute them in float32 and with HIGHEST precision.
        logits = jnp.einsum(
            "bsd,de->bse",
            x.astype(jnp.float32),
            self.router[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        if self.b_router is not None:
            logits = logits + self.b_router[...].astype(jnp.float32)
        bias = None if self.choice_bias is None else self.choice_bias[...].astype(jnp.float32)
        gates, chosen = route(self.own, logits, bias)
        if self.own.gated_input:
            y = self._apply(x * gates.astype(x.dtype), jnp.ones_like(gates), chosen)
        else:
            y = self._apply(x, gates, chosen)
        return y if self.shared is None else y + self.shared(x), logits, chosen

    def _apply(self, x: jax.Array, gates: jax.Array, chosen: jax.Array) -> jax.Array:
        coded, biases = self._codes(), self._biases(x.dtype)
        if coded is not None and biases is None and dropless.same_blocks(*coded):
            return dropless.experts_in_codes(x, gates, chosen, *coded)
        units = {"limit": self.own.limit, "alpha": self.own.alpha}
        if coded is not None and biases is not None and dropless.scale_of_each_output(*coded):
            return dropless.limited_experts_in_codes(x, gates, chosen, coded, biases, **units)
        gate, up, down = (w[...].astype(x.dtype) for w in (self.w_gate, self.w_up, self.w_down))
        if biases is None:
            return dropless.experts(x, gates, chosen, up, down, gate)
        return dropless.limited_experts(x, gates, chosen, (gate, up, down), biases, **units)

    def _biases(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Return the biases of experts with limited units; None for other experts."""
        if self.b_gate is None or self.b_up is None or self.b_down is None or self.own.limit is None:
            return None
        return self.b_gate[...].astype(dtype), self.b_up[...].astype(dtype), self.b_down[...].astype(dtype)

    def _codes(self) -> Sequence[ScaledCodes | StackedCodes] | None:
        """Return the matrices as codes; None if they are not."""
        matrices = (self.w_gate, self.w_up, self.w_down)
        coded = [one.scaled_codes() for one in matrices if isinstance(one, QuantizedWeight)]
        found = [one for one in coded if one is not None]
        return found if len(found) == 3 else None
