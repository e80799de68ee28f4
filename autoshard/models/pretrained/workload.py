"""A folder's model as a workload, for planning. Only its `config.json` is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoshard.models.decoder.config_changes import with_changes
from autoshard.models.pretrained.families import family_of
from autoshard.models.pretrained.folder import CONFIG, Folder, stored_dtype
from autoshard.models.workloads import Workload

ROWS, POSITIONS = 128, 8192  # the batch of a workload of this size; chosen, as those of the named workloads


def folder_workload(path: Any) -> Workload:
    """Return the workload of a folder: its model, with parameters of the stored dtype, on sequences of at most 8192.

    Args:
        path: a folder with a `config.json`, or that file.

    Raises:
        AutoshardError: the architecture or a feature of the config is not known.
    """
    path = Path(path)
    folder = Folder.open(path.parent if path.name == CONFIG else path)
    values = folder.values
    with values.naming():
        config = family_of(folder.config, values.where).config(values)
    dtype = stored_dtype(folder.config)
    changes = {"dtype": dtype, "param_dtype": dtype}
    if hasattr(config, "context"):
        changes["context"] = min(config.context, POSITIONS)
    config = with_changes(config, changes)
    return Workload(folder.path.resolve().name, config, ROWS)
