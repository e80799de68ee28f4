"""The actions of `autoshard ckpt`: each takes the parsed arguments and returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from autoshard._shown import shown
from autoshard._units import bytes_text
from autoshard.ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, Description, RetentionPolicy
from autoshard.ckpt.exchange.export import write_model
from autoshard.ckpt.exchange.lora import merge_adapter, read_adapter, read_model
from autoshard.ckpt.restore.checkpoint_diff import compare
from autoshard.commands.settings import read_settings
from autoshard.errors import ConfigError
from autoshard.train.config.run_directory import checkpoints_in
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.pretrained_export import export_pretrained, pretrained_run


@shown
@dataclass(frozen=True)
class Place:
    """Checkpoints, and the step that the user named.

    Attributes:
        checkpoints: the checkpoints of the folder.
        step: the step after `@`; None if there is none.
    """

    checkpoints: Checkpointer
    step: int | None

    @property
    def steps(self) -> list[int]:
        """The named step, or all steps."""
        return [*self.checkpoints.steps()] if self.step is None else [self.step]

    @property
    def step_or_newest(self) -> int:
        """The named step, or the newest one."""
        return self.checkpoints.steps()[-1] if self.step is None else self.step

    def was_removed(self, step: int) -> bool:
        """Return whether a step that the user did not name was removed meanwhile, by a run in progress."""
        return self.step is None and step not in self.checkpoints.steps()


def open_place(text: str) -> Place:
    """Open the checkpoints of `DIR` or `DIR@STEP`.

    Raises:
        ConfigError: There are none.
    """
    name, mark, number = text.rpartition("@")
    # ASCII digits only, and not too many for `int`: other characters are digits to Python too.
    named = mark and re.fullmatch("[0-9]{1,18}", number) and not Path(text).exists()
    step = int(number) if named else None
    folder = text if step is None else name
    checkpoints = Checkpointer(folder if "://" in folder else checkpoints_in(Path(folder)), keep=None)
    if not checkpoints.steps():
        raise ConfigError(f"{folder!r} has no checkpoint: give the folder of a run or of checkpoints")
    return Place(checkpoints, step)


def _print_json(value: Any) -> None:
    print(json.dumps(_json_value(value), indent=1, allow_nan=False))


def _json_value(value: Any) -> Any:
    """Replace numbers that are not finite by text, because JSON cannot express them."""
    if isinstance(value, Mapping):
        return {name: _json_value(part) for name, part in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_json_value(part) for part in cast(Sequence[Any], value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _ls(given: argparse.Namespace) -> int:
    place = open_place(given.place)
    found: dict[int, Description | DamagedCheckpointError] = {}
    for step in place.steps:
        try:
            found[step] = place.checkpoints.describe(step)
        except DamagedCheckpointError as error:
            found[step] = error
        except CheckpointError:
            if not place.was_removed(step):
                raise
    errors = [one for one in found.values() if isinstance(one, DamagedCheckpointError)]
    if given.json:
        rows = [
            {"step": step, "damaged": str(one)} if isinstance(one, DamagedCheckpointError) else _row(one)
            for step, one in found.items()
        ]
        _print_json(rows)
        return 1 if errors else 0
    Console(width=160, soft_wrap=True).print(_table(found))
    for error in errors:
        print(error)
    return 1 if errors else 0


def _table(found: Mapping[int, Description | DamagedCheckpointError]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("step", "written", "leaves", "state", "files", "mesh", "metrics"):
        table.add_column(column, justify="right" if column in ("step", "leaves", "state", "files") else "left")
    for step, one in found.items():
        if isinstance(one, DamagedCheckpointError):
            table.add_row(str(step), "damaged", "", "", "", "", "")
            continue
        row = _row(one)
        mesh = ", ".join(" ".join(f"{axis}:{size}" for axis, size in each.items()) for each in one.meshes) or "-"
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in one.metrics.items()) or "-"
        sizes = bytes_text(one.nbytes), bytes_text(one.file_bytes)
        table.add_row(str(step), row["time"], str(row["leaves"]), *sizes, mesh, metrics)
    return table


def _row(one: Description) -> dict[str, Any]:
    return {
        "step": one.step,
        "time": one.written_by.get("time", "-"),
        "leaves": len(one.leaves),
        "nbytes": one.nbytes,
        "file_bytes": one.file_bytes,
        "meshes": [dict(mesh) for mesh in one.meshes],
        "metrics": dict(one.metrics),
    }


def _describe(given: argparse.Namespace) -> int:
    place = open_place(given.place)
    description = place.checkpoints.describe(place.step)
    if given.json:
        _print_json(description.to_json())
    else:
        print(description)
    return 0


def _verify(given: argparse.Namespace) -> int:
    place = open_place(given.place)
    damaged = 0
    for step in place.steps:
        try:
            leaves = place.checkpoints.verify(step)
        except DamagedCheckpointError as error:
            damaged += 1
            print(error)
            continue
        except CheckpointError:
            if not place.was_removed(step):
                raise
            print(f"step {step}  removed meanwhile")
            continue
        damaged += bool(leaves)
        print(f"step {step}  " + (f"damaged: {', '.join(leaves)}" if leaves else "intact"))
    return 1 if damaged else 0


def _diff(given: argparse.Namespace) -> int:
    one, other = (open_place(text) for text in (given.one, given.other))
    difference = compare(one.checkpoints.describe(one.step), other.checkpoints.describe(other.step))
    print(difference)
    return 0 if difference.equal else 1


def _prune(given: argparse.Namespace) -> int:
    place = open_place(given.place)
    if place.step is not None:
        raise ConfigError(f"{given.place!r} names a step, but prune takes a folder: leave out '@{place.step}'")
    keep = RetentionPolicy(given.last, best=given.best, metric=given.metric, mode=given.mode, every=given.every)
    with place.checkpoints as checkpoints:
        if keep.best:
            _check_metric(checkpoints, keep.metric)
        removed = checkpoints.would_prune(keep) if given.dry_run else checkpoints.prune(keep)
        left = [step for step in checkpoints.steps() if step not in removed]
    verb = "would be removed" if given.dry_run else "removed"
    print(f"{verb}: {_steps(removed)}; {'would stay' if given.dry_run else 'left'}: {_steps(left)}")
    return 0


def _check_metric(checkpoints: Checkpointer, metric: str) -> None:
    """Refuse a metric that no step has: no step would be the best."""
    known: set[str] = set()
    for step in checkpoints.steps():
        with contextlib.suppress(CheckpointError):  # a damaged step has no readable metrics
            known |= checkpoints.describe(step).metrics.keys()
    if metric not in known:
        raise ConfigError(f"no step has the metric {metric!r}; they have: {', '.join(sorted(known)) or 'none'}")


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _copy(given: argparse.Namespace) -> int:
    place = open_place(given.place)
    if given.all and place.step is not None:
        raise ConfigError(f"{given.place!r} names a step, but --all copies every step: leave out one of them")
    steps = place.checkpoints.steps() if given.all else [place.step_or_newest]
    target = Checkpointer(given.target, keep=None)
    existing = sorted({*steps} & {*target.steps()})
    if existing:
        raise ConfigError(
            f"{target.directory} has step{'s' if len(existing) > 1 else ''} {_steps(existing)} already, and a "
            "committed step is never overwritten: name another folder"
        )
    for action in (place.checkpoints.describe, lambda step: place.checkpoints.copy(step, given.target)):
        for step in steps:  # every step is described before the first is copied, so that errors come first
            try:
                action(step)
            except CheckpointError:
                if not (given.all and place.was_removed(step)):
                    raise
    copied = target.steps()
    for step in steps:
        print(
            f"step {step} " + (f"copied to {given.target} and verified" if step in copied else "was removed meanwhile")
        )
    return 0


def _export(given: argparse.Namespace) -> int:
    place = open_place(given.place)
    _check_shard_bytes(given.shard_bytes)
    if (config := _pretrained_run(place)) is not None:
        model = place.checkpoints.model(place.step, use_ema=given.use_ema)
        export = export_pretrained(
            config, model, given.out, dtype=given.dtype, shard_bytes=given.shard_bytes, merge=given.merge
        )
    elif given.merge:
        raise ConfigError(f"{given.place!r} is not a run with adapters: leave out --merge")
    else:
        export = place.checkpoints.export(
            place.step, given.out, use_ema=given.use_ema, dtype=given.dtype, shard_bytes=given.shard_bytes
        )
    what = f"{export.tensors} tensors{_averaged(export.averaged)}, {bytes_text(export.nbytes)}"
    print(f"{what}, in {export.folder}: {', '.join(export.files)}")
    return 0


def _import(given: argparse.Namespace) -> int:
    arguments = ["--from", given.folder, "--run-dir", given.run, *given.settings]
    config = read_settings(
        arguments, TrainConfig, "ckpt import", "Make a run, at step 0, of a pretrained model's folder."
    )
    from autoshard.train.run.loop import Trainer

    run_dir = Trainer(config).save_first_state()
    print(f"step 0 is in {run_dir}; train by `autoshard train --run-dir {run_dir} --resume`")
    return 0


def _pretrained_run(place: Place) -> TrainConfig | None:
    folder = str(place.checkpoints.directory)
    return None if "://" in folder else pretrained_run(Path(folder))


def _averaged(averaged: bool) -> str:
    return " (moving average of the parameters)" if averaged else ""


def _merge(given: argparse.Namespace) -> int:
    _check_shard_bytes(given.shard_bytes)
    adapter = read_adapter(given.adapter)
    folder = Path(given.base)
    if any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        if given.use_ema:
            raise ConfigError(f"--use-ema is for steps, but {str(folder)!r} has files of a model: leave it out")
        base = read_model(folder)
    else:
        place = open_place(given.base)
        base = place.checkpoints.model(place.step, use_ema=given.use_ema)
    model = merge_adapter(base, adapter)
    export = write_model(model, given.out, shard_bytes=given.shard_bytes)
    changed = sum(one is not other for one, other in zip(base.tensors, model.tensors, strict=True))
    what = f"{changed} of {export.tensors} tensors{_averaged(base.averaged)} changed"
    print(f"{what}; {bytes_text(export.nbytes)} in {export.folder}")
    return 0


def _check_shard_bytes(shard_bytes: int) -> None:
    if shard_bytes < 1:
        raise ConfigError(f"--shard-bytes is {shard_bytes}; it must be at least 1")


FUNCTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls,
    "describe": _describe,
    "verify": _verify,
    "diff": _diff,
    "export": _export,
    "import": _import,
    "merge": _merge,
    "prune": _prune,
    "copy": _copy,
}
