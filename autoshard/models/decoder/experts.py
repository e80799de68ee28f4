"""A mixture of experts in place of the MLP of a `Decoder`'s layer. No choice is dropped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard.models import dropless
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import ExpertsConfig
from autoshard.models.decoder.layers import normal


class Experts(nnx.Module):
    """A mixture of experts.

    Parameters: `router [width, experts]`, `w_gate` and `w_up [experts, width, ffn]`, `w_down [experts, ffn, width]`.
    """

    def __init__(self, cfg: DecoderConfig, key: jax.Array):
        assert cfg.experts is not None
        self.own: ExpertsConfig = cfg.experts
        router_key, gate_key, up_key, down_key = jax.random.split(key, 4)
        count, ffn = cfg.experts.experts, cfg.experts.ffn
        self.router = normal(router_key, cfg, cfg.width, count)
        self.w_gate = normal(gate_key, cfg, count, cfg.width, ffn)
        self.w_up = normal(up_key, cfg, count, cfg.width, ffn)
        self.w_down = normal(down_key, cfg, count, ffn, cfg.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the experts to each position of `[batch, seq, width]`."""
        # Small differences between logits decide the choice: compute them in float32 and with HIGHEST precision.
        logits = jnp.einsum(
            "bsd,de->bse",
            x.astype(jnp.float32),
            self.router[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        best, chosen = lax.top_k(logits, self.own.top_k)
        if self.own.renormalize:
            gates = jax.nn.softmax(best, axis=-1)
        else:
            gates = jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        up, down, gate = (w[...].astype(x.dtype) for w in (self.w_up, self.w_down, self.w_gate))
        return dropless.experts(x, gates, chosen, up, down, gate)
