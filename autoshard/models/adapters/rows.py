"""The tables of a model with adapters: which stored tensors its weights and adapters are made of.

The names of the adapters' tensors are those of PEFT: A is `[rank, in]` and B `[out, rank]` for a weight `[out, in]`,
and the magnitudes of DoRA are `[out]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.pretrained.families.family import Family
from autoshard.models.pretrained.layouts import PART
from autoshard.models.pretrained.tables import Stored, Table, stored

BASE, A, B, MAGNITUDES = "base", "lora_a", "lora_b", "lora_scale"
PREFIX = "base_model.model."
_WITHIN = re.compile(r"segments/\d+/(?:\d+/)?layers/\d+/(.+)")


def within_layer(path: str) -> str:
    """Return the path of a parameter within its layer; the path itself if it is in no layer.

    >>> within_layer("segments/0/layers/0/attention/wq")
    'attention/wq'
    """
    match = _WITHIN.fullmatch(path)
    return match[1] if match else path


def takes_adapter(row: Stored) -> bool:
    """Return whether a weight can have an adapter: a matrix of a layer that is one tensor, `[out, in]`."""
    groups = row.layout.groups
    is_matrix = len(groups) == 2 and PART not in groups[0] + groups[1]
    inputs_first = is_matrix and row.layout.names == groups[1] + groups[0]
    return inputs_first and "{layer}" in row.name and "{expert}" not in row.name and row.name.endswith(".weight")


def weights_table(family: Family, cfg: DecoderConfig, spelling: int) -> Table:
    """Return the family's table in a spelling, in which weights with an adapter have rows too."""
    table = family.spelled(cfg, spelling)
    return {**table, **{f"{path}/{BASE}": row for path, row in table.items() if takes_adapter(row)}}


def adapters_table(family: Family, cfg: DecoderConfig) -> Mapping[str, Stored]:
    """Return where adapters are stored: the path of each factor within its layer -> the name and layout in PEFT."""
    found: dict[str, Stored] = {}
    for path, row in family.table(cfg).items():
        if takes_adapter(row):
            outputs, inputs = (" ".join(group) for group in row.layout.groups)
            name = PREFIX + row.name.removesuffix("weight")
            found[f"{path}/{A}"] = stored(f"{name}lora_A.weight", f"(rank) ({inputs}) -> {inputs} rank")
            found[f"{path}/{B}"] = stored(f"{name}lora_B.weight", f"({outputs}) (rank) -> rank {outputs}")
            found[f"{path}/{MAGNITUDES}"] = stored(f"{name}lora_magnitude_vector", f"({outputs}) -> {outputs}")
    return found
