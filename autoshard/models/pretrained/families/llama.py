"""Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3: layers of one form, with a few switches."""

from __future__ import annotations

from functools import partial
from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.pretrained.families.config_values import dense_values, window_values
from autoshard.models.pretrained.families.constants import QWEN_LAYERS_WITHOUT_WINDOW, WINDOW
from autoshard.models.pretrained.families.family import Config, Family
from autoshard.models.pretrained.tables import Table, stored

LAYER = "model.layers.{layer}."


def dense_config(
    config: Config, *, windows: list[int | None] | None = None, base: float = 10_000.0, **switches: Any
) -> DecoderConfig:
    """Read what the configs of all these families share.

    Args:
        config: the file.
        windows: the window of each layer; none by default.
        base: the base of rotary positions if the file gives none.
        **switches: further fields of the config.
    """
    config.refuse_values(pretraining_tp=1, attention_dropout=0.0)
    layers = config.count("num_hidden_layers")
    heads, width = (config.size(name) for name in ("num_attention_heads", "hidden_size"))
    rotary = config.rotary(base)
    fields: dict[str, Any] = {
        "vocab": config.size("vocab_size"),
        "width": width,
        "kinds": tuple(LayerKind(window, rotary) for window in windows or [None] * layers),
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads", heads),
        "head_dim": config.size("head_dim", width // heads),
        "ffn": config.size("intermediate_size"),
        "context": config.size("max_position_embeddings"),
        "activation": config.activation("hidden_activation", "hidden_act"),
        "norm_eps": float(config.number("rms_norm_eps")),
        "tie_head": config.flag("tie_word_embeddings"),
        "init_std": float(config.number("initializer_range", 0.02)),
    }
    return DecoderConfig(**(fields | switches))


def _llama(config: Config) -> DecoderConfig:
    bias = config.flag("attention_bias")
    return dense_config(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def _mistral(config: Config) -> DecoderConfig:
    config = config.with_defaults(sliding_window=WINDOW)
    windowed = config.values["sliding_window"] is not None
    return dense_config(config, windows=config.windows([windowed] * config.count("num_hidden_layers")))


def qwen_windows(config: Config, first: int = QWEN_LAYERS_WITHOUT_WINDOW) -> list[int | None]:
    """Return the windows of Qwen's layers: those from `max_window_layers` on have one, if they are used at all.

    `first` is the family's default of `max_window_layers`.
    """
    config = config.with_defaults(sliding_window=WINDOW)
    layers, first = config.count("num_hidden_layers"), config.size("max_window_layers", first, least=0)
    if not config.flag("use_sliding_window") or config.values["sliding_window"] is None:
        return [None] * layers
    return config.windows([n >= first for n in range(layers)])


def _qwen2(config: Config) -> DecoderConfig:
    return dense_config(config, windows=qwen_windows(config), qkv_bias=True)


def _qwen3(config: Config) -> DecoderConfig:
    bias = config.flag("attention_bias")
    return dense_config(config, windows=qwen_windows(config), qkv_bias=bias, output_bias=bias, query_norm=True)


def attention_table(cfg: DecoderConfig) -> dict[str, Any]:
    """Return the tensors of attention, and of the norms before it and before the MLP."""
    own = LAYER + "self_attn."
    table = {
        "attention/wq": stored(own + "q_proj.weight", "(h d) e -> e h d"),
        "attention/wk": stored(own + "k_proj.weight", "(h d) e -> e h d"),
        "attention/wv": stored(own + "v_proj.weight", "(h d) e -> e h d"),
        "attention/wo": stored(own + "o_proj.weight", "e (h d) -> h d e"),
        "attention_norm/scale": stored(LAYER + "input_layernorm.weight", "e -> e"),
        "mlp_norm/scale": stored(LAYER + "post_attention_layernorm.weight", "e -> e"),
    }
    if cfg.qkv_bias:
        table |= {f"attention/b{x}": stored(own + f"{x}_proj.bias", "(h d) -> h d") for x in "qkv"}
    if cfg.output_bias:
        table["attention/bo"] = stored(own + "o_proj.bias", "e -> e")
    if cfg.query_norm:
        table |= {f"attention/{x}_norm/scale": stored(own + f"{x}_norm.weight", "d -> d") for x in "qk"}
    return table


def mlp_table(cfg: DecoderConfig) -> dict[str, Any]:
    """Return the tensors of the gated MLP."""
    own = LAYER + "mlp."
    table = {
        "mlp/w_gate": stored(own + "gate_proj.weight", "f e -> e f"),
        "mlp/w_up": stored(own + "up_proj.weight", "f e -> e f"),
        "mlp/w_down": stored(own + "down_proj.weight", "e f -> f e"),
    }
    if cfg.mlp_bias:
        table |= {f"mlp/b_{x}": stored(own + f"{x}_proj.bias", "f -> f") for x in ("gate", "up", "down")}
    return table


def ends_table(cfg: DecoderConfig) -> dict[str, Any]:
    """Return the tensors before and after the layers."""
    table = {
        "embed": stored("model.embed_tokens.weight", "v e -> v e"),
        "norm/scale": stored("model.norm.weight", "e -> e"),
    }
    return table if cfg.tie_head else {**table, "head": stored("lm_head.weight", "v e -> e v")}


def dense_table(cfg: DecoderConfig) -> Table:
    """Return the tensors of these families."""
    return ends_table(cfg) | attention_table(cfg) | mlp_table(cfg)


def _llama_values(cfg: DecoderConfig) -> dict[str, Any]:
    return {**dense_values(cfg, "llama"), "attention_bias": cfg.qkv_bias, "mlp_bias": cfg.mlp_bias}


def _mistral_values(cfg: DecoderConfig) -> dict[str, Any]:
    return {**dense_values(cfg, "mistral"), "sliding_window": cfg.kinds[0].window}


def qwen_values(cfg: DecoderConfig, model_type: str) -> dict[str, Any]:
    """Undo `dense_config` with `qwen_windows`."""
    shared, windows = {**dense_values(cfg, model_type), "attention_bias": cfg.qkv_bias}, window_values(cfg)
    if "sliding_window" not in windows:
        return {**shared, "use_sliding_window": False}
    first = windows["layer_types"].index("sliding_attention")
    return {**shared, **windows, "use_sliding_window": True, "max_window_layers": first}


LLAMA = Family("llama", ("LlamaForCausalLM",), _llama, dense_table, values=_llama_values)
MISTRAL = Family("mistral", ("MistralForCausalLM",), _mistral, dense_table, values=_mistral_values)
QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), _qwen2, dense_table, values=partial(qwen_values, model_type="qwen2"))
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), _qwen3, dense_table, values=partial(qwen_values, model_type="qwen3"))
