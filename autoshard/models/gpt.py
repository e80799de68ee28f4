"""A decoder-only transformer in Flax NNX, written for one device.

    x = embed(tokens) [+ position]
    x = x + attention(norm(x)); x = x + mlp(norm(x))        for each layer
    logits = norm(x) @ head

Queries and keys are rotated unless positions are learned; keys and values may have fewer heads than queries
(grouped-query attention); the head may be the embedding itself. Layers are either a list of `Block`s, or one
`Block` whose parameters are stacked on a leading `layers` dimension and scanned over: the values are the same
(`restack` converts). There is no sharding annotation here: finding shardings is `auto_shard`'s work.

Parameters are the model's only state. Dropout takes its key from the call, one split for each layer, so that
the masks are the same on every mesh, under every remat policy, scanned or not.

Sources: GPT-2 (Radford et al. 2019) and nanoGPT for shapes and initialisation, RMSNorm (arXiv:1910.07467),
rotary positions (arXiv:2104.09864), SwiGLU (arXiv:2002.05202), grouped queries (arXiv:2305.13245).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard.models.attention import Impl, attention
from autoshard.models.loss import cross_entropy
from autoshard.models.stack import extend_layers, make_layers, remat_problems, run_layers

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rotary", "learned"),
    "mlp": ("swiglu", "gelu"),
    "attention": get_args(Impl),
    "dtype": ("float32", "bfloat16", "float16"),
    "param_dtype": ("float32", "bfloat16", "float16"),
}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shape and numerics of a `GPT`. The defaults are nanoGPT's CPU model with bytes for tokens.

    Args:
        vocab: number of different tokens.
        layers: number of blocks.
        heads: query heads; divides `width`.
        kv_heads: key and value heads; divides `heads`, which it is where None.
        width: size of the residual stream.
        ffn: hidden size of the MLP; where None, `4 * width` (gelu) or the multiple of 32 next above
            `8/3 * width` (swiglu, which has three matrices and so as many parameters).
        context: longest sequence.
        norm: `rmsnorm` or `layernorm`, before each sublayer and the head.
        positions: `rotary` (applied to queries and keys) or `learned` (added to the embedding).
        mlp: `swiglu` or `gelu`.
        bias: whether projections and LayerNorm have biases.
        tie_head: whether the head is the embedding.
        scan_layers: whether layers are stacked and scanned over.
        remat: what a layer's backward pass keeps: a name in `REMAT_POLICIES`. `none` keeps what it needs,
            `full` the layer's input only, `dots` the results of its projections too. Several with commas are taken in
            turn: with `none,full` every other layer keeps what it needs.
        attention: `plain`, `blockwise`, `auto` (by sequence length), or `cudnn` on NVIDIA's GPUs (of `dtype`s of 16
            bits); generation with a cache takes `auto` instead of it.
        block_size: keys held at a time by blockwise attention.
        dropout: rate, on the embedding and on each sublayer's output.
        dtype: what is computed in; softmax, norms and the loss are float32 throughout.
        param_dtype: what parameters are stored in.
        rotary_base: the longest wavelength of rotary positions, over 2 pi.
        norm_eps: added to the variance.

    Raises:
        ValueError: naming every field that does not fit.
    """

    vocab: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    width: int = 128
    ffn: int | None = None
    context: int = 64
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    positions: Literal["rotary", "learned"] = "rotary"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    tie_head: bool = True
    scan_layers: bool = True
    remat: str = "none"
    attention: Impl = "auto"
    block_size: int = 512
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
            for name, allowed in _CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        sizes = ("vocab", "layers", "heads", "kv_heads", "width", "ffn", "context", "block_size")
        given = {name: getattr(self, name) for name in sizes if getattr(self, name) is not None}
        small = {name: size for name, size in given.items() if size < 1}
        problems += [f"{name} is {size}; it must be at least 1" for name, size in small.items()]
        if not small:
            problems += self._unfit_heads()
            problems += remat_problems(self.remat, self.layers, scan=self.scan_layers)
        if self.attention == "cudnn" and self.dtype == "float32":
            problems.append("attention is cudnn, which takes dtype bfloat16 or float16, not float32")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        problems += [
            f"{name} is {getattr(self, name)}; it must be a finite number above 0"
            for name in ("rotary_base", "norm_eps")
            if not 0.0 < getattr(self, name) < float("inf")
        ]
        if problems:
            raise ValueError("GPTConfig: " + "; ".join(problems))

    def _unfit_heads(self) -> list[str]:
        problems = []
        if self.width % self.heads:
            problems.append(f"width {self.width} is not a multiple of heads {self.heads}; change one of them")
        elif self.positions == "rotary" and self.head_dim % 2:
            problems.append(
                f"width / heads is {self.head_dim}, and rotary positions turn pairs: make it even, "
                "or set positions='learned'"
            )
        if self.heads % self.key_heads:
            problems.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; change one")
        return problems

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values: `kv_heads`, or as many as there are query heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """Hidden size of the MLP: `ffn`, or its default."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.width if self.mlp == "gelu" else -(-8 * self.width // (3 * 32)) * 32


KeysValues = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of positions that were seen, so that they need not be computed again.

    Attributes:
        kept: keys and values, each `[layers, batch, length, kv_heads, head_dim]`.
        length: how many positions were seen, int32 `[]`.
    """

    kept: KeysValues
    length: jax.Array


def param(key: jax.Array, cfg: GPTConfig, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A parameter drawn from a normal distribution."""
    return nnx.Param(std * jax.random.normal(key, shape, jnp.dtype(cfg.param_dtype)))


def constant(cfg: GPTConfig, shape: tuple[int, ...], value: float) -> nnx.Param:
    """A parameter that is `value` everywhere."""
    return nnx.Param(jnp.full(shape, value, jnp.dtype(cfg.param_dtype)))


def bias(cfg: GPTConfig, *shape: int) -> nnx.Param | None:
    """Zeros where the config has biases."""
    return constant(cfg, shape, 0.0) if cfg.bias else None


def project(spec: str, x: jax.Array, weight: nnx.Param, added: nnx.Param | None = None) -> jax.Array:
    """`einsum(spec, x, weight)` in x's dtype, and what is added over its trailing dimensions."""
    y = jnp.einsum(spec, x, weight[...].astype(x.dtype))
    return y if added is None else y + align(added[...].astype(x.dtype), y.ndim)


def align(x: jax.Array, ndim: int) -> jax.Array:
    """`x` with leading dimensions of 1, so that broadcasting it is spelt out."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero elements at a rate and scale the others, where there is a key."""
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def _rotate(x: jax.Array, base: float, start: jax.Array | None = None) -> jax.Array:
    """Turn pairs `(x[i], x[i + head_dim / 2])` of `[batch, seq, heads, head_dim]` by their position from `start`."""
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
    """RMSNorm, or LayerNorm with a bias where the config has biases, over the last dimension, in float32."""

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
    """Self-attention: `wq [embed, heads, head_dim]`, `wk`, `wv` with `kv_heads`, `wo` back; causal unless told."""

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
        """Mix `[batch, seq, width]` over its sequence."""
        cfg = self.cfg
        q, k, v = self._project(x)
        y = attention(q, k, v, causal=self.causal, impl=cfg.attention, block_size=cfg.block_size)
        return project("bshd,hde->bse", y, self.wo, self.bo)

    def extend(self, x: jax.Array, kept: KeysValues, start: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Mix `[batch, seq, width]`, positions from `start` on, over these and the earlier ones, causally.

        Returns:
            What `__call__` gives for these positions of the whole sequence, and keys and values with theirs.
        """
        cfg = self.cfg
        q, k, v = self._project(x, start)
        keys, values = (lax.dynamic_update_slice_in_dim(a, b, start, axis=1) for a, b in zip(kept, (k, v), strict=True))
        shape = (1, 1, x.shape[1], keys.shape[1])
        seen = lax.broadcasted_iota(jnp.int32, shape, 3) <= lax.broadcasted_iota(jnp.int32, shape, 2) + start
        impl = "auto" if cfg.attention == "cudnn" else cfg.attention
        y = attention(q, keys, values, causal=False, mask=seen, impl=impl, block_size=cfg.block_size)
        return project("bshd,hde->bse", y, self.wo, self.bo), (keys, values)

    def _project(self, x: jax.Array, start: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        cfg = self.cfg
        q = project("bse,ehd->bshd", x, self.wq, self.bq)
        k = project("bse,ehd->bshd", x, self.wk, self.bk)
        v = project("bse,ehd->bshd", x, self.wv, self.bv)
        if cfg.positions == "rotary":
            q, k = _rotate(q, cfg.rotary_base, start), _rotate(k, cfg.rotary_base, start)
        return q, k, v


class MLP(nnx.Module):
    """`w_down(silu(w_gate x) * w_up x)`, or `w_down(gelu(w_up x))`."""

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
        """Map each position of `[batch, seq, width]`."""
        y = project("bse,ef->bsf", x, self.w_up, self.b_up)
        if self.w_gate is None:
            y = jax.nn.gelu(y)
        else:
            y = jax.nn.silu(project("bse,ef->bsf", x, self.w_gate, self.b_gate)) * y
        return project("bsf,fe->bse", y, self.w_down, self.b_down)


def residual_deviation(cfg: GPTConfig) -> float:
    """Deviation of a projection that adds to the residual stream."""
    # There are 2 * layers of them: scaled so, the stream's variance does not grow with depth.
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
        """Map `[batch, seq, width]`, dropping elements where there is a key."""
        attention_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        x = x + dropout(self.attention(self.attention_norm(x)), self.cfg.dropout, attention_key)
        return x + dropout(self.mlp(self.mlp_norm(x)), self.cfg.dropout, mlp_key)

    def extend(self, x: jax.Array, kept: KeysValues, start: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Map positions from `start` on, with keys and values of the earlier ones; nothing is dropped."""
        y, kept = self.attention.extend(self.attention_norm(x), kept, start)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), kept


class GPT(nnx.Module):
    """The model: `[batch, seq]` tokens to `[batch, seq, vocab]` logits.

    Args:
        cfg: its shape and numerics.
        rngs: the `params` stream initialises it, a normal distribution with deviation 0.02, and 0.02 /
            sqrt(2 * layers) for the two projections that add to the residual stream.

    >>> model = GPT(GPTConfig(layers=1, width=8, heads=2), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 5), jnp.int32)).shape
    (2, 5, 256)
    """

    def __init__(self, cfg: GPTConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        embed_key, position_key, head_key, blocks_key = jax.random.split(rngs.params(), 4)
        learned, own_head = cfg.positions == "learned", not cfg.tie_head
        self.embed = param(embed_key, cfg, (cfg.vocab, cfg.width), 0.02)
        self.position = param(position_key, cfg, (cfg.context, cfg.width), 0.02) if learned else None
        blocks_keys = jax.random.split(blocks_key, cfg.layers)
        self.blocks = make_layers(lambda key: Block(cfg, key), blocks_keys, scan=cfg.scan_layers)
        self.norm = Norm(cfg)
        self.head = param(head_key, cfg, (cfg.width, cfg.vocab), 0.02) if own_head else None

    def __call__(
        self, tokens: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | jax.Array | None = None
    ) -> jax.Array:
        """Logits of each position's next token.

        Args:
            tokens: integers `[batch, seq]`, seq at most `cfg.context`. One outside the vocabulary makes NaNs.
            deterministic: whether dropout is off.
            rngs: where dropout's key comes from: an `nnx.Rngs` (its `dropout` stream) or a key.

        Returns:
            `[batch, seq, vocab]` in `cfg.dtype`.
        """
        keys = dropout_keys(self.cfg, deterministic, rngs)
        x = embed_tokens(self.cfg, self.embed, self.position, tokens)
        if keys is not None:
            x, keys = dropout(x, self.cfg.dropout, keys[0]), keys[1:]
        x = self.norm(run_layers(self.blocks, x, keys, remat=self.cfg.remat))
        return predict(x, self.embed, self.head)

    def cache(self, batch: int, length: int | None = None) -> KVCache:
        """Room for the keys and values of so many positions, `cfg.context` by default, of which none is seen yet."""
        cfg = self.cfg
        shape = (cfg.layers, batch, cfg.context if length is None else length, cfg.key_heads, cfg.head_dim)
        empty = jnp.zeros(shape, cfg.dtype)
        return KVCache((empty, empty), jnp.zeros((), jnp.int32))

    def extend(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Logits of the tokens that follow those which the cache has seen, without running these again.

        Args:
            tokens: integers `[batch, seq]`; with those that were seen at most as many as the cache has room for.
            cache: from `cache`, or from the last call.

        Returns:
            Logits `[batch, seq, vocab]` as the whole sequence gives them, and the cache that has seen these, too.
        """
        start = cache.length
        x = embed_tokens(self.cfg, self.embed, self.position, tokens, start)
        x, kept = extend_layers(self.blocks, x, cache.kept, lambda layer, x, own: layer.extend(x, own, start))
        logits = predict(self.norm(x), self.embed, self.head)
        return logits, KVCache(kept, start + jnp.int32(tokens.shape[1]))


def embed_tokens(
    cfg: GPTConfig, embed: nnx.Param, position: nnx.Param | None, tokens: jax.Array, start: jax.Array | None = None
) -> jax.Array:
    """Rows of `embed [vocab, width]`, and of `position [context, width]` where there is one: `[batch, seq, width]`.

    Positions are counted from `start`, 0 by default.
    """
    _check_tokens(cfg, tokens)
    # `fill` and no wrapping: an id outside the vocabulary is NaN rather than some other token's row.
    x = embed[...].at[tokens].get(mode="fill", wrap_negative_indices=False).astype(cfg.dtype)
    if position is None:
        return x
    rows = position[...]
    seq = tokens.shape[1]
    rows = rows[:seq] if start is None else lax.dynamic_slice_in_dim(rows, start, seq)
    return x + align(rows.astype(cfg.dtype), 3)


def predict(x: jax.Array, embed: nnx.Param, head: nnx.Param | None) -> jax.Array:
    """Logits `[batch, seq, vocab]` by `head [width, vocab]`, or by the embedding where the head is tied to it."""
    if head is None:
        return jnp.einsum("bse,ve->bsv", x, embed[...].astype(x.dtype))
    return jnp.einsum("bse,ev->bsv", x, head[...].astype(x.dtype))


def _check_tokens(cfg: GPTConfig, tokens: jax.Array) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"GPT: tokens must be integers [batch, seq], not {tokens.dtype}{list(tokens.shape)}")
    if tokens.shape[1] > cfg.context:
        raise ValueError(
            f"GPT: tokens have {tokens.shape[1]} positions (dim 1), more than the context of {cfg.context}. "
            "Cut them, or make the model with a larger GPTConfig.context"
        )


def dropout_keys(cfg: GPTConfig, deterministic: bool, rngs: nnx.Rngs | jax.Array | None) -> jax.Array | None:
    """One key for the embedding and one for each layer, or None where nothing is dropped."""
    if deterministic or cfg.dropout == 0.0:
        return None
    if rngs is None:
        raise ValueError(f"GPT: dropout is {cfg.dropout} and deterministic=False: pass rngs=nnx.Rngs(...) or a key")
    key = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs
    return jax.random.split(key, cfg.layers + 1)


def restack(model: GPT, scan_layers: bool) -> GPT:
    """Copy a model into the other layout of its layers: stacked and scanned over, or a list.

    Args:
        model: any `GPT`.
        scan_layers: what the result's config says.

    Returns:
        A model that computes what `model` does, in the layout that was asked for.
    """
    cfg = dataclasses.replace(model.cfg, scan_layers=scan_layers)
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(cfg, rngs=nnx.Rngs(0))))
    values = nnx.to_pure_dict(nnx.state(model))
    if model.cfg.scan_layers and not scan_layers:
        stacked = values["blocks"]
        values["blocks"] = {i: jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(cfg.layers)}
    elif scan_layers and not model.cfg.scan_layers:
        layers = [values["blocks"][i] for i in range(cfg.layers)]
        values["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)


def loss_fn(
    model: GPT,
    tokens: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None = None,
    *,
    deterministic: bool = True,
    rngs: nnx.Rngs | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy` of the model's logits: the loss summed over tokens, and their count."""
    return cross_entropy(model(tokens, deterministic=deterministic, rngs=rngs), targets, mask)


def parameter_count(model: GPT) -> int:
    """Count the parameters, a tied head once."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def flops_per_token(cfg: GPTConfig, seq: int | None = None) -> int:
    """FLOPs of a training step (forward and backward) for each token, without recomputation.

    `6 N + 12 layers heads head_dim seq` with N the parameters of the matrix products, head included and
    lookups not (PaLM, arXiv:2204.02311, appendix B; attention is counted as if it were not causal, as is
    usual for MFU).

    Args:
        cfg: the model's config.
        seq: sequence length, `cfg.context` where None.
    """
    seq = cfg.context if seq is None else seq
    attention_params = cfg.width * cfg.head_dim * (2 * cfg.heads + 2 * cfg.key_heads)
    mlp_params = cfg.width * cfg.hidden * (3 if cfg.mlp == "swiglu" else 2)
    params = cfg.layers * (attention_params + mlp_params) + cfg.width * cfg.vocab
    return 6 * params + 12 * cfg.layers * cfg.width * seq
