"""The configuration of a `Decoder`: sizes, and one switch for each way in which the families differ."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from autoshard._shown import shown
from autoshard.kernels.kernel_choice import Impl
from autoshard.models.decoder.kinds import (
    ExpertsConfig,
    LatentConfig,
    LayerInputsConfig,
    LayerKind,
    expert_problems,
    kind_problems,
)
from autoshard.models.decoder.segments import segments_of
from autoshard.models.remat.policies import remat_problems

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]
NormKind = Literal["rms", "layer"]
_DTYPES = ("float32", "bfloat16", "float16")


@shown
@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and numerics of a `Decoder`.

    Args:
        vocab: number of distinct tokens.
        width: size of the residual stream.
        kinds: the kind of each layer, in order.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: size of one head.
        ffn: hidden size of the MLP.
        context: maximum sequence length.
        experts: the experts of layers that have them.
        latent: attention with latent keys and values in place of heads of `head_dim`.
        sinks: whether each head has the score of one more key that has no value (gpt-oss, arXiv:2508.10925).
        causal: whether a position sees no later ones. An encoder is not causal, and has no cache.
        learned_positions: whether a learned vector of each position is added to the embedding (GPT-2).
        activation: of the MLP: `silu`, `gelu`, `gelu_tanh`, or `quick_gelu`, which is `x * sigmoid(1.702 x)`.
            Experts have `silu`, or the unit of `ExpertsConfig.limit`.
        gated: whether the MLP is `w_down(activation(w_gate x) * w_up x)`; else it is `w_down(activation(w_up x))`.
        norm: `rms`, RMSNorm, or `layer`, LayerNorm with a bias.
        norm_eps: added to the mean square, or to the variance, before its root.
        norm_offset: added to the norms' scale: 1 for the Gemma families, which store the difference from 1.
        post_norms: whether the results of attention and MLP are normalised, too, before they are added (Gemma).
        query_norm: whether each head's queries and keys are normalised before they are rotated (Qwen3, Gemma 3).
        value_norm: whether each head's values are divided by their root mean square (Gemma 4).
        layer_scale: whether a layer's result is multiplied by a stored number, which is not trained (Gemma 4).
        layer_inputs: sizes of the vectors that each layer looks up by token and adds through a gate (Gemma 4); None
            for a model without them.
        qkv_bias: whether queries, keys and values have biases.
        output_bias: whether attention's output has a bias.
        mlp_bias: whether the MLP's products have biases.
        score_scale: factor of the scores; None means `1 / sqrt(head_dim)`.
        score_cap: soft cap of the scores, `cap * tanh(score / cap)`.
        logit_cap: soft cap of the logits, `cap * tanh(logit / cap)`.
        embed_scale: factor of the embedding.
        router_loss: factor of the loss that balances the load of experts, which training adds; see `experts.Load`.
        tie_head: whether the head shares the embedding's parameter.
        scan_layers: whether the parameters of layers that repeat are stacked and run in a scan.
        remat: what the forward pass of a layer saves; see `GPTConfig`.
        attention: implementation of attention; see `models.attention`.
        block_size: number of keys in a block of blockwise attention.
        loss_chunks: number of chunks of the vocabulary for which the loss computes logits; see `GPTConfig`.
        init_std: standard deviation of initial parameters.
        dtype: dtype of the computation. Softmax, norms, rotary positions and the loss use float32.
        param_dtype: dtype in which parameters are stored.

    Raises:
        ValueError: if a field is invalid; the message names every invalid field.

    >>> sizes = {"vocab": 16, "width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 16, "context": 32}
    >>> DecoderConfig(kinds=(LayerKind(),) * 2, **sizes).layers
    2
    """

    vocab: int
    width: int
    kinds: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    sinks: bool = False
    causal: bool = True
    learned_positions: bool = False
    activation: Activation = "silu"
    gated: bool = True
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    query_norm: bool = False
    value_norm: bool = False
    layer_scale: bool = False
    layer_inputs: LayerInputsConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    embed_scale: float = 1.0
    router_loss: float = 0.0
    tie_head: bool = False
    scan_layers: bool = True
    remat: str = "none"
    attention: Impl = "auto"
    block_size: int = 512
    loss_chunks: int = 1
    init_std: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = ("vocab", "width", "heads", "kv_heads", "head_dim", "ffn", "context", "block_size", "loss_chunks")
        small = {name: getattr(self, name) for name in sizes if getattr(self, name) < 1}
        problems = [f"{name} is {size}; it must be at least 1" for name, size in small.items()]
        choices = {"activation": get_args(Activation), "norm": get_args(NormKind), "attention": get_args(Impl),
                   "dtype": _DTYPES, "param_dtype": _DTYPES}  # fmt: skip
        problems += [
            f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
            for name, allowed in choices.items()
            if getattr(self, name) not in allowed
        ]
        if not self.kinds:
            problems.append("kinds is empty; give the kind of each layer")
        for kv_heads in dict.fromkeys(kind.kv_heads or self.kv_heads for kind in self.kinds):
            if not small and self.heads % kv_heads:
                problems.append(f"heads {self.heads} is not a multiple of kv_heads {kv_heads}; change one of them")
        if not 0 <= self.router_loss < float("inf"):
            problems.append(f"router_loss is {self.router_loss}; it must be at least 0 and finite")
        if self.router_loss and not any(kind.experts for kind in self.kinds):
            problems.append(f"router_loss is {self.router_loss}, but no layer has experts: leave it out")
        if any(kind.experts for kind in self.kinds) and self.experts is None:
            problems.append("layers have experts, but experts is None; give an ExpertsConfig")
        problems += [
            f"{name} is {cap}; it must be a finite number above 0, or None for no cap"
            for name, cap in {"score_cap": self.score_cap, "logit_cap": self.logit_cap}.items()
            if cap is not None and not 0.0 < cap < float("inf")
        ]
        if self.loss_chunks > self.vocab:
            problems.append(f"loss_chunks is {self.loss_chunks}; it must be at most vocab, {self.vocab}")
        problems += kind_problems(self.kinds, self.head_dim if self.latent is None else self.latent.rotary_dim)
        if self.latent is not None and any(kind.head_dim or kind.lends or kind.borrows for kind in self.kinds):
            problems.append("latent attention is not built with heads of other sizes, or with lent keys and values")
        if self.layer_inputs is not None and min(self.layer_inputs.vocab, self.layer_inputs.width) < 1:
            problems.append(f"layer_inputs is {self.layer_inputs}; its sizes must be at least 1")
        if not self.causal and (self.latent is not None or any(kind.reach is not None for kind in self.kinds)):
            problems.append("causal is False; latent attention, windows and chunks are built causal only")
        if self.experts is not None:
            problems += expert_problems(self.experts)
            if self.experts.limit is None and self.activation != "silu":
                problems.append(f"activation is {self.activation!r}; experts are built with silu only")
        for segment in segments_of(self.kinds):
            # A group of several layers rematerializes each of them; else the groups are scanned.
            scan = self.scan_layers and segment.repeats > 1 and len(segment.pattern) == 1
            problems += [p for p in remat_problems(self.remat, segment.repeats, scan=scan) if p not in problems]
        if problems:
            raise ValueError("DecoderConfig: " + "; ".join(problems))

    def rotary_dims(self, kind: LayerKind) -> int:
        """Return the size of the part of each query and key head to which a layer applies rotary positions."""
        return kind.head_dim or self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.kinds)
