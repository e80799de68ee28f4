"""The settings of instruction data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RowsConfig:
    """How rows of instruction data become batches."""

    pack: bool = True
    """Whether documents share a row of a batch. They do not see each other. Pairs of answers are never packed."""
    held_out: Path | None = None
    """Rows for evaluation, as --data. Default: the validation or test split of a folder that `datasets` saved, or else
    about one row in 20."""
