"""`autoshard ckpt`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autoshard._shown import shown
from autoshard.commands.arguments import Parser, parser
from autoshard.errors import ConfigError

if TYPE_CHECKING:
    from autoshard.ckpt import Checkpointer, Description

PLACE = "folder of a run or of checkpoints; of one step with its number behind an @, as runs/mine@200"


def run(arguments: Sequence[str]) -> int:
    """Look at checkpoints, move and convert them; see `autoshard ckpt --help`."""
    options = parser(
        "ckpt",
        "Look at checkpoints, compare, copy, remove and export them.",
        "autoshard ckpt ls runs/mine",
    )
    actions = options.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    for action in ACTIONS.values():
        made = actions.add_parser(
            action.name,
            help=action.summary,
            description=f"{action.summary[0].upper()}{action.summary[1:]}.",
            epilog=f"example: autoshard ckpt {action.name} {action.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        action.arguments(made)
    given = options.parse_args(arguments)
    return ACTIONS[given.action].run(given)


@shown
@dataclass(frozen=True)
class Action:
    """One of the things that the command does."""

    name: str
    summary: str
    example: str
    arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


@shown
@dataclass(frozen=True)
class Place:
    """Checkpoints, and the step that was named."""

    checkpoints: Checkpointer
    step: int | None

    @property
    def chosen(self) -> int:
        """The step that was named, the newest by default."""
        return self.checkpoints.steps()[-1] if self.step is None else self.step

    def lost(self, step: int) -> bool:
        """Whether a step that nobody named is not there any more: a run that goes on keeps other ones."""
        return self.step is None and step not in self.checkpoints.steps()


def find(text: str) -> Place:
    """The checkpoints at a place.

    Raises:
        ConfigError: There are none.
    """
    from autoshard.ckpt import Checkpointer
    from autoshard.train.config.run_directory import checkpoints_in

    name, mark, number = text.rpartition("@")
    # No more digits than `int` takes, and only those: there are others that Python calls digits.
    named = mark and re.fullmatch("[0-9]{1,18}", number) and not Path(text).exists()
    step = int(number) if named else None
    folder = text if step is None else name
    checkpoints = Checkpointer(folder if "://" in folder else checkpoints_in(Path(folder)), keep=None)
    if not checkpoints.steps():
        raise ConfigError(f"{folder!r} holds no checkpoint")
    return Place(checkpoints, step)


def _place(options: Parser) -> None:
    options.add_argument("place", metavar="DIR[@STEP]", help=PLACE)


def _json(options: Parser) -> None:
    options.add_argument("--json", action="store_true", help="print JSON")


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """As JSON has it: a number that is not finite is a text, as it is in a checkpoint."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in cast(Sequence[Any], value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _ls_arguments(options: Parser) -> None:
    _place(options)
    _json(options)


def _ls(given: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from autoshard._units import bytes_text
    from autoshard.ckpt import CheckpointError, DamagedCheckpointError

    place = find(given.place)
    found: dict[int, Description | DamagedCheckpointError] = {}
    for step in place.checkpoints.steps() if place.step is None else [place.step]:
        try:
            found[step] = place.checkpoints.describe(step)
        except DamagedCheckpointError as error:
            found[step] = error
        except CheckpointError:
            if not place.lost(step):
                raise
    damaged = sum(isinstance(one, DamagedCheckpointError) for one in found.values())
    if given.json:
        told = [
            {"step": step, "damaged": str(one)} if isinstance(one, DamagedCheckpointError) else _row(one)
            for step, one in found.items()
        ]
        _print_json(told)
        return 1 if damaged else 0
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
    Console(width=160, soft_wrap=True).print(table)
    for error in found.values():
        if isinstance(error, DamagedCheckpointError):
            print(error)
    return 1 if damaged else 0


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


def _describe_arguments(options: Parser) -> None:
    _place(options)
    _json(options)


def _describe(given: argparse.Namespace) -> int:
    place = find(given.place)
    found = place.checkpoints.describe(place.step)
    if given.json:
        _print_json(found.to_json())
    else:
        print(found)
    return 0


def _verify_arguments(options: Parser) -> None:
    _place(options)


def _verify(given: argparse.Namespace) -> int:
    from autoshard.ckpt import CheckpointError, DamagedCheckpointError

    place = find(given.place)
    damaged = 0
    for step in place.checkpoints.steps() if place.step is None else [place.step]:
        try:
            leaves = place.checkpoints.verify(step)
        except DamagedCheckpointError as error:
            damaged += 1
            print(error)
            continue
        except CheckpointError:
            if not place.lost(step):
                raise
            print(f"step {step}  removed meanwhile")
            continue
        damaged += bool(leaves)
        print(f"step {step}  " + (f"damaged: {', '.join(leaves)}" if leaves else "intact"))
    return 1 if damaged else 0


def _diff_arguments(options: Parser) -> None:
    options.add_argument("one", metavar="A[@STEP]", help=PLACE)
    options.add_argument("other", metavar="B[@STEP]", help="the same")


def _diff(given: argparse.Namespace) -> int:
    from autoshard.ckpt.restore.checkpoint_diff import compare

    one, other = (find(text) for text in (given.one, given.other))
    found = compare(one.checkpoints.describe(one.step), other.checkpoints.describe(other.step))
    print(found)
    return 0 if found.equal else 1


def _prune_arguments(options: Parser) -> None:
    options.description = f"{options.description} The newest that is intact stays: to know it, the newest is read."
    options.add_argument("place", metavar="DIR", help="folder of a run or of checkpoints")
    options.add_argument("--last", type=int, required=True, help="newest steps to keep")
    options.add_argument("--best", type=int, default=0, help="best steps to keep by --metric")
    options.add_argument("--metric", default="", help="a number that was saved with the steps, such as val_loss")
    options.add_argument("--mode", choices=["min", "max"], default="min", help="whether small or large is good")
    options.add_argument("--every", type=int, default=0, help="keep steps that this divides")
    options.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _prune(given: argparse.Namespace) -> int:
    from autoshard.ckpt import CheckpointError, RetentionPolicy

    place = find(given.place)
    if place.step is not None:
        raise ConfigError(f"{given.place!r} names a step: name the folder, and what is to stay")
    keep = RetentionPolicy(given.last, best=given.best, metric=given.metric, mode=given.mode, every=given.every)
    with place.checkpoints as checkpoints:
        if keep.best:
            known: set[str] = set()
            for step in checkpoints.steps():
                with contextlib.suppress(CheckpointError):  # a damaged one says nothing
                    known |= checkpoints.describe(step).metrics.keys()
            if keep.metric not in known:  # the best of what no step has would be none
                raise ConfigError(
                    f"no step has the metric {keep.metric!r}; they have: {', '.join(sorted(known)) or 'none'}"
                )
        gone = checkpoints.would_prune(keep) if given.dry_run else checkpoints.prune(keep)
        left = [step for step in checkpoints.steps() if step not in gone]
    verb = "would be removed" if given.dry_run else "removed"
    print(f"{verb}: {_steps(gone)}; {'would stay' if given.dry_run else 'left'}: {_steps(left)}")
    return 0


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _copy_arguments(options: Parser) -> None:
    _place(options)
    options.add_argument("target", metavar="TO", help="folder of checkpoints, new or not")
    options.add_argument("--all", action="store_true", help="every step, not only the newest")


def _copy(given: argparse.Namespace) -> int:
    from autoshard.ckpt import Checkpointer, CheckpointError

    place = find(given.place)
    if given.all and place.step is not None:
        raise ConfigError(f"{given.place!r} names a step, and --all asks for every one: leave out one of them")
    steps = place.checkpoints.steps() if given.all else [place.chosen]
    target = Checkpointer(given.target, keep=None)
    there = sorted({*steps} & {*target.steps()})
    if there:
        raise ConfigError(
            f"{target.directory} has step{'s' if len(there) > 1 else ''} {_steps(there)} already, and a committed step "
            "is never overwritten: name another folder"
        )
    for action in (place.checkpoints.describe, lambda step: place.checkpoints.copy(step, given.target)):
        for step in steps:  # each is looked at before the first is copied
            try:
                action(step)
            except CheckpointError:
                if not (given.all and place.lost(step)):
                    raise
    left = target.steps()
    for step in steps:
        print(
            f"step {step} " + (f"is in {given.target}, and is what it was" if step in left else "was removed meanwhile")
        )
    return 0


def _export_arguments(options: Parser) -> None:
    _place(options)
    options.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    options.add_argument("--use-ema", action="store_true", help="the parameters' moving average")
    options.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of floating-point tensors")
    options.add_argument("--shard-bytes", type=int, default=5_000_000_000, help="of a file at most (default: 5e9)")


def _export(given: argparse.Namespace) -> int:
    from autoshard._units import bytes_text

    place = find(given.place)
    if given.shard_bytes < 1:
        raise ConfigError(f"--shard-bytes is {given.shard_bytes}, it must be at least 1")
    found = place.checkpoints.export(
        place.step, given.out, use_ema=given.use_ema, dtype=given.dtype, shard_bytes=given.shard_bytes
    )
    print(f"{found.tensors} tensors, {bytes_text(found.nbytes)}, in {found.folder}: {', '.join(found.files)}")
    return 0


def _merge_arguments(options: Parser) -> None:
    options.add_argument("base", metavar="BASE", help=f"{PLACE}; or a folder with model.safetensors")
    options.add_argument("adapter", metavar="ADAPTER", type=Path, help="folder of a LoRA adapter that PEFT wrote")
    options.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    options.add_argument("--shard-bytes", type=int, default=5_000_000_000, help="of a file at most (default: 5e9)")


def _merge(given: argparse.Namespace) -> int:
    from autoshard._units import bytes_text
    from autoshard.ckpt.exchange.export import write_model
    from autoshard.ckpt.exchange.lora import merged, read_adapter, read_model

    if given.shard_bytes < 1:
        raise ConfigError(f"--shard-bytes is {given.shard_bytes}, it must be at least 1")
    adapter = read_adapter(given.adapter)
    folder = Path(given.base)
    if any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        base = read_model(folder)
    else:
        place = find(given.base)
        base = place.checkpoints.model(place.step)
    model = merged(base, adapter)
    found = write_model(model, given.out, shard_bytes=given.shard_bytes)
    changed = sum(one is not other for one, other in zip(base.tensors, model.tensors, strict=True))
    print(f"{changed} of {found.tensors} tensors changed; {bytes_text(found.nbytes)} in {found.folder}")
    return 0


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action("ls", "list steps with sizes, meshes and metrics", "runs/mine", _ls_arguments, _ls),
        Action("describe", "say what a step holds", "runs/mine@200", _describe_arguments, _describe),
        Action("verify", "read every array and compare it with its digest", "runs/mine", _verify_arguments, _verify),
        Action("diff", "compare two steps, without reading arrays", "runs/a@200 runs/b", _diff_arguments, _diff),
        Action("export", "write a model as safetensors", "runs/mine out/mine --use-ema", _export_arguments, _export),
        Action("merge", "fold a LoRA adapter into a model", "runs/mine adapter out/mine", _merge_arguments, _merge),
        Action(
            "prune",
            "remove steps",
            "runs/mine --last 2 --every 1000",
            _prune_arguments,
            _prune,
        ),
        Action("copy", "copy a step, and compare the copy with its digests", "runs/mine kept", _copy_arguments, _copy),
    )
}
