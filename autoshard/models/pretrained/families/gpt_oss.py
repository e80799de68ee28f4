"""gpt-oss: local and global layers in turn, sinks, experts with biases and limited gated units."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import ExpertsConfig
from autoshard.models.pretrained.families.config_values import dense_values, expert_values, window_values
from autoshard.models.pretrained.families.constants import GPT_OSS_ROTARY, GPT_OSS_ROTARY_BASE
from autoshard.models.pretrained.families.family import Config, Family
from autoshard.models.pretrained.families.llama import LAYER, attention_table, dense_config, ends_table
from autoshard.models.pretrained.families.mixtures import router_loss
from autoshard.models.pretrained.tables import Table, stored


def _config(config: Config) -> DecoderConfig:
    if not config.rotary_table():
        config = Config({**config.values, "rope_parameters": GPT_OSS_ROTARY}, config.where)
    layers = config.count("num_hidden_layers")
    bias = config.flag("attention_bias", True)
    windows = config.windows([(n + 1) % 2 != 0 for n in range(layers)])
    cfg = dense_config(config, windows=windows, base=GPT_OSS_ROTARY_BASE, qkv_bias=bias, output_bias=bias, sinks=True)
    experts = ExpertsConfig(
        config.count("num_local_experts"),
        config.size("num_experts_per_tok"),
        cfg.ffn,
        bias=True,
        limit=float(config.number("swiglu_limit", 7.0)),
        alpha=float(config.number("swiglu_alpha", 1.702)),
    )
    kinds = tuple(dataclasses.replace(kind, experts=True) for kind in cfg.kinds)
    return dataclasses.replace(cfg, kinds=kinds, experts=experts, router_loss=router_loss(config, 0.001))


def _table(cfg: DecoderConfig) -> Table:
    own = LAYER + "mlp."
    experts = {
        "attention/sinks": stored(LAYER + "self_attn.sinks", "h -> h"),
        "experts/router": stored(own + "router.weight", "x e -> e x"),
        "experts/b_router": stored(own + "router.bias", "x -> x"),
        "experts/w_gate": stored(own + "experts.gate_up_proj", "x e (f part) -> x e f", 0, 2),
        "experts/w_up": stored(own + "experts.gate_up_proj", "x e (f part) -> x e f", 1, 2),
        "experts/w_down": stored(own + "experts.down_proj", "x f e -> x f e"),
        "experts/b_gate": stored(own + "experts.gate_up_proj_bias", "x (f part) -> x f", 0, 2),
        "experts/b_up": stored(own + "experts.gate_up_proj_bias", "x (f part) -> x f", 1, 2),
        "experts/b_down": stored(own + "experts.down_proj_bias", "x e -> x e"),
    }
    return {**ends_table(cfg), **attention_table(cfg), **experts}


def _values(cfg: DecoderConfig) -> dict[str, Any]:
    # transformers has the limit and the factor of the release in its code, so no other ones are written.
    own = {"attention_bias": cfg.qkv_bias, "swiglu_limit": 7.0}
    ffn = {} if cfg.experts is None else {"intermediate_size": cfg.experts.ffn}
    return {
        "rope_scaling": {"rope_type": "default"},  # without a table, the positions of the release would be read
        **dense_values(cfg, "gpt_oss"),
        **window_values(cfg),
        **expert_values(cfg, "num_local_experts"),
        **ffn,
        **own,
    }


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM",), _config, _table, values=_values)
