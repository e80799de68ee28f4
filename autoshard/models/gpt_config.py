"""The configuration of a `GPT`, and the FLOPs of a training step that follow from it."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from autoshard.kernels.kernel_choice import Impl
from autoshard.models.quantized import Quantization
from autoshard.models.remat.policies import remat_problems

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rotary", "learned"),
    "mlp": ("swiglu", "gelu", "gelu_exact"),
    "attention": get_args(Impl),
    "dtype": ("float32", "bfloat16", "float16"),
    "param_dtype": ("float32", "bfloat16", "float16"),
    "quantization": get_args(Quantization),
}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shape and numerics of a `GPT`. The defaults are nanoGPT's CPU model with bytes as tokens.

    Args:
        vocab: number of distinct tokens.
        layers: number of blocks.
        heads: query heads; divides `width`.
        kv_heads: key and value heads; divides `heads`. Defaults to `heads`.
        width: size of the residual stream.
        ffn: hidden size of the MLP. Defaults to `4 * width` for gelu, and for swiglu to `8/3 * width` rounded up to a
            multiple of 32: swiglu has three matrices, so the number of parameters is about the same.
        context: maximum sequence length.
        norm: `rmsnorm` or `layernorm`, before each sublayer and the head.
        positions: `rotary` (applied to queries and keys) or `learned` (added to the embedding).
        mlp: `swiglu`; `gelu`, with the approximation by tanh; or `gelu_exact`.
        bias: whether projections and LayerNorm have biases.
        tie_head: whether the head shares the embedding's parameter.
        scan_layers: whether the layers' parameters are stacked and the layers run in a scan.
        remat: what the forward pass of a layer saves for its backward pass: a name in `REMAT_POLICIES`. `none` saves
            every value that the backward pass needs, `full` only the layer's input, `dots` also the results of its
            projections. `host:residual+qkv keep:out_proj` names the values that wait in the host's memory and those
            that stay on the device (`remat.named_values`); all others are recomputed. Several policies, separated by
            commas, alternate over the layers: with `none,full` every second layer is recomputed.
        attention: `plain`, `blockwise`, `splash` (JAX's kernel for TPUs), `cudnn` (NVIDIA GPUs, 16-bit `dtype`), or
            `auto`: the kernel of the platform that the step is planned for, else by sequence length (see `attention`).
            Generation with a cache uses `plain` or `blockwise`.
        block_size: number of keys in a block of blockwise attention.
        loss_chunks: number of chunks of the vocabulary for which the loss computes logits one after the other, at most
            `vocab`. With 1 the logits are whole, `[batch, seq, vocab]` in float32. With n the loss needs about 1/n of
            their memory, and computes them again in the backward pass. A vocabulary is sharded over d devices only if
            d * n divides it. Over these devices, the gradient of the features is summed n times instead of once.
        dropout: dropout rate on the embedding and on each sublayer's output.
        dtype: dtype of the computation. Softmax, norms and the loss always use float32.
        param_dtype: dtype in which parameters are stored.
        quantization: `none`, or `int8` or `fp8`: the operands of the layers' products with parameters are rounded to 8
            bits in the forward and the backward pass (`quantized`). Attention, embedding, norms, head and loss keep
            `dtype`, parameters `param_dtype`. Needs the extra `quantized`.
        rotary_base: base of the rotary frequencies, `base ** (-2 i / head_dim)` radians per position.
        norm_eps: added to the variance before its square root.

    Raises:
        ValueError: if a field is invalid; the message names every invalid field.
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
    mlp: Literal["swiglu", "gelu", "gelu_exact"] = "swiglu"
    bias: bool = False
    tie_head: bool = True
    scan_layers: bool = True
    remat: str = "none"
    attention: Impl = "auto"
    block_size: int = 512
    loss_chunks: int = 1
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    quantization: Quantization = "none"
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
            for name, allowed in _CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        sizes = ("vocab", "layers", "heads", "kv_heads", "width", "ffn", "context", "block_size", "loss_chunks")
        given = {name: getattr(self, name) for name in sizes if getattr(self, name) is not None}
        small = {name: size for name, size in given.items() if size < 1}
        problems += [f"{name} is {size}; it must be at least 1" for name, size in small.items()]
        if not small:
            problems += self._head_problems()
            if self.loss_chunks > self.vocab:
                problems.append(f"loss_chunks is {self.loss_chunks}; it must be at most vocab, {self.vocab}")
            problems += remat_problems(self.remat, self.layers, scan=self.scan_layers)
        if self.attention == "cudnn" and self.dtype == "float32":
            problems.append(
                "attention is 'cudnn', which needs dtype bfloat16 or float16, not float32; change one of them"
            )
        if self.attention == "splash" and self.dtype == "float16":
            problems.append(
                "attention is 'splash', which needs dtype bfloat16 or float32, not float16; change one of them"
            )
        if self.quantization != "none" and self.dtype == "float16":
            problems.append(
                f"quantization is {self.quantization!r}, whose sums exceed the range of dtype float16; use bfloat16 or "
                "float32"
            )
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        problems += [
            f"{name} is {getattr(self, name)}; it must be a finite number above 0"
            for name in ("rotary_base", "norm_eps")
            if not 0.0 < getattr(self, name) < float("inf")
        ]
        if problems:
            raise ValueError("GPTConfig: " + "; ".join(problems))

    def _head_problems(self) -> list[str]:
        problems = []
        if self.width % self.heads:
            problems.append(f"width {self.width} is not a multiple of heads {self.heads}; change one of them")
        elif self.positions == "rotary" and self.head_dim % 2:
            problems.append(
                f"width / heads is {self.head_dim}, and rotary positions rotate pairs of elements: make it even, "
                "or set positions='learned'"
            )
        if self.heads % self.key_heads:
            problems.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; change one of them")
        return problems

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Number of key and value heads: `kv_heads`, or `heads` if that is None."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """Hidden size of the MLP: `ffn` or its default."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.width if self.mlp != "swiglu" else -(-8 * self.width // (3 * 32)) * 32


def flops_per_token(cfg: GPTConfig, seq: int | None = None) -> int:
    """Count the FLOPs per token of a training step (forward and backward), without recomputation.

    The count is `6 N + 12 layers heads head_dim seq`. N is the number of parameters in matrix products: the head is
    included, embedding lookups are not (PaLM, arXiv:2204.02311, appendix B). Attention counts as if it were not causal,
    as is usual for MFU.

    Args:
        cfg: the model's config.
        seq: sequence length; defaults to `cfg.context`.
    """
    seq = cfg.context if seq is None else seq
    attention_params = cfg.width * cfg.head_dim * (2 * cfg.heads + 2 * cfg.key_heads)
    mlp_params = cfg.width * cfg.hidden * (3 if cfg.mlp == "swiglu" else 2)
    params = cfg.layers * (attention_params + mlp_params) + cfg.width * cfg.vocab
    return 6 * params + 12 * cfg.layers * cfg.width * seq
