"""`autoshard bench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from autoshard._shown import shown
from autoshard.commands.arguments import cannot_write, check_writable
from autoshard.commands.settings import read_settings
from autoshard.errors import ConfigError
from autoshard.train.config.train_config import TrainConfig

_DESCRIPTION = """Time the train step that `autoshard train` would run with the same options: under its plan, and as the
same function under jax.jit with the plan's input shardings written by hand. Both are timed in turn, in one process.

example: autoshard bench --preset quick --plan fsdp:8 --rounds 20

Made of random tokens: no data is read. With --calibrate FILE.toml it measures the attached devices instead and
describes them as a target: autoshard plan gpt-1.3b --target FILE.toml"""


@shown
@dataclasses.dataclass(frozen=True)
class BenchCommand(TrainConfig):
    """The settings of a run, and how long it is timed."""

    rounds: int = 20
    """Pairs of steps that are timed, after one that is not."""
    calibrate: Path | None = None
    """TOML file to write what was measured of the attached devices to, for --target."""


def run(arguments: Sequence[str]) -> int:
    """Time; see `autoshard bench --help`."""
    config = read_settings(arguments, BenchCommand, "bench", _DESCRIPTION)
    if config.rounds < 1:
        raise ConfigError(f"--rounds is {config.rounds}, it must be at least 1")
    if config.calibrate is not None:
        return _calibrate(config.calibrate)
    from autoshard.train.program.step_timing import time_steps

    print(time_steps(config, config.rounds))
    return 0


def _calibrate(path: Path) -> int:
    from autoshard.sharding.machines.calibration import calibrate
    from autoshard.sharding.machines.targets import write_target

    if path.suffix != ".toml":
        raise ConfigError(f"--calibrate {str(path)!r}: name a .toml file")
    check_writable("--calibrate", path)
    target = calibrate()
    try:
        write_target(target, path)
    except OSError as error:
        raise cannot_write("--calibrate", path, error) from error
    chip = target.chip
    print(f"{target.name}: {chip.flops / 1e12:.3g} TFLOP/s at 16 bits, {chip.flops_f32 / 1e12:.3g} at 32, "
          f"memory {chip.memory_bandwidth / 1e9:.3g} GB/s, links {chip.link_bandwidth / 1e9:.3g} GB/s")  # fmt: skip
    print(f"written to {path}; plan for it with --target {path}")
    return 0
