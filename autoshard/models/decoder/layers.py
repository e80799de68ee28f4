"""The parts of a layer of a `Decoder`: norm, attention, MLP. Activations are `[batch, seq, width]`.

Sources: RMSNorm (arXiv:1910.07467), grouped queries (arXiv:2305.13245), gated units (arXiv:2002.05202), norms of
queries and keys (arXiv:2302.05442), soft caps and norms around sublayers (Gemma 2, arXiv:2408.00118).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard._shown import shown
from autoshard.kernels.blockwise_attention import Softmax, Visibility
from autoshard.models.attention import attention
from autoshard.models.decoder.cache import Kept, Rows, seen_parts, slots_for
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kept_attention import Part, attend
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.decoder.positions.rotary import Rotary, Table, rotate
from autoshard.models.decoder.positions.temperature import Temperature
from autoshard.models.decoder.quantized_weight import project
from autoshard.models.remat.named_values import named

QUICK_GELU = 1.702  # x * sigmoid(1.702 x) is close to gelu(x) (arXiv:1606.08415, section 2)
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(QUICK_GELU * x),
}
"""Activations by their names in `DecoderConfig.activation`."""


@shown
@jax.tree_util.register_pytree_node_class
class Sides(NamedTuple):
    """Inputs that all layers share, besides the residual stream.

    Attributes:
        tables: (rotary positions, number of rotated elements) -> cosine and sine.
        segments: the document of each position, `[batch, seq]`, or None.
        regions: the region of each position, `[batch, seq]`, or None; see `LayerKind.scope`.
        factors: temperature -> the factor of each position's queries, `[batch or 1, seq]`.
        chunks: size of chunks -> the chunk of each position, `[batch, seq]`; see `chunks.chunk_segments`.
        lent: name -> the keys and values that an earlier layer lends.
        lent_kept: name -> the same for earlier positions, in generation.
    """

    tables: Mapping[tuple[Rotary, int], Table]
    segments: jax.Array | None
    regions: jax.Array | None = None
    factors: Mapping[Temperature, jax.Array] = MappingProxyType({})
    chunks: Mapping[int, jax.Array] = MappingProxyType({})
    lent: Mapping[str, Kept] = MappingProxyType({})
    lent_kept: Mapping[str, Kept] = MappingProxyType({})

    def tree_flatten(self):
        """Return the arrays, and the keys of the mappings."""
        named = (self.tables, self.factors, self.chunks, self.lent, self.lent_kept)
        arrays = tuple(tuple(each.values()) for each in named)
        return (*arrays, self.segments, self.regions), tuple(tuple(each) for each in named)

    @classmethod
    def tree_unflatten(cls, keys, parts):
        """Undo `tree_flatten`."""
        tables, *others = (dict(zip(*each, strict=True)) for each in zip(keys, parts[:-2], strict=True))
        return cls(tables, *parts[-2:], *others)

    def lending(self, name: str, lent: Kept, kept: Kept | None = None) -> Sides:
        """Return a copy with the keys and values that a layer lends under `name`; `self` if the name is empty."""
        if not name:
            return self
        more = self._replace(lent={**self.lent, name: lent})
        return more if kept is None else more._replace(lent_kept={**self.lent_kept, name: kept})

    def seen_by(self, kind: LayerKind) -> dict[str, Any]:
        """Return the arguments of `attention` that restrict which positions a position sees in a layer."""
        if kind.chunk is not None and kind.chunk in self.chunks:
            # Positions of one chunk are less than `chunk` apart, so a window of `chunk` hides none of them. With it,
            # kernels skip the blocks outside.
            return {"window": kind.reach, "segment_ids": self.chunks[kind.chunk]}
        return {"window": kind.window, "segment_ids": self.regions if kind.scope == "region" else self.segments}


def normal(key: jax.Array, cfg: DecoderConfig, *shape: int) -> nnx.Param:
    """Draw a parameter from a normal distribution with mean 0."""
    return nnx.Param(cfg.init_std * jax.random.normal(key, shape, jnp.dtype(cfg.param_dtype)))


def zeros(cfg: DecoderConfig, *shape: int, wanted: bool = True) -> nnx.Param | None:
    """Make a parameter of zeros, or None if it is not wanted."""
    return nnx.Param(jnp.zeros(shape, jnp.dtype(cfg.param_dtype))) if wanted else None


def normalised(x: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square over the last dimension."""
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dimension, of size `size`, in float32. `eps` defaults to the config's."""

    def __init__(self, cfg: DecoderConfig, size: int, eps: float | None = None):
        self.eps, self.offset = cfg.norm_eps if eps is None else eps, cfg.norm_offset
        self.scale = nnx.Param(jnp.full((size,), 1.0 - cfg.norm_offset, jnp.dtype(cfg.param_dtype)))
        self.bias = zeros(cfg, size, wanted=cfg.norm == "layer")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `[..., size]`."""
        y = x.astype(jnp.float32)
        if self.bias is not None:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = normalised(y, self.eps)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        y = y * scale.reshape((1,) * (y.ndim - 1) + scale.shape)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32).reshape((1,) * (y.ndim - 1) + scale.shape)
        return y.astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention, causal or not.

    Parameters: `wq [width, heads, head_dim]`, `wk` and `wv [width, kv_heads, head_dim]`, `wo [heads, head_dim, width]`,
    their biases, and the scales of the norms of queries and keys, `[head_dim]`. A layer that borrows keys and values
    has no parameters for them, and a layer that uses its keys as values has none for values.
    """

    def __init__(self, cfg: DecoderConfig, kind: LayerKind, key: jax.Array):
        self.cfg, self.kind = cfg, kind
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        width, heads = cfg.width, cfg.heads
        self.kv_heads, self.head_dim = kind.kv_heads or cfg.kv_heads, kind.head_dim or cfg.head_dim
        kv_heads, head_dim, own = self.kv_heads, self.head_dim, not kind.borrows
        own_values = own and not kind.keys_as_values
        self.wq = normal(q_key, cfg, width, heads, head_dim)
        self.wk = normal(k_key, cfg, width, kv_heads, head_dim) if own else None
        self.wv = normal(v_key, cfg, width, kv_heads, head_dim) if own_values else None
        self.wo = normal(o_key, cfg, heads, head_dim, width)
        self.bq = zeros(cfg, heads, head_dim, wanted=cfg.qkv_bias)
        self.bk = zeros(cfg, kv_heads, head_dim, wanted=cfg.qkv_bias and own)
        self.bv = zeros(cfg, kv_heads, head_dim, wanted=cfg.qkv_bias and own_values)
        self.bo = zeros(cfg, width, wanted=cfg.output_bias)
        self.q_norm = Norm(cfg, head_dim) if cfg.query_norm else None
        self.k_norm = Norm(cfg, head_dim) if cfg.query_norm and own else None
        self.sinks = zeros(cfg, heads, wanted=cfg.sinks)

    def __call__(self, x: jax.Array, sides: Sides) -> jax.Array:
        """Apply attention to `[batch, seq, width]`."""
        return self.with_keys(x, sides)[0]

    def with_keys(self, x: jax.Array, sides: Sides) -> tuple[jax.Array, Kept]:
        """Apply attention to `[batch, seq, width]`. Also returns its keys and values."""
        q, k, v = self._project(x, sides)
        q = named(q, "qkv")
        if not self.kind.borrows:
            k, v = named(k, "qkv"), named(v, "qkv")
        y = attention(q, k, v, causal=self.cfg.causal, **sides.seen_by(self.kind), **self._options())
        return named(project("bshd,hde->bse", y, self.wo, self.bo), "out_proj"), (k, v)

    def kept(self, batch: int, length: int) -> Kept:
        """Return empty slots for keys and values, each `[batch, slots, kv_heads, head_dim]`; `()` if borrowed."""
        if self.kind.borrows:
            return ()
        shape = (batch, slots_for(length, self.kind), self.kv_heads, self.head_dim)
        return jnp.zeros(shape, self.cfg.dtype), jnp.zeros(shape, self.cfg.dtype)

    def extend(self, x: jax.Array, sides: Sides, kept: Kept, rows: Rows) -> tuple[jax.Array, Kept]:
        """Apply attention to new positions `[batch, seq, width]`, using the kept keys and values.

        Returns:
            The result, and the keys and values of the new positions; `()` in their place if the layer borrows them.
        """
        q, k, v = self._project(x, sides)
        if rows.fresh:
            y = attention(q, k, v, causal=True, **sides.seen_by(self.kind), **self._options())
        else:
            earlier = sides.lent_kept[self.kind.borrows] if self.kind.borrows else kept
            y = self._attend_kept(q, (k, v), earlier, rows)
        return project("bshd,hde->bse", y, self.wo, self.bo), () if self.kind.borrows else (k, v)

    def _attend_kept(self, q: jax.Array, new: Kept, kept: Kept, rows: Rows) -> jax.Array:
        """Return the result of each head, `[batch, seq, heads, head_dim]`."""
        cfg = self.cfg
        grouped = q.reshape(*q.shape[:2], self.kv_heads, -1, self.head_dim)
        scale = self.head_dim**-0.5 if cfg.score_scale is None else cfg.score_scale
        softmax = Softmax(Visibility(causal=False), scale, cfg.score_cap)
        seen = seen_parts(rows, q.shape[1], kept[0].shape[1], self.kind)
        parts = [Part(softmax.scores(grouped, k), v, each) for (k, v), each in zip((kept, new), seen, strict=True)]
        sinks = None if self.sinks is None else self.sinks[...].reshape(self.kv_heads, -1)
        return attend(parts, sinks).reshape(q.shape)

    def _options(self) -> dict[str, Any]:
        """Return the keywords of `attention` that do not depend on the call."""
        cfg = self.cfg
        return {
            "impl": cfg.attention, "block_size": cfg.block_size, "scale": cfg.score_scale, "soft_cap": cfg.score_cap,
            "sinks": None if self.sinks is None else self.sinks[...].astype(jnp.float32),
        }  # fmt: skip

    def _project(self, x: jax.Array, sides: Sides) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values."""
        q = self._placed(project("bse,ehd->bshd", x, self.wq, self.bq), self.q_norm, sides)
        if self.kind.temperature is not None:
            q = (q * sides.factors[self.kind.temperature][:, :, None, None]).astype(q.dtype)
        if self.wk is None:
            k, v = sides.lent[self.kind.borrows]
            return q, k, v
        k = project("bse,ehd->bshd", x, self.wk, self.bk)
        v = k if self.wv is None else project("bse,ehd->bshd", x, self.wv, self.bv)
        if self.cfg.value_norm:
            v = normalised(v.astype(jnp.float32), self.cfg.norm_eps).astype(v.dtype)
        return q, self._placed(k, self.k_norm, sides), v

    def _placed(self, x: jax.Array, norm: Norm | None, sides: Sides) -> jax.Array:
        """Normalise and rotate queries or keys, `[batch, seq, heads, head_dim]`."""
        rotary = self.kind.rotary
        x = x if norm is None else norm(x)
        if rotary is not None:
            x = rotate(x, sides.tables[rotary, self.head_dim], rotary.interleaved)
        return normalised(x.astype(jnp.float32), self.cfg.norm_eps).astype(x.dtype) if self.kind.unit_norm else x


class MLP(nnx.Module):
    """The MLP, gated or not, of hidden size `ffn`, by default the config's.

    It is `w_down(activation(w_gate x) * w_up x)`, or `w_down(activation(w_up x))`, with biases if the config has them.
    """

    def __init__(self, cfg: DecoderConfig, key: jax.Array, ffn: int | None = None):
        self.cfg = cfg
        ffn = cfg.ffn if ffn is None else ffn
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.w_gate = normal(gate_key, cfg, cfg.width, ffn) if cfg.gated else None
        self.w_up = normal(up_key, cfg, cfg.width, ffn)
        self.w_down = normal(down_key, cfg, ffn, cfg.width)
        self.b_gate = zeros(cfg, ffn, wanted=cfg.mlp_bias and cfg.gated)
        self.b_up = zeros(cfg, ffn, wanted=cfg.mlp_bias)
        self.b_down = zeros(cfg, cfg.width, wanted=cfg.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the MLP to each position of `[batch, seq, width]`."""
        activation = ACTIVATIONS[self.cfg.activation]
        gate = None
        if self.w_gate is not None:
            gate = named(project("bse,ef->bsf", x, self.w_gate, self.b_gate), "mlp_in")
        up = named(project("bse,ef->bsf", x, self.w_up, self.b_up), "mlp_in")
        y = activation(up) if gate is None else activation(gate) * up
        return named(project("bsf,fe->bse", y, self.w_down, self.b_down), "mlp_out")
