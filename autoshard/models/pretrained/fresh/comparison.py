"""Compares the config of a `Decoder` with what a family reads from a `config.json`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.errors import AutoshardError
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.pretrained.families.family import Config, Family

RUNTIME = ("scan_layers", "remat", "attention", "block_size", "loss_chunks", "dtype", "param_dtype")
"""Fields that no `config.json` has. They change how the model runs, not what it computes."""
TRAINING = ("context", "router_loss", "init_std")
"""Fields that training may change. A model that is written back keeps those of its folder."""
SHOWN = 4  # differences that a message names; chosen


def misfits(
    family: Family, cfg: DecoderConfig, values: Mapping[str, Any], ignored: Sequence[str] = RUNTIME
) -> list[str]:
    """Return in words how a family reads the content of a `config.json` differently; empty if it reads this config.

    Args:
        family: the family.
        cfg: the config.
        values: the content.
        ignored: fields that may differ.
    """
    try:
        found = family.config(Config(values, "config.json"))
    except (AutoshardError, ValueError) as error:
        return [str(error)]
    own, read = _compared(cfg), _compared(replace(found, **{name: getattr(cfg, name) for name in ignored}))
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
    lenders = {kind.lends: str(n) for n, kind in enumerate(kinds) if kind.lends}  # the names themselves mean nothing
    for n, kind in enumerate(kinds):
        kind = replace(kind, lends=lenders.get(kind.lends, ""), borrows=lenders.get(kind.borrows, kind.borrows))
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


def some_of(differences: Sequence[str]) -> str:
    """Return the first differences, and how many more there are."""
    more = f", and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return "; ".join(differences[:SHOWN]) + more
