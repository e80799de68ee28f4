"""The folder of a run: its files, and checks that protect what is already in it."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard.errors import ConfigError

RUNS = Path("runs")
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
PRETRAINED = "pretrained"  # config, tokenizer and unused tensors of the pretrained model that the run started from
METRICS = "metrics.jsonl"
ATTEMPTS = "attempts.jsonl"
ROLLBACKS = "rollbacks.jsonl"  # which batches the rollbacks of the run left out
TENSORBOARD = "tensorboard"
PLAN_TEXT = "plan.txt"
PLAN_JSON = "plan.json"
PLOT = "loss.png"
SAMPLE = "sample.txt"
_PROBE = ".autoshard-probe-"  # prefix of the temporary folder that tests whether a folder can be written to


def new_run_dir(preset: str, seconds: int) -> Path:
    """Name the folder of a new run of a preset.

    Args:
        preset: Name of the preset.
        seconds: Start time, in seconds since the epoch. It is passed in so that all processes use the same.
    """
    return RUNS / f"{preset}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}"


def newest_run_dir(preset: str) -> Path:
    """Find the newest run of a preset below the working folder.

    Raises:
        ConfigError: There is none.
    """
    found = sorted(RUNS.glob(f"{preset}-*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"--resume: there is no run in {str(RUNS)!r}: give its folder with --run-dir")
    return found[-1].parent


def checkpoints_in(folder: Path) -> Path:
    """Find the folder of checkpoints: that of a run, or the given folder itself.

    Raises:
        ConfigError: The folder does not exist.
    """
    inside = folder / CHECKPOINTS
    if not folder.exists():
        raise ConfigError(f"{str(folder)!r} does not exist: give the folder of a run or of checkpoints")
    return inside if inside.is_dir() else folder


def read_config(run_dir: Path) -> dict[str, Any]:
    """Read the stored settings of a run.

    Raises:
        ConfigError: The folder has no run, or its settings are damaged.
    """
    try:
        config = json.loads((run_dir / CONFIG).read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{str(run_dir)!r} is not a run: {CONFIG} is missing. Give the folder of a run") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(run_dir / CONFIG)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{str(run_dir / CONFIG)!r} cannot be read: it is not a table of settings")
    return config


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; empty if there is none. Lines that a crash left incomplete are skipped."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def end_last_line(path: Path) -> None:
    """End a line that a crash left incomplete, so that what is appended is a line of its own."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


def is_taken(run_dir: Path) -> bool:
    """Whether the path is a file, or a folder that is not empty.

    Raises:
        ConfigError: The folder cannot be read.
    """
    with _writing(run_dir):
        return run_dir.exists() and (
            not run_dir.is_dir() or any(not entry.name.startswith(_PROBE) for entry in run_dir.iterdir())
        )


def check_free(run_dir: Path) -> None:
    """Refuse a folder for a new run that is a file or is not empty.

    Raises:
        ConfigError: The folder is taken; the message says by what.
    """
    if not is_taken(run_dir):
        return
    if not run_dir.is_dir():
        raise ConfigError(f"{str(run_dir)!r} is a file: give a new or empty folder with --run-dir")
    if (run_dir / CONFIG).exists():
        raise ConfigError(
            f"{str(run_dir)!r} is not empty: add --resume to continue the run in it, or give another --run-dir"
        )
    raise ConfigError(f"{str(run_dir)!r} is not empty and has no run: give a new or empty folder with --run-dir")


def check_writable(run_dir: Path) -> None:
    """Refuse a folder that cannot be created or written to. Nothing is left behind.

    Raises:
        ConfigError: The folder cannot be written to; the message gives the reason.
    """
    with _writing(run_dir):
        existing = run_dir
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        # Permission bits do not tell what a file system allows, so a folder is really created. Its unique name cannot
        # collide with that of another process.
        with tempfile.TemporaryDirectory(prefix=_PROBE, dir=existing):
            pass


@contextlib.contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    """Turn an `OSError` into a `ConfigError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--run-dir {str(run_dir)!r} cannot be written to ({error.strerror or error}): give another folder"
        ) from error


def write_plan(run_dir: Path, plan: Any, step: int) -> None:
    """Write the plan as text and as JSON. Files of an earlier plan stay; a different plan gets the step in its name."""
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


def keep_pretrained(run_dir: Path, files: Iterable[Path], write_tensors: Callable[[Path], None]) -> None:
    """Copy files of a pretrained model's folder, without the model's weights, to the run's folder.

    Args:
        run_dir: The run's folder.
        files: The files to copy.
        write_tensors: Writes the tensors that the model does not use into the folder that it is given.

    Raises:
        ConfigError: A file cannot be read or written.
    """
    kept = run_dir / PRETRAINED
    with _writing(run_dir):
        draft = run_dir / f".{PRETRAINED}"
        draft.mkdir(parents=True, exist_ok=True)
        for file in files:
            (draft / file.name).write_bytes(file.read_bytes())
        write_tensors(draft)
        draft.rename(kept)


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Create the folder and write the settings of the run.

    Raises:
        ConfigError: The folder cannot be created or written to.
    """
    with _writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        temporary = run_dir / f"{CONFIG}.tmp"
        temporary.write_text(json.dumps(config, indent=1) + "\n")
        temporary.replace(run_dir / CONFIG)
