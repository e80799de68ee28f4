"""Mixtral and Qwen3-MoE: experts in place of the MLP, each expert's matrices stored as tensors of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import ExpertsConfig
from autoshard.models.pretrained.families.config_values import dense_values, expert_values
from autoshard.models.pretrained.families.constants import MIXTRAL_ROTARY_BASE, WINDOW
from autoshard.models.pretrained.families.family import Config, Family
from autoshard.models.pretrained.families.llama import (
    LAYER,
    attention_table,
    dense_config,
    ends_table,
    mlp_table,
    qwen_values,
)
from autoshard.models.pretrained.tables import Table, stored


def _mixtral(config: Config) -> DecoderConfig:
    config.refuse_values(router_jitter_noise=0.0)
    windows = _same_window(config, config.values.get("sliding_window") is not None)
    cfg = dense_config(config, windows=windows, base=MIXTRAL_ROTARY_BASE)
    experts = ExpertsConfig(config.count("num_local_experts"), config.size("num_experts_per_tok"), cfg.ffn)
    kinds = tuple(dataclasses.replace(kind, experts=True) for kind in cfg.kinds)
    return dataclasses.replace(cfg, kinds=kinds, experts=experts, router_loss=router_loss(config, 0.001))


def _same_window(config: Config, used: bool) -> list[int | None]:
    """Return the windows of layers that all have the same one, if it is used. Other `layer_types` are refused."""
    same = [config.size("sliding_window") if used else None] * config.count("num_hidden_layers")
    if config.windows([used] * len(same)) != same:
        raise config.refuse("layer_types differ from sliding_window, which all layers have or none: remove layer_types")
    return same


def router_loss(config: Config, default: float) -> float:
    """Return the factor of the loss of the experts' load: as in transformers, 0 unless `output_router_logits` is true.

    `default` is that of the family in transformers.
    """
    return float(config.number("router_aux_loss_coef", default)) if config.flag("output_router_logits") else 0.0


def _qwen3_moe(config: Config) -> DecoderConfig:
    bias = config.flag("attention_bias")
    config = config.with_defaults(sliding_window=WINDOW)
    used = config.flag("use_sliding_window") and config.values["sliding_window"] is not None
    cfg = dense_config(config, windows=_same_window(config, used), qkv_bias=bias, output_bias=bias, query_norm=True)
    count = config.count("num_experts") if "num_experts" in config.values else config.count("num_local_experts")
    experts = ExpertsConfig(
        count,
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size"),
        renormalize=config.flag("norm_topk_prob"),
    )
    step, dense = config.size("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
    kinds = tuple(
        dataclasses.replace(kind, experts=n not in dense and (n + 1) % step == 0) for n, kind in enumerate(cfg.kinds)
    )
    return dataclasses.replace(cfg, kinds=kinds, experts=experts, router_loss=router_loss(config, 0.001))


def experts_table(block: str, router: str, gate: str, up: str, down: str) -> Table:
    """Return the tensors of experts that are stored one by one, and of their router."""
    own = LAYER + block
    each = own + ".experts.{expert}."
    return {
        "experts/router": stored(f"{own}.{router}.weight", "x e -> e x"),
        "experts/w_gate": stored(each + f"{gate}.weight", "f e -> e f"),
        "experts/w_up": stored(each + f"{up}.weight", "f e -> e f"),
        "experts/w_down": stored(each + f"{down}.weight", "e f -> f e"),
    }


def _mixtral_table(cfg: DecoderConfig) -> Table:
    return {**ends_table(cfg), **attention_table(cfg), **experts_table("block_sparse_moe", "gate", "w1", "w3", "w2")}


def _qwen3_moe_table(cfg: DecoderConfig) -> Table:
    experts = experts_table("mlp", "gate", "gate_proj", "up_proj", "down_proj")
    return {**ends_table(cfg), **attention_table(cfg), **mlp_table(cfg), **experts}


def _mixtral_values(cfg: DecoderConfig) -> dict[str, Any]:
    ffn = {} if cfg.experts is None else {"intermediate_size": cfg.experts.ffn}
    window = {"sliding_window": cfg.kinds[0].window}
    return {**dense_values(cfg, "mixtral"), **window, **expert_values(cfg, "num_local_experts"), **ffn}


def _qwen3_moe_values(cfg: DecoderConfig) -> dict[str, Any]:
    dense = [n for n, kind in enumerate(cfg.kinds) if not kind.experts]
    own = {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if cfg.experts is not None:
        own |= {"moe_intermediate_size": cfg.experts.ffn, "norm_topk_prob": cfg.experts.renormalize}
    return {**qwen_values(cfg, "qwen3_moe"), **expert_values(cfg, "num_experts"), **own}


MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), _mixtral, _mixtral_table, values=_mixtral_values)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _qwen3_moe, _qwen3_moe_table, values=_qwen3_moe_values)
