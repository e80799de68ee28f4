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
from autoshard.models.pretrained.families.gpt2 import GPT2
from autoshard.models.pretrained.families.gpt_oss import GPT_OSS
from autoshard.models.pretrained.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from autoshard.models.pretrained.families.mixtures import MIXTRAL, QWEN3_MOE
from autoshard.models.pretrained.families.qwen_vl import QWEN2_5_VL, QWEN2_VL
from autoshard.models.pretrained.families.vit import VIT

GROUP = "autoshard.families"
BUILT_IN = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GPT2, QWEN2_VL,
    QWEN2_5_VL, VIT,
)  # fmt: skip

__all__ = ["Family", "family_of", "known_families"]


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


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a `config.json`.

    Raises:
        AutoshardError: there is no known architecture in it; the message lists the known ones.
    """
    known = known_families()
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise AutoshardError(f"{where} names no architectures; the known ones are {', '.join(sorted(known))}")
    for name in names:
        if name in known:
            return known[name]
    near = difflib.get_close_matches(str(names[0]), known, n=2)
    guess = f" Near ones: {', '.join(near)}." if near else ""
    raise AutoshardError(
        f"{where}: the architecture {names[0]!r} is not known.{guess} Known are {', '.join(sorted(known))}; add a "
        f"family of your own by an entry point of the group {GROUP}"
    )
