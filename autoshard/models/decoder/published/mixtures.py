"""Published sizes of gpt-oss, Qwen3, DeepSeek-V3 and Llama 4 Maverick: models with experts.

Sources: the `config.json` of the releases, https://huggingface.co/openai/gpt-oss-120b,
https://huggingface.co/Qwen/Qwen3-235B-A22B, https://huggingface.co/deepseek-ai/DeepSeek-V3 and
https://huggingface.co/meta-llama/Llama-4-Maverick-17B-128E (its text part); the reports are arXiv:2508.10925,
arXiv:2505.09388 and arXiv:2412.19437. Rotary frequencies of the extended contexts are those of the releases. The extra
layer of DeepSeek-V3, which predicts a second token, is left out, as in the release's own configuration for inference.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import ExpertsConfig, LatentConfig, LayerKind
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.decoder.positions.temperature import Temperature
from autoshard.models.decoder.published.training import trained


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    """Local layers with a window of 128 and global ones in turn (arXiv:2508.10925, section 2)."""
    rotary = Rotary(150_000.0, scaling="yarn", factor=32.0, original_context=4096, truncate=False)
    local, whole = LayerKind(128, rotary, experts=True), LayerKind(None, rotary, experts=True)
    return trained(
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
    return trained(
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
    return trained(
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


def _llama4_maverick() -> DecoderConfig:
    """Dense layers alternate with layers of 128 experts.

    Every fourth layer has no rotary positions and attends to all earlier positions.
    """
    chunked = LayerKind(rotary=Rotary(500_000.0, interleaved=True), chunk=8192)
    whole = LayerKind(rotary=None, experts=True, temperature=Temperature(0.1, 8192))
    return trained(
        vocab=202_048,
        width=5120,
        kinds=(chunked, replace(chunked, experts=True), chunked, whole) * 12,
        heads=40,
        kv_heads=8,
        head_dim=128,
        ffn=16_384,
        context=1_048_576,
        experts=ExpertsConfig(128, 1, 8192, renormalize=False, scoring="sigmoid", shared_ffn=8192, gated_input=True),
        norm_eps=1e-5,
    )


MIXTURES: dict[str, DecoderConfig] = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 4, 1536),
    "deepseek-v3": _deepseek_v3(),
    "llama4-maverick-17b-128e": _llama4_maverick(),
}
"""Models with experts, by name."""
