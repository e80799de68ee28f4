"""`autoshard train`: train a model under a plan, or resume a run."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.commands.settings import read_settings
from autoshard.train.config.train_config import TrainConfig

_DESCRIPTION = """Train a model on text, under a plan.

example: autoshard train --preset quick --data FILE.txt --steps 500 --plan fsdp:8 --run-dir runs/mine

On SIGTERM the run saves a checkpoint and exits with code 75: start it again with --resume.

Settings come from --preset, then from --config FILE.toml, then from the options; later ones take precedence.
With --resume they come from the stored run first. The command line that started a run, plus --resume, resumes it."""


def run(arguments: Sequence[str]) -> int:
    """Train; see `autoshard train --help`.

    Returns:
        0 after the last step; 130 after Ctrl-C; 75 after SIGTERM or a cloud's notice, or if another process was lost.
        After 75 the run can be started again with --resume.
    """
    config = read_settings(arguments, TrainConfig, "train", _DESCRIPTION)
    import jax

    from autoshard._processes import EXIT_RESTART, MissingProcessError
    from autoshard.train.run.loop import train
    from autoshard.train.run.watchdog import exit_for_restart, is_lost_peer

    try:
        stopped_by = train(config).interrupted_by
    except MissingProcessError as error:
        exit_for_restart(str(error))
    except jax.errors.JaxRuntimeError as error:
        if not is_lost_peer(error):
            raise
        exit_for_restart(f"another process was lost: {str(error).splitlines()[0][:300]}")
    return 0 if stopped_by is None else 130 if "SIGINT" in stopped_by else EXIT_RESTART
