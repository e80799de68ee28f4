"""ViT with a classification head: `models.vit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autoshard.models.pretrained.families.family import Config, Family
from autoshard.models.pretrained.tables import Stacks, Table, stored
from autoshard.models.vit import ViT, ViTConfig

LAYER = "vit.encoder.layer.{layer}."
LABELS = 2  # the number of labels that transformers takes if a config gives none


def _config(config: Config) -> ViTConfig:
    config.refuse_values(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_channels=3, qkv_bias=True)
    labels = config.values.get("id2label")
    activation = config.activation("hidden_act")
    if activation not in ("gelu", "gelu_tanh"):
        raise config.refuse(f"hidden_act is {config.values['hidden_act']!r}; built are gelu and gelu_pytorch_tanh")
    return ViTConfig(
        image_size=config.size("image_size"),
        patch=config.size("patch_size"),
        classes=len(labels) if isinstance(labels, dict) else config.size("num_labels", LABELS),
        layers=config.count("num_hidden_layers"),
        heads=config.size("num_attention_heads"),
        width=config.size("hidden_size"),
        ffn=config.size("intermediate_size"),
        norm_eps=float(config.number("layer_norm_eps", 1e-12)),
        activation=activation,
    )


def _table(cfg: ViTConfig) -> Table:
    table = {
        "patch": stored("vit.embeddings.patch_embeddings.projection.weight", "e c p q -> p q c e"),
        "patch_bias": stored("vit.embeddings.patch_embeddings.projection.bias", "e -> e"),
        "token": stored("vit.embeddings.cls_token", "1 1 e -> e"),
        "position": stored("vit.embeddings.position_embeddings", "1 p e -> p e"),
        "head": stored("classifier.weight", "n e -> e n"),
        "head_bias": stored("classifier.bias", "n -> n"),
        "attention/wo": stored(LAYER + "attention.output.dense.weight", "e (h d) -> h d e"),
        "attention/bo": stored(LAYER + "attention.output.dense.bias", "e -> e"),
        "mlp/w_up": stored(LAYER + "intermediate.dense.weight", "f e -> e f"),
        "mlp/b_up": stored(LAYER + "intermediate.dense.bias", "f -> f"),
        "mlp/w_down": stored(LAYER + "output.dense.weight", "e f -> f e"),
        "mlp/b_down": stored(LAYER + "output.dense.bias", "e -> e"),
    }
    for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
        own = f"{LAYER}attention.attention.{name}."
        table[f"attention/w{short}"] = stored(own + "weight", "(h d) e -> e h d")
        table[f"attention/b{short}"] = stored(own + "bias", "(h d) -> h d")
    before, after = LAYER + "layernorm_before", LAYER + "layernorm_after"
    norms = {"norm": "vit.layernorm", "attention_norm": before, "mlp_norm": after}
    for name, tensor in norms.items():
        table[f"{name}/scale"] = stored(tensor + ".weight", "e -> e")
        table[f"{name}/bias"] = stored(tensor + ".bias", "e -> e")
    return table


def _stacks(cfg: ViTConfig) -> Stacks:
    return {"": (None,) * cfg.layers}


def _unneeded(cfg: ViTConfig) -> tuple[str, ...]:
    return (r"vit\.pooler\..*",)


def _batch(cfg: ViTConfig, batch: tuple[int, int] | None) -> dict[str, Any]:
    rows = batch[0] if batch else 8 * len(jax.devices())
    images = jax.ShapeDtypeStruct((rows, cfg.image_size, cfg.image_size, 3), jnp.float32)
    return {"images": images, "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}


VIT = Family(
    "vit", ("ViTForImageClassification",), _config, _table, model=ViT, stacks=_stacks, unneeded=_unneeded, batch=_batch
)
