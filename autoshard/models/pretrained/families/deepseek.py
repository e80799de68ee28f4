"""DeepSeek-V2 and V3: latent attention, shared experts, choices limited to groups of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import ExpertsConfig, LatentConfig
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.pretrained.families.config_values import dense_values, expert_values, scaled_scores
from autoshard.models.pretrained.families.constants import DEEPSEEK_V3_DENSE, DEEPSEEK_V3_SCALE
from autoshard.models.pretrained.families.family import Config, Family, magnitude
from autoshard.models.pretrained.families.llama import LAYER, dense_config, ends_table, mlp_table
from autoshard.models.pretrained.families.mixtures import experts_table
from autoshard.models.pretrained.tables import Table, stored


def _shared(config: Config, experts: ExpertsConfig) -> DecoderConfig:
    rank = config.values.get("q_lora_rank")
    latent = LatentConfig(
        config.size("kv_lora_rank"),
        config.size("qk_nope_head_dim"),
        config.size("qk_rope_head_dim"),
        config.size("v_head_dim"),
        None if rank is None else config.size("q_lora_rank"),
    )
    bias = config.flag("attention_bias")
    rotary, factor = _rotary(config)
    dense = int(config.number("first_k_dense_replace", 0))
    cfg = dense_config(
        config,
        latent=latent,
        head_dim=latent.plain_dim + latent.rotary_dim,
        qkv_bias=bias,
        output_bias=bias,
        score_scale=(latent.plain_dim + latent.rotary_dim) ** -0.5 * factor**2,
        mlp_bias=config.flag("mlp_bias"),
    )
    kinds = tuple(dataclasses.replace(kind, rotary=rotary, experts=n >= dense) for n, kind in enumerate(cfg.kinds))
    return dataclasses.replace(cfg, kinds=kinds, experts=experts)


def _rotary(config: Config) -> tuple[Rotary, float]:
    """Return the rotary positions, and the factor by which queries and keys are scaled in longer contexts."""
    rotary = dataclasses.replace(config.rotary(), interleaved=config.flag("rope_interleave", True))
    if rotary.scaling != "yarn":
        return rotary, 1.0
    weight = Config(config.rotary_table(), f"{config.where}, rotary positions").number("mscale_all_dim", 0.0)
    return rotary, magnitude(rotary.factor, weight) if weight else 1.0


def _v2(config: Config) -> DecoderConfig:
    config.refuse_values(scoring_func="softmax", moe_layer_freq=1, norm_topk_prob=False)
    method = config.values.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse(f"topk_method is {method!r}; built are greedy and group_limited_greedy")
    grouped = method == "group_limited_greedy"
    return _shared(
        config,
        ExpertsConfig(
            config.count("n_routed_experts"),
            config.size("num_experts_per_tok"),
            config.size("moe_intermediate_size"),
            renormalize=False,
            groups=config.size("n_group") if grouped else 1,
            top_groups=config.size("topk_group") if grouped else 1,
            scale=float(config.number("routed_scaling_factor", 1.0)),
            shared_ffn=config.size("n_shared_experts") * config.size("moe_intermediate_size"),
        ),
    )


def _v3(config: Config) -> DecoderConfig:
    config.refuse_values(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    config = config.with_defaults(routed_scaling_factor=DEEPSEEK_V3_SCALE, first_k_dense_replace=DEEPSEEK_V3_DENSE)
    return _shared(
        config,
        ExpertsConfig(
            config.count("n_routed_experts"),
            config.size("num_experts_per_tok"),
            config.size("moe_intermediate_size"),
            renormalize=config.flag("norm_topk_prob", True),
            scoring="sigmoid",
            groups=config.size("n_group"),
            top_groups=config.size("topk_group"),
            group_best=2,
            choice_bias=True,
            scale=float(config.number("routed_scaling_factor", 1.0)),
            shared_ffn=config.size("n_shared_experts") * config.size("moe_intermediate_size"),
        ),
    )


def _table(cfg: DecoderConfig) -> Table:
    own = LAYER + "self_attn."
    assert cfg.experts is not None
    table = {
        "attention/wkv_down": stored(own + "kv_a_proj_with_mqa.weight", "r e -> e r"),
        "attention/kv_norm/scale": stored(own + "kv_a_layernorm.weight", "r -> r"),
        "attention/wkv_up": stored(own + "kv_b_proj.weight", "(h d) r -> r h d"),
        "attention/wo": stored(own + "o_proj.weight", "e (h d) -> h d e"),
        "attention/wq": stored(own + "q_proj.weight", "(h d) e -> e h d"),
        "attention/wq_down": stored(own + "q_a_proj.weight", "r e -> e r"),
        "attention/q_norm/scale": stored(own + "q_a_layernorm.weight", "r -> r"),
        "attention/wq_up": stored(own + "q_b_proj.weight", "(h d) r -> r h d"),
        "attention/bq_down": stored(own + "q_a_proj.bias", "r -> r"),
        "attention/bkv_down": stored(own + "kv_a_proj_with_mqa.bias", "r -> r"),
        "attention/bo": stored(own + "o_proj.bias", "e -> e"),
        "attention_norm/scale": stored(LAYER + "input_layernorm.weight", "e -> e"),
        "mlp_norm/scale": stored(LAYER + "post_attention_layernorm.weight", "e -> e"),
        "experts/choice_bias": stored(LAYER + "mlp.gate.e_score_correction_bias", "x -> x"),
    }
    for name in ("gate", "up", "down"):
        layout = "e f -> f e" if name == "down" else "f e -> e f"
        table[f"experts/shared/w_{name}"] = stored(LAYER + f"mlp.shared_experts.{name}_proj.weight", layout)
        table[f"experts/shared/b_{name}"] = stored(LAYER + f"mlp.shared_experts.{name}_proj.bias", "f -> f")
    experts = experts_table("mlp", "gate", "gate_proj", "up_proj", "down_proj")
    return {**ends_table(cfg), **mlp_table(cfg), **experts, **table}


def _shared_values(cfg: DecoderConfig, model_type: str) -> dict[str, Any]:
    """Undo `_shared`. The size of heads is the sum of two others."""
    values, rotary = dense_values(cfg, model_type), cfg.kinds[0].rotary or Rotary()
    del values["head_dim"]
    if scaled := scaled_scores(cfg, rotary):
        values["rope_scaling"] = scaled | {k: v for k, v in values["rope_scaling"].items() if k != "attention_factor"}
    values |= {"attention_bias": cfg.qkv_bias, "mlp_bias": cfg.mlp_bias, "rope_interleave": rotary.interleaved}
    if (latent := cfg.latent) is not None:
        values |= {
            "kv_lora_rank": latent.kv_rank,
            "q_lora_rank": latent.q_rank,
            "qk_nope_head_dim": latent.plain_dim,
            "qk_rope_head_dim": latent.rotary_dim,
            "v_head_dim": latent.value_dim,
        }
    if (experts := cfg.experts) is not None:
        values |= {
            **expert_values(cfg, "n_routed_experts"),
            "moe_intermediate_size": experts.ffn,
            "n_shared_experts": experts.shared_ffn // experts.ffn,
            "routed_scaling_factor": experts.scale,
            "n_group": experts.groups,
            "topk_group": experts.top_groups,
            "first_k_dense_replace": next((n for n, kind in enumerate(cfg.kinds) if kind.experts), cfg.layers),
            "moe_layer_freq": 1,
        }
    return values


def _v2_values(cfg: DecoderConfig) -> dict[str, Any]:
    grouped = cfg.experts is not None and cfg.experts.groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    own = {"scoring_func": "softmax", "topk_method": method, "norm_topk_prob": False}
    return {**_shared_values(cfg, "deepseek_v2"), **own}


def _v3_values(cfg: DecoderConfig) -> dict[str, Any]:
    gates = {} if cfg.experts is None else {"norm_topk_prob": cfg.experts.renormalize}
    own = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return {**_shared_values(cfg, "deepseek_v3"), **gates, **own}


DEEPSEEK_V2 = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), _v2, _table, values=_v2_values)


def _predicting_layers(config: Config) -> dict[str, str]:
    """Return the tensors of the layers behind the last one. They predict further tokens (arXiv:2412.19437, 2.2)."""
    first, default = config.count("num_hidden_layers"), config.count("num_mtp_layers", 1, least=0)
    layers = range(first, first + config.count("num_nextn_predict_layers", default, least=0))
    return {rf"model\.layers\.{n}\..*": f"layer {n}, which predicts one more token" for n in layers}


DEEPSEEK_V3 = Family(
    "deepseek_v3", ("DeepseekV3ForCausalLM",), _v3, _table, copied=_predicting_layers, values=_v3_values
)
