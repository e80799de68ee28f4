"""Gemma 4 (text): heads of two sizes, lent keys and values, and vectors of each token for each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.kinds import LayerInputsConfig, LayerKind
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.pretrained.families.config_values import rotary_values
from autoshard.models.pretrained.families.constants import (
    GEMMA4_LAYER_WIDTH,
    GEMMA4_PERIOD,
    GEMMA4_ROTARY,
    GEMMA4_TOKENS,
    GEMMA4_WHOLE_HEAD_DIM,
)
from autoshard.models.pretrained.families.family import ROTARY_BUFFERS, Config, Family, decoder_unneeded
from autoshard.models.pretrained.families.gemma import gemma_config, gemma_table, gemma_values
from autoshard.models.pretrained.families.llama import LAYER
from autoshard.models.pretrained.tables import Table, stored

LOCAL, WHOLE = "sliding_attention", "full_attention"
# Start of a tensor's name in the text model -> its start in folders of the whole model, with its towers.
NESTED = {"model.": "model.language_model."}
TOWERS = (r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",)


def _config(config: Config) -> DecoderConfig:
    # Configs of Gemma 4 have no cap of scores, and transformers ignores one.
    config.refuse_values(enable_moe_block=False, attn_logit_softcapping=None)
    # `vision` affects tokens of images only.
    later = config.values.get("use_bidirectional_attention")
    if later not in (None, False, "vision"):
        raise config.refuse(
            f"use_bidirectional_attention is {later!r}; attention to later positions is not built for Gemma 4"
        )
    size = config.size("hidden_size_per_layer_input", GEMMA4_LAYER_WIDTH, least=0)
    inputs = LayerInputsConfig(config.size("vocab_size_per_layer_input", GEMMA4_TOKENS), size) if size else None
    return gemma_config(
        config,
        kinds=_kinds(config),
        norm_offset=0.0,
        query_norm=True,
        value_norm=True,
        score_scale=1.0,
        layer_scale=True,
        layer_inputs=inputs,
    )


def _kinds(config: Config) -> tuple[LayerKind, ...]:
    layers = config.count("num_hidden_layers")
    windows = config.windows([(n + 1) % GEMMA4_PERIOD != 0 for n in range(layers)])
    windows[-1] = None  # as in transformers, whatever the config says
    given = config.values.get("rope_parameters")
    rotary = Config({**config.values, "rope_parameters": given or GEMMA4_ROTARY}, config.where)
    of_type = {LOCAL: rotary.rotary(scope=LOCAL), WHOLE: rotary.rotary(scope=WHOLE)}
    shared = config.size("num_kv_shared_layers", 0, least=0)
    if shared >= layers:
        raise config.refuse(f"num_kv_shared_layers is {shared}; it must be below {layers}, the number of layers")
    types, own = [WHOLE if window is None else LOCAL for window in windows], layers - shared
    wide = 2 * config.size("intermediate_size") if config.flag("use_double_wide_mlp") else None
    if missing := sorted(set(types[own:]) - set(types[:own])):
        raise config.refuse(f"num_kv_shared_layers is {shared}: no layer before the last {shared} has {missing[0]}")
    lenders = {own - 1 - types[:own][::-1].index(each): each for each in set(types[own:])}
    found = []
    for number, (window, type_) in enumerate(zip(windows, types, strict=True)):
        borrows = number >= own
        kind = LayerKind(window, of_type[type_], keys_as_values=_keys_as_values(config, type_) and not borrows)
        kind = dataclasses.replace(kind, **_heads(config, number, type_))
        if borrows:
            kind = dataclasses.replace(kind, borrows=type_, ffn=wide)
        found.append(dataclasses.replace(kind, lends=lenders.get(number, "")))
    return tuple(found)


def _keys_as_values(config: Config, type_: str) -> bool:
    return type_ == WHOLE and config.flag("attention_k_eq_v")


def _heads(config: Config, number: int, type_: str) -> dict[str, int]:
    """Return the sizes of a layer's heads that differ from those of the model.

    Published configs give these sizes once, for all global layers. Configs that transformers writes give them for each
    layer.
    """
    given = config.values.get("per_layer_config")
    if given is None:
        if type_ == LOCAL:
            return {}
        found = {"head_dim": config.size("global_head_dim", GEMMA4_WHOLE_HEAD_DIM)}
        if _keys_as_values(config, type_) and config.values.get("num_global_key_value_heads") is not None:
            found["kv_heads"] = config.size("num_global_key_value_heads")
        return found
    # transformers pads the numbers of layers with zeros, so that they sort.
    own = {key.lstrip("0") or "0": value for key, value in given.items()} if isinstance(given, Mapping) else None
    own = None if own is None else own.get(str(number), {})
    names = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
    if not isinstance(own, Mapping) or own.keys() - names.keys():
        raise config.refuse(f"per_layer_config of layer {number} is {own!r}; it must be a table of {', '.join(names)}")
    where = Config(own, f"{config.where}, per_layer_config of layer {number}")
    return {names[name]: where.size(name) for name in own}


def _table(cfg: DecoderConfig) -> Table:
    return {
        **gemma_table(cfg),
        "scale": stored(LAYER + "layer_scalar", "s -> s"),
        "gate/w_gate": stored(LAYER + "per_layer_input_gate.weight", "w e -> e w"),
        "gate/w_up": stored(LAYER + "per_layer_projection.weight", "e w -> w e"),
        "gate/norm/scale": stored(LAYER + "post_per_layer_input_norm.weight", "e -> e"),
        "layer_inputs/embed": stored("model.embed_tokens_per_layer.weight", "v (l w) -> v l w"),
        "layer_inputs/projection": stored("model.per_layer_model_projection.weight", "(l w) e -> e l w"),
        "layer_inputs/norm/scale": stored("model.per_layer_projection_norm.weight", "w -> w"),
    }


def _unneeded(cfg: DecoderConfig) -> tuple[str, ...]:
    """Return the patterns of tensors that the model does not need.

    Published folders contain weights for keys and values of layers that borrow these.
    """
    borrowing = "|".join(str(number) for number, kind in enumerate(cfg.kinds) if kind.borrows)
    name = rf"model\.(language_model\.)?layers\.({borrowing})\.self_attn\.[kv]_(proj|norm)\.weight"
    return (*decoder_unneeded(cfg), *((name,) if borrowing else ()))


def _values(cfg: DecoderConfig) -> dict[str, Any]:
    kinds = [kind for kind in cfg.kinds if kind.window is None]
    sizes = {
        name: next((size for kind in kinds if (size := getattr(kind, name))), None) for name in ("head_dim", "kv_heads")
    }
    types = {WHOLE: kinds, LOCAL: [kind for kind in cfg.kinds if kind.window is not None]}
    inputs = {} if cfg.layer_inputs is None else {"vocab_size_per_layer_input": cfg.layer_inputs.vocab}
    found = {
        **gemma_values(cfg),
        **inputs,
        "model_type": "gemma4_text",
        "rope_parameters": {name: _rotary_values(kinds[0].rotary) for name, kinds in types.items() if kinds},
        "global_head_dim": sizes["head_dim"] or cfg.head_dim,
        "num_global_key_value_heads": sizes["kv_heads"],
        "attention_k_eq_v": any(kind.keys_as_values for kind in cfg.kinds),
        "num_kv_shared_layers": sum(bool(kind.borrows) for kind in cfg.kinds),
        "use_double_wide_mlp": any(kind.ffn is not None for kind in cfg.kinds),
        "hidden_size_per_layer_input": 0 if cfg.layer_inputs is None else cfg.layer_inputs.width,
    }
    unknown = ("rope_theta", "rope_scaling", "query_pre_attn_scalar", "attn_logit_softcapping")
    return {key: value for key, value in found.items() if key not in unknown}


def _rotary_values(rotary: Rotary | None) -> dict[str, Any]:
    """Return the rotary positions of a type of layer."""
    if rotary is None or rotary.fraction == 1.0:
        values = rotary_values(rotary or Rotary())
        return {"rope_type": "default", **values.pop("rope_scaling", {}), **values}
    found = {"rope_type": "proportional", "rope_theta": rotary.base, "partial_rotary_factor": rotary.fraction}
    return found if rotary.factor == 1.0 else {**found, "factor": rotary.factor}


GEMMA4 = Family(
    "gemma4",
    ("Gemma4ForCausalLM",),
    _config,
    _table,
    ignored=(*ROTARY_BUFFERS, *TOWERS),
    unneeded=_unneeded,
    spellings=(NESTED,),
    text_of=("Gemma4ForConditionalGeneration",),
    values=_values,
)
