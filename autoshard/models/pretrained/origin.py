"""Where a pretrained model comes from: what is needed to write it back in the form of its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.models.pretrained.families.family import Family


@shown
@dataclass(frozen=True)
class Origin:
    """The family and the config of a model.

    Attributes:
        family: the name of its architecture.
        config: the content of its `config.json`, as text.
        spelling: how its tensors' names are spelled; see `Family.spelled`.
    """

    family: str
    config: str
    spelling: int = 0

    @classmethod
    def of(cls, family: Family, config: Mapping[str, Any]) -> Origin:
        """Return the origin of a folder's model."""
        name = next(name for name in config["architectures"] if name in family.architectures)
        return cls(name, json.dumps(config))

    def values(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return json.loads(self.config)
