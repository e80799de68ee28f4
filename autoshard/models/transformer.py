"""The parts of a transformer that `GPT`, `MoE` and `ViT` share: embedding, norm, attention, MLP and block.

Activations are `[batch, seq, width]`. Rotary positions rotate queries and keys; keys and values may have fewer heads
than queries (grouped-query attention).

Sources: RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU (arXiv:2002.05202), grouped queries
(arXiv:2305.13245).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard._shown import shown
from autoshard.kernels.constants import BLOCKWISE_KEYS
from autoshard.kernels.cross_entropy import linear_cross_entropy
from autoshard.kernels.kernel_choice import Impl
from autoshard.models.attention import attention
from autoshard.models.gpt_config import GPTConfig
from autoshard.models.loss import cross_entropy, sum_and_count
from autoshard.models.quantized import align, project
from autoshard.models.remat.named_values import named
from autoshard.models.scopes import scoped

KeysValues = tuple[jax.Array, jax.Array]


@shown
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of earlier positions, kept so that generation does not recompute them.

    Attributes:
        kept: keys and values, each `[layers, batch, capacity, kv_heads, head_dim]`.
        length: number of positions that are filled, int32 `[]`.
    """

    kept: KeysValues
    length: jax.Array


def param(key: jax.Array, cfg: GPTConfig, shape: tuple[int, ...], std: float) -> nnx.Param:
    """Draw a parameter from a normal distribution with mean 0."""
    return nnx.Param(std * jax.random.normal(key, shape, jnp.dtype(cfg.param_dtype)))


def constant(cfg: GPTConfig, shape: tuple[int, ...], value: float) -> nnx.Param:
    """Make a parameter whose elements all equal `value`."""
    return nnx.Param(jnp.full(shape, value, jnp.dtype(cfg.param_dtype)))


def bias(cfg: GPTConfig, *shape: int) -> nnx.Param | None:
    """Make a bias of zeros, or None if the config has no biases."""
    return constant(cfg, shape, 0.0) if cfg.bias else None


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Set elements to zero at the given rate and scale the others up. Without a key, return `x`."""
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def dropout_add(residual: jax.Array, x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Add `x` with dropout to the residual, both `[..., width]` of one dtype. Without a key, return their sum.

    With a key, the scale and the sum are computed in float32 where the dtype is narrower, and rounded once. The mask
    depends only on the key, the rate and the shape: it is the same under every plan and remat policy.
    """
    if key is None:
        return residual + x
    wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32
    return (residual.astype(wide) + dropout(x.astype(wide), rate, key)).astype(residual.dtype)


def dropout_keys(cfg: GPTConfig, deterministic: bool, rngs: nnx.Rngs | jax.Array | None) -> jax.Array | None:
    """Return a key for the embedding and one for each layer, or None if dropout is off."""
    if deterministic or cfg.dropout == 0.0:
        return None
    if rngs is None:
        raise ValueError(
            f"dropout is {cfg.dropout} and deterministic is False, but the call has no key; "
            "pass rngs=nnx.Rngs(...) or a key"
        )
    key = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs
    return jax.random.split(key, cfg.layers + 1)


def _rotate(x: jax.Array, base: float, start: jax.Array | None = None) -> jax.Array:
    """Rotate pairs `(x[i], x[i + head_dim / 2])` of `[batch, seq, heads, head_dim]` by position, from `start` on."""
    seq, half = x.shape[1], x.shape[3] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position = jnp.arange(seq, dtype=jnp.float32)
    if start is not None:
        position = position + start.astype(jnp.float32)
    angle = (position[:, None] * frequency[None, :])[None, :, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dimension, in float32. LayerNorm has a bias if the config has biases."""

    def __init__(self, cfg: GPTConfig):
        self.cfg = cfg
        self.scale = constant(cfg, (cfg.width,), 1.0)
        self.bias = bias(cfg, cfg.width) if cfg.norm == "layernorm" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `[..., width]`."""
        y = x.astype(jnp.float32)
        if self.cfg.norm == "layernorm":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.cfg.norm_eps)
        y = y * align(self.scale[...].astype(jnp.float32), y.ndim)
        if self.bias is not None:
            y = y + align(self.bias[...].astype(jnp.float32), y.ndim)
        return y.astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention, causal by default.

    Parameters: `wq [width, heads, head_dim]`, `wk` and `wv [width, kv_heads, head_dim]`, `wo [heads, head_dim, width]`.
    """

    def __init__(self, cfg: GPTConfig, key: jax.Array, residual_std: float, *, causal: bool = True):
        self.cfg, self.causal = cfg, causal
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        width, heads, kv_heads, head_dim = cfg.width, cfg.heads, cfg.key_heads, cfg.head_dim
        self.wq = param(q_key, cfg, (width, heads, head_dim), 0.02)
        self.wk = param(k_key, cfg, (width, kv_heads, head_dim), 0.02)
        self.wv = param(v_key, cfg, (width, kv_heads, head_dim), 0.02)
        self.wo = param(o_key, cfg, (heads, head_dim, width), residual_std)
        self.bq, self.bo = bias(cfg, heads, head_dim), bias(cfg, width)
        self.bk, self.bv = bias(cfg, kv_heads, head_dim), bias(cfg, kv_heads, head_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply attention to `[batch, seq, width]`."""
        cfg = self.cfg
        q, k, v = (named(each, "qkv") for each in self._project(x))
        y = attention(q, k, v, causal=self.causal, impl=cfg.attention, block_size=cfg.block_size)
        return named(project("bshd,hde->bse", y, self.wo, self.bo, cfg.quantization), "out_proj")

    def extend(self, x: jax.Array, cached: KeysValues, start: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Apply causal attention to `[batch, seq, width]`, the positions from `start` on, using cached keys and values.

        Returns:
            The rows that `__call__` gives for these positions of the whole sequence, and the updated keys and values.
        """
        cfg = self.cfg
        q, k, v = self._project(x, start)
        keys, values = (
            lax.dynamic_update_slice_in_dim(a, b, start, axis=1) for a, b in zip(cached, (k, v), strict=True)
        )
        shape = (1, 1, x.shape[1], keys.shape[1])
        visible = lax.broadcasted_iota(jnp.int32, shape, 3) <= lax.broadcasted_iota(jnp.int32, shape, 2) + start
        plain: Impl = "plain" if keys.shape[1] < BLOCKWISE_KEYS else "blockwise"  # kernels take no mask array
        impl = cfg.attention if cfg.attention in ("plain", "blockwise") else plain
        y = attention(q, keys, values, causal=False, mask=visible, impl=impl, block_size=cfg.block_size)
        return project("bshd,hde->bse", y, self.wo, self.bo, cfg.quantization), (keys, values)

    def _project(self, x: jax.Array, start: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        cfg = self.cfg
        q = project("bse,ehd->bshd", x, self.wq, self.bq, cfg.quantization)
        k = project("bse,ehd->bshd", x, self.wk, self.bk, cfg.quantization)
        v = project("bse,ehd->bshd", x, self.wv, self.bv, cfg.quantization)
        if cfg.positions == "rotary":
            q, k = _rotate(q, cfg.rotary_base, start), _rotate(k, cfg.rotary_base, start)
        return q, k, v


class MLP(nnx.Module):
    """The MLP: `w_down(silu(w_gate x) * w_up x)` for swiglu, `w_down(gelu(w_up x))` for gelu."""

    def __init__(self, cfg: GPTConfig, key: jax.Array, residual_std: float):
        self.cfg = cfg
        up_key, down_key, gate_key = jax.random.split(key, 3)
        gated = cfg.mlp == "swiglu"
        self.w_up = param(up_key, cfg, (cfg.width, cfg.hidden), 0.02)
        self.w_down = param(down_key, cfg, (cfg.hidden, cfg.width), residual_std)
        self.w_gate = param(gate_key, cfg, (cfg.width, cfg.hidden), 0.02) if gated else None
        self.b_up, self.b_down = bias(cfg, cfg.hidden), bias(cfg, cfg.width)
        self.b_gate = bias(cfg, cfg.hidden) if gated else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the MLP to each position of `[batch, seq, width]`."""
        quantization = self.cfg.quantization
        y = named(project("bse,ef->bsf", x, self.w_up, self.b_up, quantization), "mlp_in")
        if self.w_gate is None:
            y = jax.nn.gelu(y, approximate=self.cfg.mlp == "gelu")
        else:
            gate = named(project("bse,ef->bsf", x, self.w_gate, self.b_gate, quantization), "mlp_in")
            y = jax.nn.silu(gate) * y
        return named(project("bsf,fe->bse", y, self.w_down, self.b_down, quantization), "mlp_out")


def residual_deviation(cfg: GPTConfig) -> float:
    """Return the initial standard deviation of a projection that adds to the residual stream."""
    # There are 2 * layers such projections. With this scale the stream's variance does not grow with depth (GPT-2).
    return 0.02 / (2 * cfg.layers) ** 0.5


class Block(nnx.Module):
    """One pre-norm layer: attention, then the MLP, each added to the residual stream."""

    def __init__(self, cfg: GPTConfig, key: jax.Array, *, causal: bool = True):
        self.cfg = cfg
        residual_std = residual_deviation(cfg)
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm, self.mlp_norm = Norm(cfg), Norm(cfg)
        self.attention = Attention(cfg, attention_key, residual_std, causal=causal)
        self.mlp = MLP(cfg, mlp_key, residual_std)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Apply the layer to `[batch, seq, width]`, with dropout if there is a key."""
        attention_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        x = named(x, "residual")
        y = scoped("attention", self.attention, scoped("attention_norm", self.attention_norm, x))
        x = dropout_add(x, y, self.cfg.dropout, attention_key)
        return dropout_add(x, self.feed_forward(x), self.cfg.dropout, mlp_key)

    def extend(self, x: jax.Array, cached: KeysValues, start: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Apply the layer to the positions from `start` on, using cached keys and values, without dropout."""
        y = scoped("attention_norm", self.attention_norm, x)
        y, cached = scoped("attention", self.attention.extend, y, cached, start)
        x = x + y
        return x + self.feed_forward(x), cached

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """Apply the norm and the MLP."""
        return scoped("mlp", self.mlp, scoped("mlp_norm", self.mlp_norm, x))


def embed_tokens(
    cfg: GPTConfig, embed: nnx.Param, position: nnx.Param | None, tokens: jax.Array, start: jax.Array | None = None
) -> jax.Array:
    """Embed tokens as `[batch, seq, width]`: rows of `embed [vocab, width]` plus rows of `position [context, width]`.

    Positions are counted from `start`, 0 by default. `position` may be None.
    """
    _check_tokens(cfg, tokens)
    with jax.named_scope("embed"):
        # `fill` without wrapping: an id outside the vocabulary gives NaN instead of another token's row.
        x = embed[...].at[tokens].get(mode="fill", wrap_negative_indices=False).astype(cfg.dtype)
        if position is None:
            return x
        rows = position[...]
        seq = tokens.shape[1]
        rows = rows[:seq] if start is None else lax.dynamic_slice_in_dim(rows, start, seq)
        return x + align(rows.astype(cfg.dtype), 3)


def _check_tokens(cfg: GPTConfig, tokens: jax.Array) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"GPT: tokens must be integers [batch, seq], not {tokens.dtype}{list(tokens.shape)}")
    if tokens.shape[1] > cfg.context:
        raise ValueError(
            f"GPT: tokens have {tokens.shape[1]} positions (dim 1), more than the context of {cfg.context}. "
            "Pass fewer positions, or build the model with a larger GPTConfig.context"
        )


def predict(x: jax.Array, embed: nnx.Param, head: nnx.Param | None) -> jax.Array:
    """Compute logits `[batch, seq, vocab]` with `head [width, vocab]`, or with the embedding if there is no head."""
    with jax.named_scope("head"):
        if head is None:
            return jnp.einsum("bse,ve->bsv", x, embed[...].astype(x.dtype))
        return jnp.einsum("bse,ev->bsv", x, head[...].astype(x.dtype))


def prediction_loss(
    cfg: GPTConfig,
    x: jax.Array,
    embed: nnx.Param,
    head: nnx.Param | None,
    targets: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of cross-entropies of the logits that `predict` computes, and the number of tokens.

    With `cfg.loss_chunks > 1` the logits are computed for one chunk of the vocabulary at a time.
    """
    if cfg.loss_chunks == 1:
        return scoped("head", cross_entropy, predict(x, embed, head), targets, mask)
    weight, vocab_axis = (embed, 0) if head is None else (head, 1)
    # The cast comes first, so that the gradient is summed over devices in the dtype of the computation.
    weight = weight[...].astype(x.dtype)
    with jax.named_scope("head"):
        losses = linear_cross_entropy(x, weight, targets, chunks=cfg.loss_chunks, vocab_axis=vocab_axis)
    return sum_and_count(losses, mask)
