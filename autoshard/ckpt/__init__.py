"""Full-state checkpoints on Orbax: digests per leaf, strict restores, any mesh to any mesh."""

if __name__ != "autoshard.ckpt":  # through the link at the root, which would load a second copy
    raise ImportError("'ckpt' at the root is only a link: import autoshard.ckpt instead")

import warnings
from typing import Any

from autoshard.ckpt.checkpointer import Checkpointer
from autoshard.ckpt.restore.checkpoint_info import Description
from autoshard.ckpt.restore.restore_request import Restored
from autoshard.ckpt.store.retention import RetentionPolicy, SaveEvery
from autoshard.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, MismatchError, RemovedStepError

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpointer",
    "DamagedCheckpointError",
    "Description",
    "MismatchError",
    "RemovedStepError",
    "Restored",
    "SaveEvery",
    "RetentionPolicy",
]

_RENAMED = {"Keep": RetentionPolicy, "Every": SaveEvery}  # old names, removed in 0.3


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module 'autoshard.ckpt' has no attribute '{name}'")
    new = _RENAMED[name]
    warnings.warn(f"autoshard.ckpt.{name} is now autoshard.ckpt.{new.__name__}", DeprecationWarning, stacklevel=2)
    return new
