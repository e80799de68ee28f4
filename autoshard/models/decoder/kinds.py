"""What may differ from layer to layer of a `Decoder`, and its experts."""

from __future__ import annotations

import dataclasses
from typing import get_args

from autoshard.models.decoder.rotary import Rotary, Scaling


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer.

    Args:
        window: a position sees the `window` positions that end at its own; None means all earlier ones.
        rotary: its rotary positions; None means none.
        experts: whether experts take the place of the MLP.
    """

    window: int | None = None
    rotary: Rotary | None = Rotary()
    experts: bool = False


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer.

    Args:
        experts: number of experts.
        top_k: number of experts per token.
        ffn: hidden size of an expert.
        renormalize: whether the gates of a token's experts are scaled to sum to 1. Otherwise they are the router's
            probabilities.
    """

    experts: int
    top_k: int
    ffn: int
    renormalize: bool = True


def kind_problems(kinds: tuple[LayerKind, ...]) -> list[str]:
    """Return what is wrong with the kinds of the layers."""
    problems = []
    for kind in dict.fromkeys(kinds):
        if kind.window is not None and kind.window < 1:
            problems.append(f"a layer's window is {kind.window}; it must be at least 1")
        rotary = kind.rotary
        if rotary is None:
            continue
        if rotary.scaling not in get_args(Scaling):
            problems.append(f"scaling is {rotary.scaling!r}; choose one of {', '.join(get_args(Scaling))}")
        if not 1.0 < rotary.base < float("inf") or not rotary.factor > 0:
            problems.append(
                f"rotary base is {rotary.base} and factor {rotary.factor}; give a base above 1, a factor above 0"
            )
        if rotary.scaling in ("llama3", "yarn") and rotary.original_context < 1:
            problems.append(f"original_context is {rotary.original_context}; {rotary.scaling} needs at least 1")
    return problems


def expert_problems(cfg: ExpertsConfig) -> list[str]:
    """Return what is wrong with the experts."""
    small = {name: getattr(cfg, name) for name in ("experts", "top_k", "ffn") if getattr(cfg, name) < 1}
    problems = [f"experts: {name} is {size}; it must be at least 1" for name, size in small.items()]
    if cfg.top_k > cfg.experts:
        problems.append(f"top_k is {cfg.top_k}; it must be at most the number of experts, {cfg.experts}")
    return problems
