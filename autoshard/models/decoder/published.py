"""Published sizes of Gemma 3, gpt-oss, Qwen3 and DeepSeek as configurations of `Decoder`, as they are trained.

All compute in bfloat16 with float32 parameters and recompute each layer in the backward pass. Use `dataclasses.replace`
for other settings. The context is that of the release; `models.workloads` trains on shorter sequences.

Sources: the `config.json` of the releases, https://huggingface.co/google/gemma-3-12b-it (its text part),
https://huggingface.co/openai/gpt-oss-120b, https://huggingface.co/Qwen/Qwen3-235B-A22B and
https://huggingface.co/deepseek-ai/DeepSeek-V3; the reports are arXiv:2503.19786, arXiv:2508.10925, arXiv:2505.09388 and
arXiv:2412.19437. Rotary frequencies of the extended contexts are those of the releases. The extra layer that predicts a
second token of DeepSeek-V3 is left out, as the published weights' own configuration for inference does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import ExpertsConfig, LatentConfig, LayerKind
from autoshard.models.decoder.rotary import Rotary

_trained = partial(DecoderConfig, remat="full", dtype="bfloat16")


def _gemma3(width: int, layers: int, heads: int, kv_heads: int, ffn: int) -> DecoderConfig:
    """Five local layers with a window of 1024 for each global one (arXiv:2503.19786, section 2)."""
    local = LayerKind(window=1024, rotary=Rotary(10_000.0))
    whole = LayerKind(rotary=Rotary(1_000_000.0, scaling="linear", factor=8.0))
    return _trained(
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


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    """Local layers with a window of 128 and global ones in turn (arXiv:2508.10925, section 2)."""
    rotary = Rotary(150_000.0, scaling="yarn", factor=32.0, original_context=4096, truncate=False)
    local, whole = LayerKind(128, rotary, experts=True), LayerKind(None, rotary, experts=True)
    return _trained(
        vocab=201_088,
        width=2880,
        kinds=(local, whole) * (layers // 2),
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        context=131_072,
        experts=ExpertsConfig(experts, 4, 2880, bias=True, limit=7.0),
        norm_eps=1e-5,
        sinks=True,
        qkv_bias=True,
        output_bias=True,
    )


def _qwen3_moe(width: int, layers: int, heads: int, kv_heads: int, expert_ffn: int) -> DecoderConfig:
    """Every layer has 128 experts, of which a token uses 8 (arXiv:2505.09388, table 2)."""
    return _trained(
        vocab=151_936,
        width=width,
        kinds=(LayerKind(rotary=Rotary(1_000_000.0), experts=True),) * layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn=3 * width,
        context=40_960,
        experts=ExpertsConfig(128, 8, expert_ffn),
        query_norm=True,
    )


def _deepseek_v3() -> DecoderConfig:
    """Latent attention, three dense layers, then 256 experts and a shared one (arXiv:2412.19437, section 4.2)."""
    dense = LayerKind(rotary=Rotary(10_000.0, "yarn", 40.0, 4096, attention_factor=1.0, interleaved=True))
    return _trained(
        vocab=129_280,
        width=7168,
        kinds=(dense,) * 3 + (replace(dense, experts=True),) * 58,
        heads=128,
        kv_heads=128,
        head_dim=192,
        ffn=18_432,
        context=163_840,
        latent=LatentConfig(kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128, q_rank=1536),
        experts=ExpertsConfig(
            256, 8, 2048, scoring="sigmoid", groups=8, top_groups=4, group_best=2, choice_bias=True, scale=2.5,
            shared_ffn=2048,
        ),
        # Scores are scaled by the square of 0.1 log(40) + 1, because the context was extended 40 times.
        score_scale=192**-0.5 * 1.3688879454113936**2,
    )  # fmt: skip


DECODERS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "gemma3-4b": _gemma3(2560, 34, 8, 4, 10_240),
        "gemma3-12b": _gemma3(3840, 48, 16, 8, 15_360),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 768),
        "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 4, 1536),
        "deepseek-v3": _deepseek_v3(),
    }
)
"""The published sizes. Use `dataclasses.replace` for other settings."""
