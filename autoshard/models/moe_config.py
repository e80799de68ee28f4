"""The configuration of a `MoE`."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from autoshard.models.gpt_config import GPTConfig
from autoshard.models.remat.policies import remat_problems


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Shape and numerics of a `MoE`.

    Args:
        gpt: everything except the experts: sizes, attention, dense layers, numerics. Its `quantization` needs the
            dispatch `capacity`, and quantizes the experts too, except in generation with a cache.
        experts: number of experts in a layer.
        top_k: number of experts per token.
        expert_ffn: hidden size of an expert; defaults to `gpt.hidden`.
        moe_every: every `moe_every`-th layer has experts; divides `gpt.layers`.
        shared_experts: number of additional experts that every token uses. They are one MLP of hidden size
            `shared_experts * expert_ffn`.
        dispatch: `capacity` or `dropless`; see `autoshard.models.moe`.
        capacity_factor: an expert's capacity, relative to what it needs if tokens are spread evenly over experts. The
            default is that of ST-MoE (arXiv:2202.08906).
        group_size: number of tokens that compete for an expert's capacity; defaults to the sequence length.
        renormalize: whether the gates of a token's experts are scaled to sum to 1. Otherwise they are the router's
            probabilities.
        balance_weight: weight of the load-balancing loss. The default is that of Switch Transformer (arXiv:2101.03961).
        z_weight: weight of the router's z loss. The default is that of ST-MoE.

    Raises:
        ValueError: if a field is invalid; the message names every invalid field.
    """

    gpt: GPTConfig = GPTConfig()
    experts: int = 8
    top_k: int = 2
    expert_ffn: int | None = None
    moe_every: int = 1
    shared_experts: int = 0
    dispatch: Literal["capacity", "dropless"] = "capacity"
    capacity_factor: float = 1.25
    group_size: int | None = None
    renormalize: bool = True
    balance_weight: float = 0.01
    z_weight: float = 0.001

    def __post_init__(self) -> None:
        problems = []
        for name in ("experts", "top_k", "expert_ffn", "moe_every", "group_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                problems.append(f"{name} is {size}; it must be at least 1")
        for name in ("shared_experts", "balance_weight", "z_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}; it must be a finite number of at least 0")
        if self.dispatch not in ("capacity", "dropless"):
            problems.append(f"dispatch is {self.dispatch!r}; choose one of capacity, dropless")
        if self.dispatch == "dropless" and self.gpt.quantization != "none":
            problems.append(
                f"dispatch is 'dropless' and quantization is {self.gpt.quantization!r}: products of experts with "
                "groups of rows of any size are not quantized; set dispatch='capacity' or quantization='none'"
            )
        if self.gpt.mlp == "gelu_exact":
            problems.append("mlp is 'gelu_exact'; experts are built with swiglu and gelu")
        if self.top_k > self.experts:
            problems.append(f"top_k is {self.top_k}; it must be at most the number of experts, {self.experts}")
        if self.top_k == 1 and self.renormalize:
            problems.append(
                "top_k is 1 and renormalize is True: gates of 1 give the router no gradient; set renormalize=False"
            )
        if not 0 < self.capacity_factor < math.inf:
            problems.append(f"capacity_factor is {self.capacity_factor}; it must be a finite number above 0")
        if self.moe_every > 0 and self.gpt.layers % self.moe_every:
            problems.append(
                f"layers {self.gpt.layers} is not a multiple of moe_every {self.moe_every}; change one of them"
            )
        elif self.moe_every > 0:
            groups = self.gpt.layers // self.moe_every
            problems += remat_problems(self.gpt.remat, groups, scan=self.gpt.scan_layers)
        if problems:
            raise ValueError("MoEConfig: " + "; ".join(problems))

    @property
    def context(self) -> int:
        """Maximum sequence length."""
        return self.gpt.context

    @property
    def vocab(self) -> int:
        """Number of distinct tokens."""
        return self.gpt.vocab

    @property
    def expert_hidden(self) -> int:
        """Hidden size of an expert: `expert_ffn`, or that of the dense layers."""
        return self.gpt.hidden if self.expert_ffn is None else self.expert_ffn

    def capacity(self, group_size: int) -> int:
        """Capacity of an expert: how many tokens of a group it accepts."""
        return min(group_size, math.ceil(self.capacity_factor * self.top_k * group_size / self.experts))
