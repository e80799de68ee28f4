"""Finds a family that a `Decoder` belongs to.

Each family writes the decoder's config as a `config.json` and reads that again. The decoder belongs to the family if
both configs are the same, up to rounding and up to fields that change how the model runs, not what it computes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.pretrained.families import known_families
from autoshard.models.pretrained.families.family import Config, Family
from autoshard.models.pretrained.origin import Origin

HOW = ("scan_layers", "remat", "attention", "block_size", "loss_chunks", "dtype", "param_dtype")
"""Fields of a `DecoderConfig` that no `config.json` has."""
SHOWN = 4  # differences that a message names; chosen


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
    misfits: dict[str, list[str]] = {}
    for name in writers if family is None else [family]:
        architecture, one = writers[name]
        values = {"architectures": [architecture], **one.values(cfg)}  # pyright: ignore[reportOptionalCall]
        if not (found := _misfits(one, cfg, values)):
            return Origin(architecture, json.dumps(values))
        misfits[name] = found
    nearest = min(misfits, key=lambda name: len(misfits[name]))
    found = misfits[nearest]
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    which = "no family has" if family is None else f"the family {family!r} does not have"
    near = f" The nearest is {nearest!r}." if family is None else ""
    raise AutoshardError(
        f"save_pretrained: {which} a model with this config.{near} There, {'; '.join(found[:SHOWN])}{more}. Change the "
        "config, or add a family of your own by an entry point (docs/pretrained.md)"
    )


def _misfits(family: Family, cfg: DecoderConfig, values: Mapping[str, Any]) -> list[str]:
    """Return how the family reads a config differently, in words; empty if the model belongs to the family."""
    try:
        found = family.config(Config(values, "config.json"))
    except (AutoshardError, ValueError) as error:
        return [str(error)]
    own, read = _compared(cfg), _compared(replace(found, **{name: getattr(cfg, name) for name in HOW}))
    return [
        f"{name} is {read[name]}, here {own[name]}" for name in own if name in read and not _same(own[name], read[name])
    ]


def _compared(cfg: DecoderConfig) -> dict[str, Any]:
    """Return the fields that two configs must have in common, by name. Those of layers are `kinds[0].window`, ..."""
    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    fields["score_scale"] = cfg.head_dim**-0.5 if cfg.score_scale is None else cfg.score_scale
    if all(kind.experts for kind in cfg.kinds):
        del fields["ffn"]  # of an MLP that no layer has
    kinds = fields.pop("kinds")
    found = _flat(fields) | {"layers": len(kinds)}
    for n, kind in enumerate(kinds):
        rotary = None if kind.rotary is None else replace(kind.rotary, attention_factor=kind.rotary.magnitude)
        found |= _flat({f"kinds[{n}]": replace(kind, rotary=rotary)})
    return found


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with those of dataclasses among them beside these. A dataclass itself becomes its name."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if dataclasses.is_dataclass(value):
            found[name] = type(value).__name__
            found |= _flat({f"{name}.{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)})
        else:
            found[name] = value
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)  # well above rounding in float64
    return a == b
