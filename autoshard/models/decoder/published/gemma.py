"""Published sizes of Gemma 3.

Sources: the `config.json` of the releases, https://huggingface.co/google/gemma-3-12b-it (its text part); the report is
arXiv:2503.19786. Rotary frequencies of the extended contexts are those of the releases.
"""

from __future__ import annotations

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.decoder.published.training import trained


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


GEMMA: dict[str, DecoderConfig] = {
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10_240),
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15_360),
}
"""Gemma models, by name."""
