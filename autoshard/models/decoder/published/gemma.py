"""Published sizes of Gemma 3 and Gemma 4: their text models.

Sources: the `config.json` of the releases, https://huggingface.co/google/gemma-3-12b-it,
https://huggingface.co/google/gemma-4-E2B and https://huggingface.co/google/gemma-4-31B; the report of Gemma 3 is
arXiv:2503.19786. Rotary frequencies of the extended contexts are those of the releases. The name E2B counts the
parameters of Gemma 4 E2B without its table of vectors for each token and layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import LayerInputsConfig, LayerKind
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.decoder.published.training import trained

LOCAL, WHOLE = "local", "whole"  # names of lent keys and values


def _gemma3(width: int, layers: int, heads: int, kv_heads: int, ffn: int) -> DecoderConfig:
    """Five local layers with a window of 1024 for each global one (arXiv:2503.19786, section 2)."""
    local = LayerKind(window=1024, rotary=Rotary(10_000.0))
    whole = LayerKind(rotary=Rotary(1_000_000.0, scaling="linear", factor=8.0))
    return trained(
        vocab=262_144,
        width=width,
        kinds=tuple(whole if n % 6 == 5 else local for n in range(layers)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        ffn=ffn,
        context=131_072,
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        query_norm=True,
        score_scale=256**-0.5,
        embed_scale=width**0.5,
        tie_head=True,
    )


def _gemma4(width: int, heads: int, kv_heads: int, ffn: int, **fields: Any) -> DecoderConfig:
    """Make a config from these sizes, the fields that all models of Gemma 4 share, and further fields."""
    return trained(
        vocab=262_144,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        ffn=ffn,
        activation="gelu_tanh",
        post_norms=True,
        query_norm=True,
        value_norm=True,
        layer_scale=True,
        score_scale=1.0,
        logit_cap=30.0,
        embed_scale=width**0.5,
        tie_head=True,
        **fields,
    )


def _gemma4_kinds(layers: int, period: int, window: int, **whole: Any) -> list[LayerKind]:
    """Return local layers and, at the end of each `period`, one global layer.

    Global layers have larger heads and rotate a quarter of each. `whole` are further fields of their kind.
    """
    local = LayerKind(window=window, rotary=Rotary(10_000.0))
    all_ = LayerKind(rotary=Rotary(1_000_000.0, fraction=0.25), head_dim=512, **whole)
    return [all_ if n % period == period - 1 else local for n in range(layers)]


def _gemma4_e2b() -> DecoderConfig:
    """The last 20 of 35 layers borrow the keys and values of layers 13 and 14. Their MLPs are twice as wide."""
    kinds = _gemma4_kinds(35, period=5, window=512)
    names = [WHOLE if kind.window is None else LOCAL for kind in kinds]
    kinds[15:] = [replace(kind, borrows=name, ffn=12_288) for kind, name in zip(kinds[15:], names[15:], strict=True)]
    kinds[13:15] = [replace(kind, lends=name) for kind, name in zip(kinds[13:15], names[13:15], strict=True)]
    inputs = LayerInputsConfig(262_144, 256)
    return _gemma4(1536, 8, 1, 6144, kinds=tuple(kinds), context=131_072, layer_inputs=inputs)


def _gemma4_31b() -> DecoderConfig:
    kinds = _gemma4_kinds(60, period=6, window=1024, kv_heads=4, keys_as_values=True)
    return _gemma4(5376, 32, 16, 21_504, kinds=tuple(kinds), context=262_144)


GEMMA: dict[str, DecoderConfig] = {
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10_240),
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15_360),
    "gemma4-2b": _gemma4_e2b(),
    "gemma4-31b": _gemma4_31b(),
}
"""Gemma models, by name."""
