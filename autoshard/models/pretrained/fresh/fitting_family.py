"""Finds a family that a `Decoder` belongs to.

Each family writes the decoder's config as a `config.json` and reads that again. The decoder belongs to the family if
both configs are the same, up to rounding and up to fields that change how the model runs, not what it computes.
"""

from __future__ import annotations

import json
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.pretrained.families import known_families
from autoshard.models.pretrained.families.family import Family
from autoshard.models.pretrained.fresh.comparison import misfits, some_of
from autoshard.models.pretrained.origin import Origin


def fresh_origin(model: Any, family: str | None = None) -> Origin:
    """Return the origin of a model that was made here, as if it had been loaded from a folder.

    Args:
        model: the model.
        family: the name of a family; by default the first one that the model belongs to.

    Raises:
        AutoshardError: the model belongs to no family, or not to this one; the message says what differs.
    """
    cfg = getattr(model, "cfg", None)
    writers: dict[str, tuple[str, Family]] = {}
    for architecture, one in known_families().items():
        if one.values is not None:
            writers.setdefault(one.name, (architecture, one))
    if not isinstance(cfg, DecoderConfig):
        raise AutoshardError(
            f"save_pretrained: this {type(model).__name__} was not loaded by load_pretrained, so its config.json is "
            "not known. Of models that were not loaded, only a Decoder can be written"
        )
    if family is not None and family not in writers:
        raise AutoshardError(f"save_pretrained: family is {family!r}; choose one of {', '.join(writers)}")
    by_family: dict[str, list[str]] = {}
    for name in writers if family is None else [family]:
        architecture, one = writers[name]
        values = {"architectures": [architecture], **one.values(cfg)}  # pyright: ignore[reportOptionalCall]
        if not (found := misfits(one, cfg, values)):
            return Origin(architecture, json.dumps(values))
        by_family[name] = found
    nearest = min(by_family, key=lambda name: len(by_family[name]))
    which = "no family has" if family is None else f"the family {family!r} does not have"
    near = f" The nearest is {nearest!r}." if family is None else ""
    raise AutoshardError(
        f"save_pretrained: {which} a model with this config.{near} There, {some_of(by_family[nearest])}. Change the "
        "config, or add a family of your own by an entry point (docs/pretrained.md)"
    )
