"""The families of pretrained models, by the architecture in their `config.json`.

A package adds a family of its own by an entry point of the group `autoshard.families`, which names a `Family`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.models.pretrained.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from autoshard.models.pretrained.families.family import Family
from autoshard.models.pretrained.families.gemma import GEMMA2, GEMMA3
from autoshard.models.pretrained.families.gemma4 import GEMMA4
from autoshard.models.pretrained.families.gpt2 import GPT2
from autoshard.models.pretrained.families.gpt_oss import GPT_OSS
from autoshard.models.pretrained.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from autoshard.models.pretrained.families.llama4 import LLAMA4
from autoshard.models.pretrained.families.mixtures import MIXTRAL, QWEN3_MOE
from autoshard.models.pretrained.families.qwen_vl import QWEN2_5_VL, QWEN2_VL
from autoshard.models.pretrained.families.vit import VIT

GROUP = "autoshard.families"
BUILT_IN = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GPT2, QWEN2_VL,
    QWEN2_5_VL, VIT, LLAMA4, GEMMA4,
)  # fmt: skip

SHARED = (
    "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "transformers_version", "eos_token_id",
)  # fmt: skip
"""Keys of a whole model's config that its text model inherits unless the text model's config has them."""

__all__ = ["Family", "family_of", "known_families", "text_config"]


@cache
def known_families() -> Mapping[str, Family]:
    """Return all families by architecture: the built-in ones, and those of entry points, which take precedence."""
    found = {}
    for family in BUILT_IN:
        found |= dict.fromkeys(family.architectures, family)
    for entry in entry_points(group=GROUP):
        family = entry.load()
        if not isinstance(family, Family):
            raise AutoshardError(
                f"the entry point {entry.name!r} ({entry.value}) of {GROUP} is a {type(family).__name__}; it must name "
                "an autoshard.models.pretrained.Family"
            )
        found |= dict.fromkeys(family.architectures, family)
    return found


def text_config(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the config of the text model of a model with towers; None for other models.

    Raises:
        AutoshardError: the text model has no config.
    """
    known = known_families()
    names = config.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    family = next((each for each in known.values() if not set(names).isdisjoint(each.text_of)), None)
    if family is None or not known.keys().isdisjoint(names):
        return None
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise AutoshardError(f"{where}: text_config is {inner!r}; it must be a table")
    shared = {key: config[key] for key in SHARED if key in config}
    return {**shared, **inner, "architectures": [family.architectures[0]]}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a `config.json`.

    Raises:
        AutoshardError: there is no known architecture in it; the message lists the known ones.
    """
    known = known_families()
    listed = ", ".join(sorted({*known, *(name for family in known.values() for name in family.text_of)}))
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise AutoshardError(f"{where} names no architectures; the known ones are {listed}")
    for name in names:
        if name in known:
            return known[name]
    near = difflib.get_close_matches(str(names[0]), known, n=2)
    guess = f" Near ones: {', '.join(near)}." if near else ""
    raise AutoshardError(
        f"{where}: the architecture {names[0]!r} is not known.{guess} Known are {listed}; add a "
        f"family of your own by an entry point of the group {GROUP}"
    )
