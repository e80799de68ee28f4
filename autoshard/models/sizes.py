"""Published sizes of GPT, Mistral, MoE, Wide-ResNet and ViT. `llama` has those of Llama.

All compute in bfloat16 with float32 parameters and recompute each layer in the backward pass. Use `dataclasses.replace`
for other settings.

Sources: for GPT, MoE and Wide-ResNet, the tables of Alpa's evaluation (arXiv:2201.12023). Alpa's public benchmarks add
these details: heads tied to the embedding, MLPs and experts of 8 times the width, two experts per token, groups of 2048
tokens with a capacity factor of 1, and Wide-ResNet 500M. For GPT-3, table 2.1 of arXiv:2005.14165. Its vocabulary of
50257 is padded to 50304, as MaxText's `gpt3-175b` and MLPerf do. For Mistral 7B, table 1 of arXiv:2310.06825 with what
release 0.2 changed (https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.2): no sliding window, a context of 32k and
a rotary base of 1e6. MaxText's `mistral-7b` is this release, too. For Mixtral 8x7B, table 1 of arXiv:2401.04088. For
Mixtral 8x22B, https://huggingface.co/mistralai/Mixtral-8x22B-Instruct-v0.1, whose vocabulary of 32768 MaxText has, too.
For ViT, table 1 of arXiv:2010.11929, and for Ti and S table 1 of DeiT (arXiv:2012.12877).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from autoshard.models.gpt_config import GPTConfig
from autoshard.models.moe_config import MoEConfig
from autoshard.models.vit import ViTConfig
from autoshard.models.wide_resnet import WideResNetConfig

# Layers as in GPT-3 (arXiv:2005.14165).
_gpt3 = partial(
    GPTConfig,
    context=1024,
    norm="layernorm",
    positions="learned",
    mlp="gelu",
    bias=True,
    remat="full",
    dtype="bfloat16",
)


def _gpt(width: int, layers: int, heads: int) -> GPTConfig:
    return _gpt3(vocab=51_200, width=width, layers=layers, heads=heads)


def _moe(width: int, layers: int, experts: int) -> MoEConfig:
    gpt = _gpt3(vocab=32_000, width=width, layers=layers, heads=16, ffn=8 * width)
    return MoEConfig(gpt, experts=experts, moe_every=2, capacity_factor=1.0, group_size=2048)


ALPA_GPT: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "gpt-125m": _gpt(768, 12, 12),
        "gpt-350m": _gpt(1024, 24, 16),
        "gpt-760m": _gpt(1536, 24, 16),
        "gpt-1.3b": _gpt(2048, 24, 32),
        "gpt-2.6b": _gpt(2560, 32, 32),
        "gpt-6.7b": _gpt(4096, 32, 32),
        "gpt-15b": _gpt(5120, 48, 40),
        "gpt-39b": _gpt(8192, 48, 64),
    }
)
"""GPT at the sizes of Alpa's benchmark (arXiv:2201.12023), by name."""

ALPA_MOE: Mapping[str, MoEConfig] = MappingProxyType(
    {
        "moe-380m": _moe(768, 8, 8),
        "moe-690m": _moe(768, 8, 16),
        "moe-1.3b": _moe(768, 16, 16),
        "moe-2.4b": _moe(1024, 16, 16),
        "moe-10b": _moe(1536, 16, 32),
    }
)
"""Mixtures of experts at the sizes of Alpa's benchmark, by name."""

GPT3: Mapping[str, GPTConfig] = MappingProxyType(
    {"gpt3-175b": _gpt3(vocab=50_304, width=12_288, layers=96, heads=96, context=2048)}
)
"""The largest GPT-3 (arXiv:2005.14165), by name."""

# Layers of Mistral and Mixtral.
_mistral = partial(
    GPTConfig, context=32_768, kv_heads=8, rotary_base=1_000_000.0, tie_head=False, remat="full", dtype="bfloat16"
)

# Losses as in the published configurations, which have no z loss.
_mixtral = partial(MoEConfig, dispatch="dropless", z_weight=0.0)

MISTRAL: Mapping[str, GPTConfig] = MappingProxyType(
    {"mistral-7b": _mistral(vocab=32_000, width=4096, layers=32, heads=32, ffn=14_336)}
)
"""The published size of Mistral, by name."""

MIXTRAL: Mapping[str, MoEConfig] = MappingProxyType(
    {
        "mixtral-8x7b": _mixtral(
            _mistral(vocab=32_000, width=4096, layers=32, heads=32, ffn=14_336), balance_weight=0.02
        ),
        "mixtral-8x22b": _mixtral(
            _mistral(vocab=32_768, width=6144, layers=56, heads=48, ffn=16_384, context=65_536), balance_weight=0.001
        ),
    }
)
"""The published sizes of Mixtral, by name."""

_resnet50 = partial(WideResNetConfig, stages=(3, 4, 6, 3))
_resnet101 = partial(WideResNetConfig, stages=(3, 4, 23, 3))

ALPA_WIDE_RESNET: Mapping[str, WideResNetConfig] = MappingProxyType(
    {
        "wide-resnet-250m": _resnet50(channels=160, width_factor=2),
        "wide-resnet-500m": _resnet50(channels=224, width_factor=2),
        "wide-resnet-1b": _resnet50(channels=320, width_factor=2),
        "wide-resnet-2b": _resnet50(channels=448, width_factor=2),
        "wide-resnet-4b": _resnet50(channels=640, width_factor=2),
        "wide-resnet-6.8b": _resnet50(channels=320, width_factor=16),
        "wide-resnet-13b": _resnet101(channels=320, width_factor=16),
    }
)
"""Wide ResNets at the sizes of Alpa's benchmark, by name."""

_vit = partial(ViTConfig, remat="full", dtype="bfloat16")

VIT: Mapping[str, ViTConfig] = MappingProxyType(
    {
        "vit-ti16": _vit(width=192, layers=12, heads=3),
        "vit-s16": _vit(width=384, layers=12, heads=6),
        "vit-b16": _vit(width=768, layers=12, heads=12),
        "vit-l16": _vit(width=1024, layers=24, heads=16),
        "vit-h14": _vit(width=1280, layers=32, heads=16, patch=14),
    }
)
"""Published sizes of vision transformers, by name."""
