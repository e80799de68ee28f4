"""`autoshard plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from autoshard.commands.settings import read_settings
from autoshard.errors import ConfigError
from autoshard.train.config import TrainConfig

_DESCRIPTION = """Show the plan of the train step that `autoshard train` would run with the same options.

example: autoshard plan --preset gpt2-small --target v5e:4x4 --json plan.json

No array is made and no data is read; with --target or --mesh the machine need not be there."""


@dataclasses.dataclass(frozen=True)
class PlanCommand(TrainConfig):
    """The settings of a run, and where its plan is written."""

    json: Path | None = None
    """File to write the plan to, as JSON; - prints it instead of the table."""


def run(arguments: Sequence[str]) -> int:
    """Plan; see `autoshard plan --help`."""
    config = read_settings(arguments, PlanCommand, "plan", _DESCRIPTION)
    plan = plan_train_step(config)
    if config.json == Path("-"):
        print(plan.to_json())
        return 0
    print(plan)
    if config.json is not None:
        try:
            config.json.write_text(plan.to_json())
        except OSError as error:
            raise ConfigError(f"--json {str(config.json)!r} cannot be written: {error.strerror}") from error
    return 0


def plan_train_step(config: TrainConfig):
    """The plan of the config's train step, from shapes only."""
    import autoshard
    from autoshard.train.build import fit_tokenizer, make_program_of, train_step_of
    from autoshard.train.placement import plan_options
    from autoshard.train.step import batch_shapes

    config = fit_tokenizer(config)
    program = make_program_of(config)
    shapes = program.abstract_state(), batch_shapes(config.batch_size, config.gpt.context)
    return autoshard.plan(train_step_of(config, program), *shapes, donate_argnums=0, **plan_options(config))
