"""Command line arguments into a config: preset, then the stored run or TOML file, then the options."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from autoshard.errors import ConfigError
from autoshard.train import rundir
from autoshard.train.config import TrainConfig, from_dict, load_toml, near
from autoshard.train.presets import preset

Command = TypeVar("Command", bound=TrainConfig)


def parse_config(arguments: Sequence[str], kind: type[Command], prog: str, description: str) -> Command:
    """The config that arguments ask for.

    Args:
        arguments: What follows the subcommand.
        kind: `TrainConfig`, or a subclass with options of its own.
        prog: What help calls the command.
        description: What help says first.

    Raises:
        ConfigError: An unknown option, preset or setting, or values that cannot be used.
        SystemExit: `--help`.
    """
    base = kind(**_shallow(_starting_point(arguments)))
    _refuse_unknown(arguments, base)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, default=base, args=list(arguments), prog=prog, description=description)
    except SystemExit as end:
        if end.code:
            raise ConfigError(_one_line(complaint.getvalue())) from end
        raise


def _one_line(box: str) -> str:
    """What a box of tyro's says in its first section, where its complaint is."""
    lines = [line.strip("│ ").rstrip() for line in box.splitlines() if line.startswith("│")]
    first = itertools.takewhile(lambda line: not line.startswith("─"), lines)
    return " ".join(first) or box.strip()


def _shallow(config: TrainConfig) -> dict[str, Any]:
    return {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}


def _starting_point(arguments: Sequence[str]) -> TrainConfig:
    """What the options are applied to; it is decided by four of them, read ahead of the others."""
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    ahead.add_argument("--preset")
    ahead.add_argument("--config", type=Path)
    ahead.add_argument("--run-dir", "--run_dir", type=Path)
    ahead.add_argument("--resume", action=argparse.BooleanOptionalAction, default=False)
    try:
        known, _ = ahead.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    if known.resume:
        run_dir = known.run_dir or rundir.newest(known.preset or "*")
        base = preset(known.preset) if known.preset else from_dict(rundir.read_config(run_dir), str(run_dir))
        base = dataclasses.replace(base, run_dir=run_dir)
    else:
        base = preset(known.preset or "quick")
    return load_toml(base, known.config) if known.config else base


def _refuse_unknown(arguments: Sequence[str], config: TrainConfig) -> None:
    known = ["--help", *_options(config, "--")]
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            raise ConfigError(f"unknown option {name}{near(name, known)}")


def _options(config: Any, prefix: str) -> list[str]:
    """Every option of a config, `--gpt.layers` for a nested one."""
    names = []
    for entry in dataclasses.fields(config):
        value, name = getattr(config, entry.name), entry.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            names += _options(value, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
            if isinstance(value, bool):
                names.append(f"{prefix}no-{name}")
    return names
