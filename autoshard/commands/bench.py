"""`autoshard bench`: time a train step under its plan, and measure the attached machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from autoshard._shown import shown
from autoshard.commands.arguments import cannot_write, check_writable
from autoshard.commands.settings import read_settings
from autoshard.errors import ConfigError
from autoshard.train.config.train_config import TrainConfig

_DESCRIPTION = """Time the train step that `autoshard train` runs with the same options: under its plan, and under
jax.jit with the plan's input shardings written by hand. Both steps run in one process and take turns.

example: autoshard bench --preset quick --plan fsdp:8 --rounds 20

The batch is random tokens; no data is read. With --calibrate FILE.toml the command instead measures the attached
devices and writes them as a target, for example for: autoshard plan gpt-1.3b --target FILE.toml"""


@shown
@dataclasses.dataclass(frozen=True)
class BenchCommand(TrainConfig):
    """The settings of a run and of its timing."""

    rounds: int = 20
    """Pairs of steps to time, after one untimed pair."""
    calibrate: Path | None = None
    """Measure the attached devices and write them as a target to this TOML file, for --target."""


def run(arguments: Sequence[str]) -> int:
    """Time a train step; see `autoshard bench --help`."""
    config = read_settings(arguments, BenchCommand, "bench", _DESCRIPTION)
    if config.rounds < 1:
        raise ConfigError(f"--rounds is {config.rounds}; it must be at least 1")
    if config.calibrate is not None:
        return _calibrate(config.calibrate)
    from autoshard.train.program.step_timing import time_steps

    print(time_steps(config, config.rounds))
    return 0


def _calibrate(path: Path) -> int:
    from autoshard.sharding.machines.calibration import calibrate
    from autoshard.sharding.machines.targets import write_target

    if path.suffix != ".toml":
        raise ConfigError(f"--calibrate {str(path)!r} does not end in .toml: give a .toml file")
    check_writable("--calibrate", path)
    target = calibrate()
    try:
        write_target(target, path)
    except OSError as error:
        raise cannot_write("--calibrate", path, error) from error
    chip = target.chip
    print(f"{target.name}: {chip.flops / 1e12:.3g} TFLOP/s in 16 bits, {chip.flops_f32 / 1e12:.3g} in 32 bits, "
          f"memory {chip.memory_bandwidth / 1e9:.3g} GB/s, links {chip.link_bandwidth / 1e9:.3g} GB/s")  # fmt: skip
    print(f"written to {path}; use it with: autoshard plan --target {path}")
    return 0
