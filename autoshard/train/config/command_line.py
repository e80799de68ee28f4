"""Parse command-line arguments into a config: a preset or a stored run, then the TOML file, then the options.

A resumed run starts from its stored settings. If the command line names the run's preset again, the settings that may
change on resume are taken from the preset. All others stay as stored: some of them, such as the warm-up, were fitted to
the run when it started.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import re
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from autoshard.errors import AutoshardWarning, ConfigError
from autoshard.train.config import run_directory
from autoshard.train.config.merging import merge, replaced, similar, suggestion
from autoshard.train.config.presets import preset
from autoshard.train.config.stored_config import RESUMABLE_CHANGES, from_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.old_names import current_options
from autoshard.train.step.optimizer import unused_settings

Command = TypeVar("Command", bound=TrainConfig)


def parse_config(arguments: Sequence[str], kind: type[Command], prog: str, description: str) -> Command:
    """Parse arguments into a config.

    Args:
        arguments: The arguments after the subcommand.
        kind: `TrainConfig`, or a subclass with additional options.
        prog: The command's name in its help.
        description: First paragraph of the help.

    Raises:
        ConfigError: An option, preset or setting is unknown, or a value is invalid.
        SystemExit: `--help` was given.
    """
    arguments = _with_long_names(current_options(arguments))
    base = kind(**_shallow(_starting_point(arguments)))
    _refuse_unknown(arguments, base, prog)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            config = tyro.cli(kind, default=base, args=list(arguments), prog=prog, description=description)
            _check_shape_options(config, arguments)
            _check_optimizer_options(config, arguments)
            _check_guard_options(config, arguments)
            if config.resume_if_started and _has_started(config.run_dir):
                config = dataclasses.replace(config, resume=True)
            return _fit_warmup(config, arguments)
    except SystemExit as end:
        if end.code:
            raise ConfigError(plain_message(_one_line(errors.getvalue()), prog)) from end
        raise


def load_toml(config: TrainConfig, path: Path) -> TrainConfig:
    """Return a config with the settings of a TOML file.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an unknown setting.
    """
    try:
        changes = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} is not a TOML file: {error}") from error
    return merge(config, changes, str(path))


# The messages of argparse and tyro about text in place of a number.
_NOT_A_NUMBER = (
    r"argument (?P<name>\S+): invalid (?P<kind>int|float) value: (?P<value>.*)",
    r"Error parsing (?P<name>\S+): invalid literal for (?P<kind>int)\(\) with base 10: (?P<value>.*)",
    r"Error parsing (?P<name>\S+): could not convert string to (?P<kind>float): (?P<value>.*)",
    r"Error parsing (?P<name>\S+): no type matching \{None\}\|(?P<kind>INT|FLOAT) .* from \[(?P<value>.*?)\]\..*",
)
_NOT_A_CHOICE = (
    r"argument (?P<name>\S+): invalid choice: (?P<value>'.*?').* \(choose from (?P<choices>.*)\)",
    r"invalid choice (?P<value>'.*') for argument '(?P<name>\S+)'\. Expected one of \((?P<choices>.*)\)\.",
)
_NO_VALUE = (
    r"argument (?P<name>\S+): expected one argument",
    r"Missing value for argument '(?P<name>\S+)'\. .*",
)


def plain_message(message: str, command: str) -> str:
    """Rewrite a parser's message about an option for readers who do not know Python.

    Args:
        message: The message of argparse or tyro.
        command: The command, whose help the message may name.
    """
    if found := _first_match(_NOT_A_NUMBER, message):
        kind = "a whole number" if found["kind"].lower() == "int" else "a number"
        return f"{found['name']} is {found['value']}; it must be {kind}"
    if found := _first_match(_NOT_A_CHOICE, message):
        choices = [choice.strip("' ") for choice in found["choices"].split(",") if choice]
        close = similar(found["value"].strip("'"), choices)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{found['name']} is {found['value']}; it must be {' or '.join(map(repr, choices))}{hint}"
    if found := _first_match(_NO_VALUE, message):
        return f"{found['name']} has no value; `{command} --help` says what it takes"
    if found := re.fullmatch(r"the following arguments are required: (.*)", message):
        verb = "are" if ", " in found[1] else "is"
        return f"{found[1]} {verb} missing; `{command} --help` shows an example"
    if found := re.fullmatch(r"argument (\S+): not allowed with argument (\S+)", message):
        return f"{found[1]} cannot be combined with {found[2]}; leave one of them out"
    if found := re.fullmatch(r"Unrecognized options: (.*)", message):
        return unknown_arguments(found[1].split(), (), command)
    # A config's own message already says what is wrong.
    return re.sub(r"^Error parsing [\w.]+: ", "", message)


def _first_match(patterns: Sequence[str], message: str) -> re.Match[str] | None:
    return next((found for pattern in patterns if (found := re.fullmatch(pattern, message))), None)


def unknown_arguments(unknown: Sequence[str], known: Sequence[str], command: str) -> str:
    """The message about arguments that a command does not have.

    Args:
        unknown: The arguments. The first option among them, else the first argument, is reported.
        known: The options that the command has.
        command: The command.
    """
    option = next((each.partition("=")[0] for each in unknown if each.startswith("-")), None)
    if option is None:
        return f"unexpected argument {unknown[0]!r}; `{command} --help` shows the usage"
    close = suggestion(option, known) if similar(option, known) else ";"
    return f"unknown option {option}{close} `{command} --help` lists the options"


def _one_line(box: str) -> str:
    """Extract the message from an error box of tyro's: the first section below the title.

    The title is in the box's upper border, or on a line of its own if the output is not UTF-8.
    """
    lines = [line.strip("│ ").rstrip() for line in box.splitlines()[1:]]
    ruled = itertools.dropwhile(_is_rule, lines)
    return " ".join(itertools.takewhile(lambda line: not _is_rule(line), ruled)) or box.strip()


def _is_rule(line: str) -> bool:
    return not line.strip("─-╭╮╰╯ ")


def _shallow(config: TrainConfig) -> dict[str, Any]:
    return {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}


def _starting_point(arguments: Sequence[str]) -> TrainConfig:
    """Return the config that the options are applied to. Five options select it and are parsed first."""
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    ahead.add_argument("--preset")
    ahead.add_argument("--config", type=Path)
    ahead.add_argument("--run-dir", "--run_dir", type=Path)
    for name in ("resume", "resume-if-started"):
        flags = (f"--{name}", f"--{name.replace('-', '_')}")
        ahead.add_argument(*dict.fromkeys(flags), action=argparse.BooleanOptionalAction, default=False)
    try:
        known, _ = ahead.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    if known.resume or (known.resume_if_started and _has_started(known.run_dir)):
        named = preset(known.preset) if known.preset else None
        run_dir = known.run_dir or run_directory.newest_run_dir(known.preset or "*")
        stored = from_dict(run_directory.read_config(run_dir), str(run_dir))
        base = stored if named is None else _of_stored_run(named, stored)
        base = dataclasses.replace(base, run_dir=run_dir)
    else:
        base = preset(known.preset or "quick")
    return load_toml(base, known.config) if known.config else base


def _has_started(run_dir: Path | None) -> bool:
    return run_dir is not None and (run_dir / run_directory.CONFIG).exists()


def _of_stored_run(named: TrainConfig, stored: TrainConfig) -> TrainConfig:
    """Return the named preset. A resumed run keeps its stored values, except those of settings that may change.

    If the run was started from another preset, the named one is returned as it is, because all of its settings are new
    requests.
    """
    if named.preset != stored.preset:
        return named
    return dataclasses.replace(stored, **{each: getattr(named, each) for each in RESUMABLE_CHANGES})


def _with_long_names(arguments: Sequence[str]) -> list[str]:
    """Replace `--from` by the option that it is short for. Arguments after `--` stay as they are."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = [re.sub(r"^--from(?==|$)", "--pretrained.folder", each) for each in arguments[:end]]
    return [*head, *arguments[end:]]


def _check_shape_options(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Refuse options of the built-in model's shape if the model is a pretrained one.

    Raises:
        ConfigError: There is one.
    """
    given = [name for name in option_names(arguments) if name.startswith("--gpt.") and name != "--gpt.context"]
    if config.pretrained.folder is not None and given:
        raise ConfigError(
            f"{given[0]} is for the built-in model, but --from {config.pretrained.folder} says what the model is: "
            "leave it out; --pretrained.* has the settings of such a model"
        )


def _check_optimizer_options(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Check that the optimizer and the schedule use the options that are given.

    Raises:
        ConfigError: They do not use an option.
    """
    for setting, users in unused_settings(config.optimizer).items():
        option = f"--optimizer.{setting.replace('_', '-')}"
        if option in option_names(arguments):
            raise ConfigError(
                f"{option} is for {users}, not for --optimizer.name {config.optimizer.name} and --optimizer.schedule "
                f"{config.optimizer.schedule}: leave it out; --optimizer.arguments has the optimizer's own"
            )


def _check_guard_options(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Check that the given options of the guard have an effect.

    Raises:
        ConfigError: One has none.
    """
    for setting, needed in config.guard.unused_settings().items():
        option = f"--guard.{setting.replace('_', '-')}"
        if option in option_names(arguments):
            raise ConfigError(f"{option} has no effect without {needed}: give that too, or leave {option} out")


def option_names(arguments: Sequence[str]) -> list[str]:
    """Return the names of the options among arguments, with dashes and without their values.

    Values of options that are arguments of their own are in the list, too.
    """
    return [argument.partition("=")[0].replace("_", "-") for argument in arguments]


def _fit_warmup(config: Command, arguments: Sequence[str]) -> Command:
    """Shorten a preset's warm-up to the same fraction of the run if the run is not longer than the warm-up.

    A warm-up set by an option or a file stays.
    """
    warmup, steps = config.optimizer.warmup_steps, config.steps
    if config.resume or not warmup >= steps > 0 or _sets_warmup(config, arguments):
        return config
    fitting = warmup * steps // preset(config.preset).steps
    warnings.warn(
        f"the warm-up of preset {config.preset} is {warmup} steps, but the run has {steps}: it is shortened to "
        f"{fitting}. Set --optimizer.warmup-steps to choose it",
        AutoshardWarning,
        stacklevel=3,
    )
    return replaced(config, "optimizer", optimizer=replaced(config.optimizer, "optimizer", warmup_steps=fitting))


def _sets_warmup(config: TrainConfig, arguments: Sequence[str]) -> bool:
    """Whether an option or a file sets the warm-up, rather than the preset."""
    if "--optimizer.warmup-steps" in option_names(arguments):
        return True
    settings = tomllib.loads(config.config.read_text()) if config.config else {}
    return "warmup_steps" in settings.get("optimizer", {})


def _refuse_unknown(arguments: Sequence[str], config: TrainConfig, prog: str) -> None:
    known = ["--help", *_options(config, "--")]
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            raise ConfigError(unknown_arguments([name], known, prog))


def _options(config: Any, prefix: str) -> list[str]:
    """List the options of a config, such as `--gpt.layers` for a nested setting."""
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
