"""The folder of a run: what is in it, whose it is, and that nothing in it is lost."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
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
_PROBE = ".autoshard-probe-"  # a folder that is made and removed, to see whether another can be made


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


def checkpoints_in(folder: Path) -> Path:
    """The folder of checkpoints: a run's, or the given one.

    Raises:
        ConfigError: There is no such folder.
    """
    inside = folder / CHECKPOINTS
    if not folder.exists():
        raise ConfigError(f"{str(folder)!r} holds no checkpoints: there is no such folder")
    return inside if inside.is_dir() else folder


def read_config(run_dir: Path) -> dict[str, Any]:
    """The settings of a run, as they were written.

    Raises:
        ConfigError: The folder holds no run, or its settings are damaged.
    """
    try:
        config = json.loads((run_dir / CONFIG).read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{str(run_dir)!r} holds no run: {CONFIG} is missing there") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(run_dir / CONFIG)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{str(run_dir / CONFIG)!r} cannot be read: it holds no table of settings")
    return config


def is_taken(run_dir: Path) -> bool:
    """Whether anything is in the folder already.

    Raises:
        ConfigError: That cannot be seen.
    """
    with _writing(run_dir):
        return run_dir.exists() and (
            not run_dir.is_dir() or any(not entry.name.startswith(_PROBE) for entry in run_dir.iterdir())
        )


def check_free(run_dir: Path) -> None:
    """Refuse a folder for a new run that is none, or that holds something.

    Raises:
        ConfigError: Naming what is there.
    """
    if not is_taken(run_dir):
        return
    if not run_dir.is_dir():
        raise ConfigError(f"{str(run_dir)!r} is a file: give a folder that is new or empty by --run-dir")
    if (run_dir / CONFIG).exists():
        raise ConfigError(
            f"{str(run_dir)!r} is not empty: add --resume to continue the run in it, or give another --run-dir"
        )
    raise ConfigError(
        f"{str(run_dir)!r} is not empty and holds no run: give a folder that is new or empty by --run-dir"
    )


def check_writable(run_dir: Path) -> None:
    """Refuse a folder that cannot be made or written to; leaves nothing behind.

    Raises:
        ConfigError: Naming the folder and the reason.
    """
    with _writing(run_dir):
        place = run_dir
        while not place.exists() and place != place.parent:
            place = place.parent
        # No test of permissions tells what a file system allows; a name of its own meets no other process.
        with tempfile.TemporaryDirectory(prefix=_PROBE, dir=place):
            pass


@contextlib.contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    """Turns what the system says of a folder into an error that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--run-dir {str(run_dir)!r} cannot be written to ({error.strerror or error}): give another folder"
        ) from error


def write_plan(run_dir: Path, plan: Any, step: int) -> None:
    """Write the plan for people and for `Plan.from_json`; one that is there stays, and another gets the step's name."""
    for name, content in ((PLAN_TEXT, f"{plan}\n"), (PLAN_JSON, plan.to_json() + "\n")):
        stem, _, suffix = name.partition(".")
        names = itertools.chain(
            (name, f"{stem}-{step}.{suffix}"), (f"{stem}-{step}-{n}.{suffix}" for n in itertools.count(2))
        )
        for path in map(run_dir.joinpath, names):
            if not path.exists():
                path.write_text(content)
            if path.read_text() == content:
                break


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Create the folder and write the settings of the run.

    Raises:
        ConfigError: It cannot be made or written to.
    """
    with _writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        temporary = run_dir / f"{CONFIG}.tmp"
        temporary.write_text(json.dumps(config, indent=1) + "\n")
        temporary.replace(run_dir / CONFIG)
