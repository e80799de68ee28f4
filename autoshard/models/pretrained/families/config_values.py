"""The content of a `config.json` for a `Decoder` that was made here: what the readers of the families undo.

Keys have the names of the published releases, which old and new versions of `transformers` read. A family's `values`
need not check whether the family can have such a config: `fresh.fitting_family` reads them again and compares.
"""

from __future__ import annotations

import math
from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.positions.rotary import Rotary

ACTIVATION_NAMES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
}
"""The names of activations in a `config.json`."""
TOKENS: dict[str, None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
"""A decoder does not know special tokens. Without these keys, readers take those of the first release."""


def exact(value: float) -> float:
    """Undo the rounding errors of a float64 that was computed from a number with few digits.

    >>> exact(0.1 + 0.2)
    0.3
    """
    return float(f"{value:.12g}")


def dense_values(cfg: DecoderConfig, model_type: str) -> dict[str, Any]:
    """Return what the configs of most families share; see `llama.dense_config`. `transformers` reads the type."""
    return {
        "model_type": model_type,
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn,
        "max_position_embeddings": cfg.context,
        "hidden_act": ACTIVATION_NAMES[cfg.activation],
        "rms_norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_head,
        **rotary_values(cfg.kinds[0].rotary or Rotary()),
        **TOKENS,
    }


def rotary_values(rotary: Rotary) -> dict[str, Any]:
    """Return the base of rotary positions and how they are scaled."""
    found: dict[str, Any] = {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = rotary.original_context
    if rotary.scaling == "llama3":
        found |= {"low_freq_factor": rotary.low, "high_freq_factor": rotary.high}
    if rotary.scaling == "yarn":
        found |= {"beta_fast": rotary.beta_fast, "beta_slow": rotary.beta_slow, "truncate": rotary.truncate}
        found |= {} if rotary.attention_factor is None else {"attention_factor": rotary.attention_factor}
    return {"rope_theta": rotary.base} | ({} if rotary.scaling == "none" else {"rope_scaling": found})


def scaled_scores(cfg: DecoderConfig, rotary: Rotary) -> dict[str, float]:
    """Return DeepSeek's `mscale` and `mscale_all_dim`: the factors of attention scores beyond the first context."""
    dims = cfg.head_dim
    scale = dims**-0.5 if cfg.score_scale is None else cfg.score_scale
    if rotary.scaling != "yarn" or rotary.factor <= 1 or math.isclose(scale, dims**-0.5):
        return {}
    of_all = math.sqrt(scale * math.sqrt(dims))
    of_one = of_all * rotary.magnitude
    one, every = (exact((magnitude - 1.0) / (0.1 * math.log(rotary.factor))) for magnitude in (of_one, of_all))
    return {"mscale": one, "mscale_all_dim": every}


def window_values(cfg: DecoderConfig) -> dict[str, Any]:
    """Return the window, and which layers have it."""
    types = ["full_attention" if kind.window is None else "sliding_attention" for kind in cfg.kinds]
    window = next((kind.window for kind in cfg.kinds if kind.window is not None), None)
    return {"layer_types": types} | ({} if window is None else {"sliding_window": window})


def expert_values(cfg: DecoderConfig, count: str) -> dict[str, Any]:
    """Return what the configs of families with experts share. `count` is the key of the number of experts."""
    experts = cfg.experts
    if experts is None:
        return {}
    found = {count: experts.experts, "num_experts_per_tok": experts.top_k}
    if not cfg.router_loss:
        return found
    return {**found, "output_router_logits": True, "router_aux_loss_coef": cfg.router_loss}
