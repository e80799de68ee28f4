"""Full-state checkpoints on Orbax: digests per leaf, strict restores, any mesh to any mesh."""

if __name__ != "autoshard.ckpt":  # through the link at the root: no second copy may come to be
    raise ImportError("'ckpt' at the root is only a link: import autoshard.ckpt instead")

from autoshard.ckpt.checkpointer import Checkpointer
from autoshard.ckpt.restore.checkpoint_info import Description
from autoshard.ckpt.restore.restore_request import Restored
from autoshard.ckpt.store.retention import Every, Keep
from autoshard.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError, MismatchError, RemovedStepError

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpointer",
    "DamagedCheckpointError",
    "Description",
    "Every",
    "Keep",
    "MismatchError",
    "RemovedStepError",
    "Restored",
]
