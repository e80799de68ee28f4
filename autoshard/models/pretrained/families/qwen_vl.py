"""Qwen2-VL and Qwen2.5-VL: Qwen2 with positions of three axes, and a vision tower. Videos are not built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.pretrained.families.constants import QWEN_VL_LAYERS_WITHOUT_WINDOW
from autoshard.models.pretrained.families.family import Config, Family, decoder_stacks, decoder_unneeded
from autoshard.models.pretrained.families.llama import dense_config, dense_table, qwen_windows
from autoshard.models.pretrained.tables import Stacks, Table, stored
from autoshard.models.vision.config import TowerConfig, VisionLanguageConfig
from autoshard.models.vision.model import VisionLanguage

TEXT, VISION = "text/", "vision/"
LAYER = "visual.blocks.{layer}."
IMAGE_TOKEN = 151655  # of the published models, whose configs may leave it out
# transformers keeps the two parts in one module: some folders have the names of its parameters.
NESTED = {"model.": "model.language_model.", "visual.": "model.visual."}


def _inner(config: Config, name: str) -> Config:
    """Return the values of a part of the model. Those of the decoder may be at the top of the file."""
    found = config.values.get(name)
    if found is None and name == "text_config":
        return config
    if not isinstance(found, Mapping):
        raise config.refuse(f"{name} is {found!r}; it must be a table")
    return Config(found, f"{config.where}, {name}")


def _text(config: Config) -> DecoderConfig:
    own = _inner(config, "text_config")
    given = own.rotary_table()
    sections = given.pop("mrope_section", None)
    if not isinstance(sections, list) or len(sections) != 3 or any(not isinstance(n, int) or n < 1 for n in sections):
        raise own.refuse(f"mrope_section is {sections!r}; it must be three whole numbers of at least 1")
    for kind in ("type", "rope_type"):
        if given.get(kind) == "mrope":
            given[kind] = "default"
    tied = config.flag("tie_word_embeddings") or own.flag("tie_word_embeddings")
    plain = Config(
        {**own.values, "rope_parameters": given, "rope_scaling": None, "tie_word_embeddings": tied}, own.where
    )
    cfg = dense_config(plain, windows=qwen_windows(plain, QWEN_VL_LAYERS_WITHOUT_WINDOW), qkv_bias=True)
    rotary = dataclasses.replace(plain.rotary(1_000_000.0), sections=tuple(sections))
    return dataclasses.replace(cfg, kinds=tuple(dataclasses.replace(kind, rotary=rotary) for kind in cfg.kinds))


def _tower(own: Config, width: int, **switches: Any) -> TowerConfig:
    rope = Config(own.rotary_table(), f"{own.where}, rotary positions")
    kind = rope.values.get("rope_type", rope.values.get("type"))
    if kind not in (None, "default", "axial"):  # both names stand for positions of two axes that are not scaled
        raise rope.refuse(f"the type is {kind!r}; scaled positions are not built for a vision tower")
    return TowerConfig(
        width=width,
        layers=own.count("depth"),
        heads=own.size("num_heads"),
        patch=own.size("patch_size", 14),
        frames=own.size("temporal_patch_size", 2),
        channels=own.size("in_channels", 3),
        merge=own.size("spatial_merge_size", 2),
        base=float(rope.number("rope_theta", own.number("rope_theta", 10_000.0))),
        init_std=float(own.number("initializer_range", 0.02)),
        **switches,
    )


def _both(config: Config, vision: TowerConfig) -> VisionLanguageConfig:
    token = int(config.number("image_token_id", IMAGE_TOKEN))
    return VisionLanguageConfig(_text(config), vision, token)


def _qwen2(config: Config) -> VisionLanguageConfig:
    own = _inner(config, "vision_config")
    width = own.size("embed_dim", 1280)
    vision = _tower(
        own,
        width,
        ffn=int(width * own.number("mlp_ratio", 4)),
        out_width=own.size("hidden_size"),
        activation="quick_gelu" if own.values.get("hidden_act") is None else own.activation("hidden_act"),
    )
    return _both(config, vision)


def _qwen2_5(config: Config) -> VisionLanguageConfig:
    own = _inner(config, "vision_config")
    whole = own.values.get("fullatt_block_indexes")
    if not isinstance(whole, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in whole):
        raise own.refuse(f"fullatt_block_indexes is {whole!r}; it must be a list of the numbers of layers")
    vision = _tower(
        own,
        own.size("hidden_size"),
        ffn=own.size("intermediate_size"),
        out_width=own.size("out_hidden_size"),
        activation=own.activation("hidden_act"),
        gated=True,
        norm="rms",
        whole=tuple(whole),
    )
    window = own.size("window_size") // vision.merge // vision.patch
    if window < 1:
        raise own.refuse(f"window_size is {own.values['window_size']}; it must be at least one feature")
    return _both(config, dataclasses.replace(vision, window=window))


def _vision_table(cfg: TowerConfig) -> dict[str, Any]:
    biased = cfg.norm == "layer"
    table = {
        "patch": stored("visual.patch_embed.proj.weight", "e c t p q -> c t p q e"),
        "attention/wo": stored(LAYER + "attn.proj.weight", "e (h d) -> h d e"),
        "attention/bo": stored(LAYER + "attn.proj.bias", "e -> e"),
        "merger/w_in": stored("visual.merger.mlp.0.weight", "f e -> e f"),
        "merger/b_in": stored("visual.merger.mlp.0.bias", "f -> f"),
        "merger/w_out": stored("visual.merger.mlp.2.weight", "f e -> e f"),
        "merger/b_out": stored("visual.merger.mlp.2.bias", "f -> f"),
    }
    for part, name in enumerate("qkv"):
        table[f"attention/w{name}"] = stored(LAYER + "attn.qkv.weight", "(part h d) e -> e h d", part, 3)
        table[f"attention/b{name}"] = stored(LAYER + "attn.qkv.bias", "(part h d) -> h d", part, 3)
    norms = {"attention_norm": LAYER + "norm1", "mlp_norm": LAYER + "norm2", "merger/norm": "visual.merger.ln_q"}
    for name, tensor in norms.items():
        table[f"{name}/scale"] = stored(tensor + ".weight", "e -> e")
        if biased:
            table[f"{name}/bias"] = stored(tensor + ".bias", "e -> e")
    products = (
        {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"} if cfg.gated else {"up": "fc1", "down": "fc2"}
    )
    for name, tensor in products.items():
        table[f"mlp/w_{name}"] = stored(f"{LAYER}mlp.{tensor}.weight", "f e -> e f")
        table[f"mlp/b_{name}"] = stored(f"{LAYER}mlp.{tensor}.bias", "f -> f")
    return table


def _table(cfg: VisionLanguageConfig) -> Table:
    text = {TEXT + path: row for path, row in dense_table(cfg.text).items()}
    return text | {VISION + path: row for path, row in _vision_table(cfg.vision).items()}


def _stacks(cfg: VisionLanguageConfig) -> Stacks:
    return {TEXT: decoder_stacks(cfg.text)[""], VISION: cfg.vision.encoder.kinds}


def _unneeded(cfg: VisionLanguageConfig) -> tuple[str, ...]:
    return decoder_unneeded(cfg.text)


def _batch(cfg: VisionLanguageConfig, batch: tuple[int, int] | None) -> dict[str, Any]:
    return cfg.batch(*(batch or (8 * len(jax.devices()), min(cfg.context, 4096))))


def _family(name: str, architecture: str, config: Any) -> Family:
    return Family(
        name, (architecture,), config, _table, model=VisionLanguage, stacks=_stacks, unneeded=_unneeded, batch=_batch,
        spellings=(NESTED,),
    )  # fmt: skip


QWEN2_VL = _family("qwen2_vl", "Qwen2VLForConditionalGeneration", _qwen2)
QWEN2_5_VL = _family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _qwen2_5)
