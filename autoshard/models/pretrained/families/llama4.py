"""Llama 4 (text): dense layers and experts in turn, chunked attention, layers without rotary positions."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import ExpertsConfig, LayerKind
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.decoder.positions.temperature import Temperature
from autoshard.models.pretrained.families.config_values import dense_values, expert_values, rotary_values
from autoshard.models.pretrained.families.constants import (
    LLAMA4_CHUNK,
    LLAMA4_HEAD_DIM,
    LLAMA4_ROTARY_BASE,
    LLAMA4_SCALE,
    LLAMA4_STEP,
    LLAMA4_WITHOUT_ROTARY,
)
from autoshard.models.pretrained.families.family import ROTARY_BUFFERS, Config, Family
from autoshard.models.pretrained.families.llama import LAYER, attention_table, dense_config, ends_table
from autoshard.models.pretrained.tables import Table, stored

# Start of a tensor's name in the text model -> its start in folders of the whole model, with its vision tower.
NESTED = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}


def _config(config: Config) -> DecoderConfig:
    config.refuse_values(router_jitter_noise=0.0, num_experts_per_tok=1)
    bias, ffn = config.flag("attention_bias"), config.size("intermediate_size")
    return dense_config(
        config.with_defaults(head_dim=LLAMA4_HEAD_DIM),
        kinds=_kinds(config),
        ffn=config.size("intermediate_size_mlp"),
        experts=ExpertsConfig(
            config.count("num_local_experts"), 1, ffn, renormalize=False, scoring="sigmoid", shared_ffn=ffn,
            gated_input=True,
        ),
        qkv_bias=bias,
        output_bias=bias,
    )  # fmt: skip


def _kinds(config: Config) -> tuple[LayerKind, ...]:
    layers = config.count("num_hidden_layers")
    interval = config.size("no_rope_layer_interval", LLAMA4_WITHOUT_ROTARY)
    step = config.size("interleave_moe_layer_step", 1)
    # In `no_rope_layers`, 1 marks a layer *with* rotary positions.
    rotated = _numbers(config, "no_rope_layers") or [int((n + 1) % interval != 0) for n in range(layers)]
    if len(rotated) != layers:
        raise config.refuse(f"no_rope_layers has {len(rotated)} entries; it must have one for each of {layers} layers")
    experts = _numbers(config, "moe_layers")
    experts = range(step - 1, layers, step) if experts is None else experts
    if any(not 0 <= number < layers for number in experts):
        raise config.refuse(f"moe_layers is {experts!r}; it must be numbers of layers, below {layers}")
    size = config.values.get("attention_chunk_size", LLAMA4_CHUNK)
    chunk = None if size is None else config.size("attention_chunk_size", LLAMA4_CHUNK)
    rotary = dataclasses.replace(config.rotary(LLAMA4_ROTARY_BASE), interleaved=True)
    with_rotary = LayerKind(rotary=rotary, unit_norm=config.flag("use_qk_norm", True))
    without = LayerKind(rotary=None, temperature=_temperature(config))
    found = []
    for number, (turned, chunked) in enumerate(zip(rotated, _chunked(config, rotated, chunk), strict=True)):
        kind = with_rotary if turned else without
        found.append(dataclasses.replace(kind, experts=number in experts, chunk=chunk if chunked else None))
    return tuple(found)


def _temperature(config: Config) -> Temperature | None:
    # Early configs contain a number instead of true.
    wanted = config.values.get("attn_temperature_tuning", True)
    if not isinstance(wanted, bool | int | None):
        raise config.refuse(f"attn_temperature_tuning is {wanted!r}; it must be true or false")
    if not wanted:
        return None
    return Temperature(float(config.number("attn_scale", LLAMA4_SCALE)), config.size("floor_scale", LLAMA4_STEP))


def _chunked(config: Config, rotated: list[int], chunk: int | None) -> list[bool]:
    """Return for each layer whether it has chunked attention. By default, layers with rotary positions have it."""
    types, known = config.values.get("layer_types"), ("chunked_attention", "full_attention")
    if types is None:
        return [bool(turned) and chunk is not None for turned in rotated]
    if not isinstance(types, list) or len(types) != len(rotated) or any(each not in known for each in types):
        raise config.refuse(f"layer_types must be one of {', '.join(known)} for each of {len(rotated)} layers")
    if chunk is None and known[0] in types:
        raise config.refuse("layer_types has chunked_attention, but attention_chunk_size is null: set it")
    return [each == known[0] for each in types]


def _numbers(config: Config, name: str) -> list[int] | None:
    """Return a list of whole numbers; None if it is missing or null."""
    found = config.values.get(name)
    if found is not None and (not isinstance(found, list) or any(type(n) is not int for n in found)):
        raise config.refuse(f"{name} is {found!r}; it must be a list of whole numbers")
    return found


def _table(cfg: DecoderConfig) -> Table:
    own = LAYER + "feed_forward."
    fused = own + "experts.gate_up_proj"
    table: dict[str, Any] = {
        "experts/router": stored(own + "router.weight", "x e -> e x"),
        "experts/w_gate": stored(fused, "x e (part f) -> x e f", 0, 2),
        "experts/w_up": stored(fused, "x e (part f) -> x e f", 1, 2),
        "experts/w_down": stored(own + "experts.down_proj", "x f e -> x f e"),
    }
    for name, layout in {"gate": "f e -> e f", "up": "f e -> e f", "down": "e f -> f e"}.items():
        table[f"mlp/w_{name}"] = stored(own + f"{name}_proj.weight", layout)
        table[f"experts/shared/w_{name}"] = stored(own + f"shared_expert.{name}_proj.weight", layout)
    return {**ends_table(cfg), **attention_table(cfg), **table}


def _values(cfg: DecoderConfig) -> dict[str, Any]:
    values = dense_values(cfg, "llama4_text") | expert_values(cfg, "num_local_experts")
    rotary = next((kind.rotary for kind in cfg.kinds if kind.rotary is not None), Rotary())
    chunk = next((kind.chunk for kind in cfg.kinds if kind.chunk is not None), None)
    tuned = next((kind.temperature for kind in cfg.kinds if kind.temperature is not None), None)
    values |= {
        **rotary_values(rotary),
        "attention_bias": cfg.qkv_bias,
        "intermediate_size": cfg.ffn if cfg.experts is None else cfg.experts.ffn,
        "intermediate_size_mlp": cfg.ffn,
        "moe_layers": [number for number, kind in enumerate(cfg.kinds) if kind.experts],
        "no_rope_layers": [int(kind.rotary is not None) for kind in cfg.kinds],
        "layer_types": ["full_attention" if kind.chunk is None else "chunked_attention" for kind in cfg.kinds],
        "attention_chunk_size": chunk,
        "use_qk_norm": any(kind.unit_norm for kind in cfg.kinds),
        "attn_temperature_tuning": tuned is not None,
    }
    return values if tuned is None else {**values, "attn_scale": tuned.scale, "floor_scale": tuned.step}


LLAMA4 = Family(
    "llama4",
    ("Llama4ForCausalLM",),
    _config,
    _table,
    ignored=(*ROTARY_BUFFERS, r"vision_model\..*", r"multi_modal_projector\..*"),
    spellings=(NESTED,),
    text_of=("Llama4ForConditionalGeneration",),
    values=_values,
)
