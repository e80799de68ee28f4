"""Attention whose keys and values are products of one small vector of each position (DeepSeek-V2, arXiv:2405.04434)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.kernels.blockwise_attention import soft_capped
from autoshard.models.attention import attention
from autoshard.models.decoder.cache import Kept, Rows, seen_parts, slots_for
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kept_attention import Part, attend
from autoshard.models.decoder.kinds import LatentConfig, LayerKind
from autoshard.models.decoder.layers import Norm, Sides, normal, zeros
from autoshard.models.decoder.positions.rotary import rotate
from autoshard.models.decoder.quantized_weight import project
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
        q, latent, k_rotary = self._project(x, sides)
        q, k, v = (named(each, "qkv") for each in (q, *self._expand(latent, k_rotary)))
        y = self._attend(q, k, v, sides)
        return named(project("bshd,hde->bse", y, self.wo, self.bo), "out_proj")

    def with_keys(self, x: jax.Array, sides: Sides) -> tuple[jax.Array, Kept]:
        """Apply attention to `[batch, seq, width]`. The second result is empty: no layer borrows its latent vectors."""
        return self(x, sides), ()

    def kept(self, batch: int, length: int) -> Kept:
        """Return empty slots for latent vectors `[batch, slots, kv_rank]` and rotated keys `[..., rotary_dim]`."""
        slots = slots_for(length, self.kind)
        sizes = (self.latent.kv_rank, self.latent.rotary_dim)
        latent, k_rotary = (jnp.zeros((batch, slots, size), self.cfg.dtype) for size in sizes)
        return latent, k_rotary

    def extend(self, x: jax.Array, sides: Sides, kept: Kept, rows: Rows) -> tuple[jax.Array, Kept]:
        """Apply attention to new positions `[batch, seq, width]`, using the kept latent vectors.

        Keys and values of earlier positions are not computed again. Queries are brought to the latent space instead,
        where all heads share one key and one value.

        Returns:
            The result, and the latent vectors and rotated keys of the new positions.
        """
        own = self.latent
        q, latent, k_rotary = self._project(x, sides)
        new = latent, k_rotary
        if rows.fresh:
            y = self._attend(q, *self._expand(latent, k_rotary), sides)
            return project("bshd,hde->bse", y, self.wo, self.bo), new
        to_key, to_value = jnp.split(self.wkv_up[...].astype(x.dtype), [own.plain_dim], axis=-1)
        q_plain, q_rotary = jnp.split(q, [own.plain_dim], axis=-1)
        q_latent = jnp.einsum("bshd,rhd->bshr", q_plain, to_key)
        seen = seen_parts(rows, x.shape[1], kept[0].shape[1], self.kind)
        parts = [
            Part(self._scores((q_latent, q_rotary), keys), keys[0][:, :, None], each)
            for keys, each in zip((kept, new), seen, strict=True)
        ]
        y = attend(parts)[:, :, 0]
        y = jnp.einsum("bshr,rhd->bshd", y, to_value)
        return project("bshd,hde->bse", y, self.wo, self.bo), new

    def _scores(self, queries: Kept, keys: Kept) -> jax.Array:
        """Return the scores, float32 `[batch, 1, heads, queries, keys]`, of latent and rotated parts.

        All heads share the keys.
        """
        latent, rotated = (
            jnp.einsum("bshd,btd->bhst", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
            for q, k in zip(queries, keys, strict=True)
        )
        return soft_capped((latent + rotated)[:, None] * self._scale, self.cfg.score_cap)

    @property
    def _scale(self) -> float:
        given = self.cfg.score_scale
        return (self.latent.plain_dim + self.latent.rotary_dim) ** -0.5 if given is None else given

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, sides: Sides) -> jax.Array:
        """Return the result of each head, `[batch, seq, heads, value_dim]`."""
        # The kernels need one size for queries, keys and values. Zeros change neither scores nor results.
        size = max(q.shape[-1], v.shape[-1])
        padded = (jnp.pad(each, ((0, 0), (0, 0), (0, 0), (0, size - each.shape[-1]))) for each in (q, k, v))
        y = attention(
            *padded, causal=True, impl=self.cfg.attention, block_size=self.cfg.block_size, scale=self._scale,
            soft_cap=self.cfg.score_cap, **sides.seen_by(self.kind),
        )  # fmt: skip
        return y[..., : self.latent.value_dim]

    def _expand(self, latent: jax.Array, k_rotary: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values of each head, `[batch, seq, heads, ...]`."""
        k_plain, v = jnp.split(project("bsr,rhd->bshd", latent, self.wkv_up), [self.latent.plain_dim], axis=-1)
        k_rotary = jnp.broadcast_to(k_rotary[:, :, None, :], (*k_plain.shape[:-1], k_rotary.shape[-1]))
        return jnp.concatenate([k_plain, k_rotary], axis=-1), v

    def _project(self, x: jax.Array, sides: Sides) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries `[batch, seq, heads, ...]`, latent vectors and rotated keys `[batch, seq, ...]`."""
        own = self.latent
        if self.wq is not None:
            q = project("bse,ehd->bshd", x, self.wq)
        else:
            assert self.wq_down is not None and self.wq_up is not None and self.q_norm is not None
            q = project("bsr,rhd->bshd", self.q_norm(project("bse,er->bsr", x, self.wq_down, self.bq_down)), self.wq_up)
        q_plain, q_rotary = jnp.split(q, [own.plain_dim], axis=-1)
        latent, k_rotary = jnp.split(project("bse,er->bsr", x, self.wkv_down, self.bkv_down), [own.kv_rank], axis=-1)
        k_rotary, rotary = k_rotary[:, :, None, :], self.kind.rotary
        if rotary is not None:
            table = sides.tables[rotary, own.rotary_dim]
            q_rotary, k_rotary = (rotate(part, table, rotary.interleaved) for part in (q_rotary, k_rotary))
        return jnp.concatenate([q_plain, q_rotary], axis=-1), self.kv_norm(latent), k_rotary[:, :, 0, :]
