"""Llama 1, 2, 3 and 3.1 as configurations of `GPT`.

The models have RMSNorm, rotary positions, SwiGLU, no biases and an untied head. Llama 2 70B, Llama 3 and Llama 3.1 have
grouped queries. They compute in bfloat16 with float32 parameters. Attention is blockwise, as the context is at least
2048.

Sources: Llama 1, table 2 of arXiv:2302.13971; Llama 2, table 1 of arXiv:2307.09288; Llama 3 and 3.1, table 3 of
arXiv:2407.21783 and https://github.com/meta-llama/llama-models (`models/sku_list.py`). Llama 3 has the context of the
first release, Llama 3.1 that of the second, 128k. Llama 3.1 also scales its rotary frequencies. `GPTConfig` has no such
scaling, so it is left out: it changes the angles of the rotation, not the operators, their shapes or the parameters.
The hidden sizes of the MLPs are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from autoshard.models.gpt_config import GPTConfig

_llama = partial(GPTConfig, tie_head=False, remat="full", dtype="bfloat16")
_llama1 = partial(_llama, vocab=32_000, context=2048, norm_eps=1e-6)
_llama2 = partial(_llama, vocab=32_000, context=4096)
_llama3 = partial(_llama, vocab=128_256, context=8192, kv_heads=8, rotary_base=500_000.0)
_llama31 = partial(_llama3, context=131_072)

LLAMA: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "llama-7b": _llama1(width=4096, layers=32, heads=32, ffn=11_008),
        "llama-13b": _llama1(width=5120, layers=40, heads=40, ffn=13_824),
        "llama-33b": _llama1(width=6656, layers=60, heads=52, ffn=17_920),
        "llama-65b": _llama1(width=8192, layers=80, heads=64, ffn=22_016),
        "llama2-7b": _llama2(width=4096, layers=32, heads=32, ffn=11_008),
        "llama2-13b": _llama2(width=5120, layers=40, heads=40, ffn=13_824),
        "llama2-70b": _llama2(width=8192, layers=80, heads=64, kv_heads=8, ffn=28_672),
        "llama3-8b": _llama3(width=4096, layers=32, heads=32, ffn=14_336),
        "llama3-70b": _llama3(width=8192, layers=80, heads=64, ffn=28_672),
        "llama3.1-8b": _llama31(width=4096, layers=32, heads=32, ffn=14_336),
        "llama3.1-70b": _llama31(width=8192, layers=80, heads=64, ffn=28_672),
        "llama3.1-405b": _llama31(width=16_384, layers=126, heads=128, ffn=53_248),
    }
)
"""The published sizes of LLaMA, Llama 2, Llama 3 and Llama 3.1, by name."""
"""The published sizes. Use `dataclasses.replace` for other settings."""
