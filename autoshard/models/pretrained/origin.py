"""The origin of a pretrained model: the facts that are needed to write it back in the form of its family."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from autoshard._shown import shown
from autoshard.models.pretrained.families.family import Family
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.quantized.schemes import QUANTIZATION


@shown
@dataclass(frozen=True)
class Origin:
    """The family and the config of a model.

    Attributes:
        family: the name of its architecture.
        config: the content of its `config.json`, as text.
        spelling: how its tensors' names are spelled; see `Family.spelled`.
        text_of: the architecture of the model with towers whose text model this is; empty for other models. The text
            model is saved as a model of its own.
        quantized: whether its tensors are quantized. They are written back with the scales of the folder.
        copied: regular expressions of the names of tensors that are copied from the folder; see `Family.copied`.
        folder: the folder, if saving the model reads its scales or copies tensors.
    """

    family: str
    config: str
    spelling: int = 0
    text_of: str = ""
    quantized: bool = False
    copied: tuple[str, ...] = ()
    folder: str | None = None

    @classmethod
    def of(cls, family: Family, folder: Folder) -> Origin:
        """Return the origin of a folder's model, without the tensors to copy; `with_tensors` adds these."""
        config = folder.config
        name = next(name for name in config["architectures"] if name in family.architectures)
        # A text model is saved under other names than those of its codes and scales in the whole model's folder.
        quantized = bool(config.get(QUANTIZATION)) and not folder.text_of
        place = str(folder.path.absolute()) if quantized else None
        return cls(name, json.dumps(config), text_of=folder.text_of, quantized=quantized, folder=place)

    def with_tensors(self, folder: Folder, spelling: int, copied: Iterable[str]) -> Origin:
        """Return the same with the spelling of the folder's tensors, and the patterns of those that are copied."""
        copied = tuple(copied)
        place = str(folder.path.absolute()) if copied else self.folder
        return replace(self, spelling=spelling, copied=copied, folder=place)

    @property
    def written_spelling(self) -> int:
        """The spelling of the tensors' names in a saved folder; see `Family.spelled`."""
        return 0 if self.text_of else self.spelling

    def values(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return json.loads(self.config)
