"""`autoshard train`."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.commands.settings import read_settings
from autoshard.train.config.train_config import TrainConfig

_DESCRIPTION = """Train a model on text, under a plan.

example: autoshard train --preset quick --data FILE.txt --steps 500 --plan fsdp:8 --run-dir runs/mine

A run that SIGTERM stopped is saved, and exits with code 75: start it again with --resume.

Settings come from --preset, then --config FILE.toml, then the options."""


def run(arguments: Sequence[str]) -> int:
    """Train; see `autoshard train --help`.

    Returns:
        0; 75 where SIGTERM stopped it or another process was lost: start it again with --resume; 130 after Ctrl-C.
    """
    config = read_settings(arguments, TrainConfig, "train", _DESCRIPTION)
    import jax

    from autoshard._processes import MissingProcessError
    from autoshard.train.run.loop import train
    from autoshard.train.run.watchdog import RESTART, give_up, is_lost_peer

    try:
        stopped_by = train(config).interrupted_by
    except MissingProcessError as error:
        give_up(str(error))
    except jax.errors.JaxRuntimeError as error:
        if not is_lost_peer(error):
            raise
        give_up(f"another process was lost: {str(error).splitlines()[0][:300]}")
    return 0 if stopped_by is None else RESTART if "SIGTERM" in stopped_by else 130
