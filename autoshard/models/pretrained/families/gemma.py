"""Gemma 2 and Gemma 3 (text): local and global layers in turn, norms around sublayers, soft caps, scaled embeddings."""

from __future__ import annotations

from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.pretrained.families.config_values import dense_values, rotary_values, window_values
from autoshard.models.pretrained.families.constants import GEMMA2_CAPS
from autoshard.models.pretrained.families.constants import GEMMA3 as GEMMA3_DEFAULTS
from autoshard.models.pretrained.families.family import ROTARY_BUFFERS, Config, Family
from autoshard.models.pretrained.families.llama import LAYER, attention_table, dense_config, ends_table, mlp_table
from autoshard.models.pretrained.tables import Table, stored

# Start of a tensor's name in the text model -> its start in folders of the whole model, with its vision tower: in the
# published folders, and in those that newer versions of transformers write.
PUBLISHED = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NESTED = {"model.": "model.language_model."}
TOWERS = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)


def gemma_config(config: Config, **switches: Any) -> DecoderConfig:
    """Read the fields that the configs of Gemma 2 to 4 share. `switches` are added to them, or replace them."""
    width = config.size("hidden_size")
    bias = config.flag("attention_bias")
    shared = {
        "head_dim": config.size("head_dim", 256),
        "norm_offset": 1.0,
        "post_norms": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "embed_scale": width**0.5,
        "tie_head": config.flag("tie_word_embeddings", True),
        "score_scale": config.positive("query_pre_attn_scalar", 256) ** -0.5,
        "score_cap": config.positive("attn_logit_softcapping", None),
        "logit_cap": config.positive("final_logit_softcapping", None),
    }
    return dense_config(config, **(shared | switches))


def _gemma2(config: Config) -> DecoderConfig:
    config = config.with_defaults(**GEMMA2_CAPS)
    layers = config.count("num_hidden_layers")
    windows = config.windows([(n + 1) % 2 != 0 for n in range(layers)])
    return gemma_config(config, windows=windows)


def _gemma3(config: Config) -> DecoderConfig:
    # transformers does not apply such a cap, and other programs do.
    config.refuse_values(use_bidirectional_attention=False, attn_logit_softcapping=None)
    scaling = config.table("rope_scaling")
    if "type" in scaling and "rope_type" not in scaling:
        raise config.refuse(
            "rope_scaling has type, but no rope_type: transformers ignores such scaling in Gemma 3, and other programs "
            "apply it. Rename type to rope_type, or remove rope_scaling"
        )
    config = config.with_defaults(**GEMMA3_DEFAULTS)
    layers, period = config.count("num_hidden_layers"), config.size("sliding_window_pattern", 6)
    windows = config.windows([(n + 1) % period != 0 for n in range(layers)])
    whole = config.rotary(1_000_000.0, scope="full_attention")
    if "rope_parameters" in config.values:
        local = config.rotary(10_000.0, scope="sliding_attention")
    else:
        local = config.scaled(float(config.number("rope_local_base_freq", 10_000.0)), {})
    kinds = tuple(LayerKind(window, whole if window is None else local) for window in windows)
    return gemma_config(config, kinds=kinds, query_norm=True)


def gemma_table(cfg: DecoderConfig) -> Table:
    """Return the tensors that Gemma 2 to 4 share."""
    norms = {
        "attention_post_norm/scale": stored(LAYER + "post_attention_layernorm.weight", "e -> e"),
        "mlp_norm/scale": stored(LAYER + "pre_feedforward_layernorm.weight", "e -> e"),
        "mlp_post_norm/scale": stored(LAYER + "post_feedforward_layernorm.weight", "e -> e"),
    }
    return ends_table(cfg) | attention_table(cfg) | mlp_table(cfg) | norms


def gemma_values(cfg: DecoderConfig) -> dict[str, Any]:
    """Return the content of a `config.json` of Gemma 2; most keys are also those of Gemma 3 and 4."""
    values = dense_values(cfg, "gemma2")
    activation = values.pop("hidden_act")
    scale = cfg.head_dim**-0.5 if cfg.score_scale is None else cfg.score_scale
    return {
        **values,
        **window_values(cfg),
        "hidden_activation": activation,
        "attention_bias": cfg.qkv_bias,
        "query_pre_attn_scalar": round(scale**-2),  # transformers takes whole numbers only
        "attn_logit_softcapping": cfg.score_cap,
        "final_logit_softcapping": cfg.logit_cap,
    }


def _gemma3_values(cfg: DecoderConfig) -> dict[str, Any]:
    whole, local = (
        next((kind.rotary for kind in cfg.kinds if (kind.window is None) == full and kind.rotary), None)
        for full in (True, False)
    )
    rotary = {} if whole is None else {"rope_scaling": None, **rotary_values(whole)}
    local_base = {} if local is None else {"rope_local_base_freq": local.base}
    return {**gemma_values(cfg), "model_type": "gemma3_text", **rotary, **local_base}


GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM",), _gemma2, gemma_table, values=gemma_values)
GEMMA3 = Family(
    "gemma3",
    ("Gemma3ForCausalLM",),
    _gemma3,
    gemma_table,
    ignored=(*ROTARY_BUFFERS, *TOWERS),
    spellings=(PUBLISHED, NESTED),
    text_of=("Gemma3ForConditionalGeneration",),
    values=_gemma3_values,
)
