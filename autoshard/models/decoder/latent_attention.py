"""Attention whose keys and values are products of one small vector of each position (DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.models.attention import attention
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import LatentConfig, LayerKind
from autoshard.models.decoder.layers import Norm, Sides, normal, project, zeros
from autoshard.models.decoder.rotary import rotate
from autoshard.models.remat.named_values import named

LATENT_EPS = 1e-6  # the published code has this constant, whatever the config says


class LatentAttention(nnx.Module):
    """Causal self-attention with latent keys and values.

    Parameters, with q the elements of a head of queries and keys: `wq_down [width, q_rank]` and
    `wq_up [q_rank, heads, q]`, or `wq [width, heads, q]`; `wkv_down [width, kv_rank + rotary_dim]`,
    `wkv_up [kv_rank, heads, plain_dim + value_dim]`, `wo [heads, value_dim, width]`; biases, and two norms.
    """

    def __init__(self, cfg: DecoderConfig, kind: LayerKind, key: jax.Array):
        assert cfg.latent is not None
        self.cfg, self.kind = cfg, kind
        self.latent: LatentConfig = cfg.latent
        own, width, heads = self.latent, cfg.width, cfg.heads
        q_key, q_up_key, kv_key, kv_up_key, o_key = jax.random.split(key, 5)
        q_dim = own.plain_dim + own.rotary_dim
        ranked = own.q_rank is not None
        rank = own.q_rank or width
        self.wq = None if ranked else normal(q_key, cfg, width, heads, q_dim)
        self.wq_down = normal(q_key, cfg, width, rank) if ranked else None
        self.bq_down = zeros(cfg, rank, wanted=ranked and cfg.qkv_bias)
        self.q_norm = Norm(cfg, rank, LATENT_EPS) if ranked else None
        self.wq_up = normal(q_up_key, cfg, rank, heads, q_dim) if ranked else None
        self.wkv_down = normal(kv_key, cfg, width, own.kv_rank + own.rotary_dim)
        self.bkv_down = zeros(cfg, own.kv_rank + own.rotary_dim, wanted=cfg.qkv_bias)
        self.kv_norm = Norm(cfg, own.kv_rank, LATENT_EPS)
        self.wkv_up = normal(kv_up_key, cfg, own.kv_rank, heads, own.plain_dim + own.value_dim)
        self.wo = normal(o_key, cfg, heads, own.value_dim, width)
        self.bo = zeros(cfg, width, wanted=cfg.output_bias)

    def __call__(self, x: jax.Array, sides: Sides) -> jax.Array:
        """Apply attention to `[batch, seq, width]`."""
        cfg, own = self.cfg, self.latent
        q, k, v = (named(each, "qkv") for each in self._project(x, sides))
        # One size for all heads: the kernels take no other. Zeros change neither scores nor results.
        size = max(q.shape[-1], own.value_dim)
        q, k, v = (jnp.pad(each, ((0, 0), (0, 0), (0, 0), (0, size - each.shape[-1]))) for each in (q, k, v))
        scale = (own.plain_dim + own.rotary_dim) ** -0.5 if cfg.score_scale is None else cfg.score_scale
        y = attention(
            q, k, v, causal=True, impl=cfg.attention, block_size=cfg.block_size, scale=scale, window=self.kind.window,
            soft_cap=cfg.score_cap, segment_ids=sides.segments,
        )  # fmt: skip
        return named(project("bshd,hde->bse", y[..., : own.value_dim], self.wo, self.bo), "out_proj")

    def _project(self, x: jax.Array, sides: Sides) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values, `[batch, seq, heads, ...]`."""
        own = self.latent
        if self.wq is not None:
            q = project("bse,ehd->bshd", x, self.wq)
        else:
            assert self.wq_down is not None and self.wq_up is not None and self.q_norm is not None
            q = project("bsr,rhd->bshd", self.q_norm(project("bse,er->bsr", x, self.wq_down, self.bq_down)), self.wq_up)
        q_plain, q_rotary = jnp.split(q, [own.plain_dim], axis=-1)
        latent, k_rotary = jnp.split(project("bse,er->bsr", x, self.wkv_down, self.bkv_down), [own.kv_rank], axis=-1)
        k_plain, v = jnp.split(project("bsr,rhd->bshd", self.kv_norm(latent), self.wkv_up), [own.plain_dim], axis=-1)
        k_rotary = k_rotary[:, :, None, :]
        rotary = self.kind.rotary
        if rotary is not None:
            q_rotary, k_rotary = (
                rotate(part, sides.tables[rotary], rotary.interleaved) for part in (q_rotary, k_rotary)
            )
        k_rotary = jnp.broadcast_to(k_rotary, (*k_plain.shape[:-1], own.rotary_dim))
        return (
            jnp.concatenate([q_plain, q_rotary], axis=-1),
            jnp.concatenate([k_plain, k_rotary], axis=-1),
            v,
        )
