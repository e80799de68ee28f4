"""The folder of a run: what is in it, whose it is, and that nothing in it is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.errors import ConfigError

RUNS = Path("runs")
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PLAN_TEXT = "plan.txt"
PLAN_JSON = "plan.json"
PLOT = "loss.png"
SAMPLE = "sample.txt"


def fresh(preset: str, seconds: int) -> Path:
    """The folder of a new run of a preset; the time is given, so that all processes agree on it."""
    return RUNS / f"{preset}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}"


def newest(preset: str) -> Path:
    """The newest run of a preset in the working folder.

    Raises:
        ConfigError: There is none.
    """
    found = sorted(RUNS.glob(f"{preset}-*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"--resume: no run in {str(RUNS)!r}: give its folder by --run-dir")
    return found[-1].parent


def read_config(run_dir: Path) -> dict[str, Any]:
    """The settings of a run, as they were written.

    Raises:
        ConfigError: The folder holds no run, or its settings are damaged.
    """
    try:
        return json.loads((run_dir / CONFIG).read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{str(run_dir)!r} holds no run: {CONFIG} is missing there") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(run_dir / CONFIG)!r} cannot be read: {error}") from error


def is_taken(run_dir: Path) -> bool:
    """Whether anything is in the folder already."""
    return run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir()))


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Create the folder and write the settings of the run."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f"{CONFIG}.tmp"
    temporary.write_text(json.dumps(config, indent=1) + "\n")
    temporary.replace(run_dir / CONFIG)
