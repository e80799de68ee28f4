"""The settings of low-rank adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from autoshard.errors import ConfigError
from autoshard.models.decoder.quantized_weight import WeightFormat


@dataclass(frozen=True)
class LoraConfig:
    r"""Which weights have adapters, and of which rank.

    Raises:
        ConfigError: a value is invalid; the message names each.

    >>> LoraConfig(rank=8, alpha=16).scale
    2.0
    """

    rank: int = 0
    """Rank of the adapters; 0 for no adapters. With adapters, nothing else is trained."""
    alpha: float = 16.0
    """The product of an adapter's factors is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("attention/w*",)
    """Globs over /-joined paths within a layer, such as 'attention/*' 'mlp/*', or of the whole model. Matching matrices
    have adapters."""
    rslora: bool = False
    """Whether to divide alpha by the square root of the rank instead (rank-stabilized LoRA)."""
    dora: bool = False
    """Whether magnitudes of the weights' columns are trained, too (DoRA)."""
    quantize: WeightFormat = "none"
    """Format of the frozen matrices that have adapters: int8, or nf4, which has 4 bits (QLoRA)."""
    path: Path | None = None
    """Folder of an adapter in PEFT's format to start from. The other settings of adapters are then those of it."""

    def __post_init__(self) -> None:
        """Refuse invalid values, all in one error."""
        problems = []
        if self.rank < 0:
            problems.append(f"lora.rank is {self.rank}; it must be at least 1, or 0 for no adapters")
        if not 0 < self.alpha < math.inf:
            problems.append(f"lora.alpha is {self.alpha}; it must be positive and finite")
        if not self.targets:
            problems.append("lora.targets is empty; give globs such as 'attention/*'")
        if self.quantize != "none" and self.dora:
            problems.append("lora.dora and lora.quantize are both given, which is not built: leave out one of them")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def scale(self) -> float:
        """The factor of the product of an adapter's factors. Only with a rank."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
