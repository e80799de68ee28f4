"""GPT-2: LayerNorm, learned positions, an MLP without a gate, biases, and one tensor of queries, keys and values."""

from __future__ import annotations

from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.pretrained.families.config_values import ACTIVATION_NAMES, TOKENS
from autoshard.models.pretrained.families.family import Config, Family, same_layers
from autoshard.models.pretrained.tables import Table, stored

BODY = "transformer."
LAYER = BODY + "h.{layer}."


def _config(config: Config) -> DecoderConfig:
    config.refuse_values(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width, heads = config.size("n_embd"), config.size("n_head")
    if width % heads:
        raise config.refuse(f"n_embd is {width}; it must be a multiple of n_head, {heads}")
    return DecoderConfig(
        vocab=config.size("vocab_size"),
        width=width,
        kinds=same_layers(config.count("n_layer"), rotary=None),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=config.size("n_inner", 4 * width),
        context=config.size("n_positions"),
        learned_positions=True,
        activation=config.activation("activation_function"),
        gated=False,
        norm="layer",
        norm_eps=float(config.number("layer_norm_epsilon", 1e-5)),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        score_scale=None if config.flag("scale_attn_weights", True) else 1.0,
        tie_head=config.flag("tie_word_embeddings", True),
        init_std=float(config.number("initializer_range", 0.02)),
    )


def _table(cfg: DecoderConfig) -> Table:
    table = {
        "embed": stored(BODY + "wte.weight", "v e -> v e"),
        "position": stored(BODY + "wpe.weight", "p e -> p e"),
        "norm/scale": stored(BODY + "ln_f.weight", "e -> e"),
        "norm/bias": stored(BODY + "ln_f.bias", "e -> e"),
        "attention/wo": stored(LAYER + "attn.c_proj.weight", "(h d) e -> h d e"),
        "attention/bo": stored(LAYER + "attn.c_proj.bias", "e -> e"),
        "mlp/w_up": stored(LAYER + "mlp.c_fc.weight", "e f -> e f"),
        "mlp/b_up": stored(LAYER + "mlp.c_fc.bias", "f -> f"),
        "mlp/w_down": stored(LAYER + "mlp.c_proj.weight", "f e -> f e"),
        "mlp/b_down": stored(LAYER + "mlp.c_proj.bias", "e -> e"),
    }
    for part, name in enumerate("qkv"):
        own = LAYER + "attn.c_attn."
        table[f"attention/w{name}"] = stored(own + "weight", "e (part h d) -> e h d", part, 3)
        table[f"attention/b{name}"] = stored(own + "bias", "(part h d) -> h d", part, 3)
    for name, norm in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        table[f"{name}/scale"] = stored(f"{LAYER}{norm}.weight", "e -> e")
        table[f"{name}/bias"] = stored(f"{LAYER}{norm}.bias", "e -> e")
    return table if cfg.tie_head else {**table, "head": stored("lm_head.weight", "v e -> e v")}


def _values(cfg: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": cfg.vocab,
        "n_embd": cfg.width,
        "n_layer": cfg.layers,
        "n_head": cfg.heads,
        "n_inner": cfg.ffn,
        "n_positions": cfg.context,
        "activation_function": ACTIVATION_NAMES[cfg.activation],
        "layer_norm_epsilon": cfg.norm_eps,
        "scale_attn_weights": cfg.score_scale != 1.0,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_head,
        **TOKENS,
    }


GPT2 = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    _config,
    _table,
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
    spellings=({BODY: ""},),
    values=_values,
)
