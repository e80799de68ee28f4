"""Named workloads for planning, measuring and testing: a model of a published size with a batch.

A plan needs shapes only, so any machine can plan a model of any size. Each kind of model has a small version
(`gpt-tiny`, `llama-tiny`, `moe-tiny`, `mixtral-tiny`, `wide-resnet-tiny`, `vit-tiny`) that trains on a CPU in seconds.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard._shown import shown
from autoshard._typed import convert, fields_of
from autoshard.errors import AutoshardError
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.config_changes import inner_configs
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.decoder.published import DECODERS
from autoshard.models.gpt import GPT
from autoshard.models.gpt_config import GPTConfig
from autoshard.models.llama import LLAMA
from autoshard.models.moe import MoE
from autoshard.models.moe_config import MoEConfig
from autoshard.models.sizes import ALPA_GPT, ALPA_MOE, ALPA_WIDE_RESNET, GPT3, MISTRAL, MIXTRAL, VIT
from autoshard.models.vision.config import VisionLanguageConfig
from autoshard.models.vision.model import VisionLanguage
from autoshard.models.vit import ViT, ViTConfig
from autoshard.models.wide_resnet import WideResNet, WideResNetConfig

Shapes = dict[str, Any]

# The model for each type of config.
_MODELS: Mapping[type, Callable[..., nnx.Module]] = {
    GPTConfig: GPT,
    MoEConfig: MoE,
    DecoderConfig: Decoder,
    WideResNetConfig: WideResNet,
    ViTConfig: ViT,
    VisionLanguageConfig: VisionLanguage,
}


@shown
@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the batch on which it is trained.

    Attributes:
        name: Name of the workload.
        config: Shape and numerics of the model: a `GPTConfig`, `MoEConfig`, `DecoderConfig`, `WideResNetConfig`,
            `ViTConfig` or `VisionLanguageConfig`.
        batch_size: Number of rows in a batch.
    """

    name: str
    config: Any
    batch_size: int

    def __post_init__(self) -> None:
        convert(self.batch_size, int, "batch_size", problems := [])
        if problems or self.batch_size < 1:
            raise AutoshardError(f"{self.name}: batch_size is {self.batch_size!r}; it must be at least 1")

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Make the model, with parameters drawn from the `params` stream of `rngs`."""
        return _MODELS[type(self.config)](self.config, rngs=rngs)

    def batch(self, batch_size: int | None = None) -> Shapes:
        """Return the shapes and dtypes of a batch of `batch_size` rows, by default the workload's own.

        A language model has `inputs`, `targets` and `mask`, each `[batch, context]`. An image model has `images`
        `[batch, size, size, 3]` and `labels [batch]`. A model of both has `inputs`, `targets`, `positions` and
        `images`; see `VisionLanguage`.
        """
        rows, config = self.batch_size if batch_size is None else batch_size, self.config
        if isinstance(config, GPTConfig | MoEConfig | DecoderConfig):
            tokens = jax.ShapeDtypeStruct((rows, config.context), jnp.int32)
            return {"inputs": tokens, "targets": tokens, "mask": jax.ShapeDtypeStruct(tokens.shape, jnp.float32)}
        if isinstance(config, VisionLanguageConfig):
            return config.batch(rows, config.context)
        images = (rows, config.image_size, config.image_size, 3)
        return {
            "images": jax.ShapeDtypeStruct(images, jnp.float32),
            "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def with_(self, *, batch_size: int | None = None, **changes: Any) -> Workload:
        """Return a copy with another batch size or other config fields, including those of a MoE's `gpt`.

        Raises:
            AutoshardError: If the config has no such field, a value has the wrong type, or the batch size is invalid.
            ValueError: If the config rejects a value.

        >>> workload("llama2-7b").with_(context=2048, remat="dots").config.context
        2048
        """
        rows = self.batch_size if batch_size is None else batch_size
        return dataclasses.replace(self, config=_with_changes(self.name, self.config, changes), batch_size=rows)


def workload(name: str) -> Workload:
    """Return the workload with this name.

    Raises:
        AutoshardError: If the name is unknown; the message lists the known names.

    >>> workload("moe-tiny").batch()["inputs"].shape
    (16, 32)
    """
    if name not in WORKLOADS:
        raise AutoshardError(f"unknown model {name!r}{known_names(name, WORKLOADS)}")
    return WORKLOADS[name]


def _with_changes(name: str, config: Any, changes: Mapping[str, Any]) -> Any:
    own, parts = fields_of(type(config)), inner_configs(config)
    inner = {field: kind for part in parts.values() for field, kind in fields_of(type(part)).items()}
    for field in changes:
        if field not in own | inner:
            kind = type(config).__name__
            raise AutoshardError(f"{name}: {kind} has no field {field!r}{known_names(field, [*own, *inner])}")
    problems: list[str] = []
    converted = {field: convert(value, (own | inner)[field][0], field, problems) for field, value in changes.items()}
    if problems:
        raise AutoshardError(f"{name}: {'; '.join(problems)}")
    outer = {field: value for field, value in converted.items() if field in own}
    rest = {field: value for field, value in converted.items() if field not in own}
    for part, value in parts.items():
        if changed := {field: rest[field] for field in rest.keys() & fields_of(type(value)).keys()}:
            outer[part] = dataclasses.replace(outer.get(part, value), **changed)
    return dataclasses.replace(config, **outer)


def known_names(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: similar names, and all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3)
    guess = f". Did you mean {' or '.join(close)}?" if close else "."
    return f"{guess} The known ones are {', '.join(known)}"


_TINY = GPTConfig(vocab=128, layers=2, heads=8, width=64, ffn=128, context=32)
_TINY_IMAGES = {"image_size": 32, "classes": 8, "dtype": "float32"}

# The published contexts of these models are maxima. Their workloads train on shorter sequences, as public recipes do.
_SEQUENCES: Mapping[str, int] = {
    "llama3.1-8b": 8192,
    "llama3.1-70b": 8192,
    "llama3.1-405b": 8192,
    "mistral-7b": 8192,
    "mixtral-8x7b": 4096,
    "mixtral-8x22b": 4096,
    **{name: 4096 if config.experts else 8192 for name, config in DECODERS.items()},
}


def _shorter(name: str, config: Any) -> Any:
    return _with_changes(name, config, {"context": _SEQUENCES[name]}) if name in _SEQUENCES else config


# name -> (config, batch size). The batch sizes are chosen, not published.
_CONFIGS: Mapping[str, tuple[Any, int]] = {
    **{name: (config, 128) for name, config in ALPA_GPT.items()},
    **{name: (config, 256) for name, config in GPT3.items()},
    **{name: (_shorter(name, config), 128 if config.width < 8192 else 256) for name, config in LLAMA.items()},
    **{name: (_shorter(name, config), 128) for name, config in MISTRAL.items()},
    **{name: (config, 128) for name, config in ALPA_MOE.items()},
    **{name: (_shorter(name, config), 128) for name, config in MIXTRAL.items()},
    **{name: (_shorter(name, config), 256) for name, config in DECODERS.items()},
    **{name: (config, 256) for name, config in ALPA_WIDE_RESNET.items()},
    **{name: (config, 512) for name, config in VIT.items()},
    "gpt-tiny": (
        dataclasses.replace(_TINY, norm="layernorm", positions="learned", mlp="gelu", bias=True, remat="full"),
        16,
    ),
    "llama-tiny": (
        dataclasses.replace(_TINY, kv_heads=2, tie_head=False, attention="blockwise", block_size=8, remat="full"),
        16,
    ),
    "moe-tiny": (MoEConfig(dataclasses.replace(_TINY, remat="full"), moe_every=2, expert_ffn=64), 16),
    "mixtral-tiny": (MoEConfig(dataclasses.replace(_TINY, kv_heads=2, tie_head=False), dispatch="dropless"), 16),
    "wide-resnet-tiny": (WideResNetConfig(stages=(1, 1), channels=8, **_TINY_IMAGES), 16),
    "vit-tiny": (ViTConfig(patch=8, layers=2, heads=8, width=64, **_TINY_IMAGES), 16),
}

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {name: Workload(name, config, rows) for name, (config, rows) in _CONFIGS.items()}
)
"""All workloads, by name."""
