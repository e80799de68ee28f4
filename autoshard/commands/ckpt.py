"""`autoshard ckpt`: its options. What each action does is in `ckpt_actions`, which imports JAX."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard._shown import shown
from autoshard.commands.arguments import Parser, parser

_PLACE = "folder of a run or of checkpoints; with @ and a number for one step, such as runs/mine@200"


def run(arguments: Sequence[str]) -> int:
    """Run an action on checkpoints; see `autoshard ckpt --help`."""
    options = parser(
        "ckpt",
        "List, verify, compare, copy, remove, import and export checkpoints.",
        "autoshard ckpt ls runs/mine",
    )
    actions = options.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    for action in ACTIONS.values():
        action_parser = actions.add_parser(
            action.name,
            help=action.summary,
            description=f"{action.summary[0].upper()}{action.summary[1:]}.",
            epilog=f"example: autoshard ckpt {action.name} {action.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        action.add_arguments(action_parser)
    given = options.parse_args(arguments)
    from autoshard.commands import ckpt_actions

    return ckpt_actions.FUNCTIONS[given.action](given)


@shown
@dataclass(frozen=True)
class Action:
    """One action of the command.

    Attributes:
        name: the word on the command line.
        summary: one line for the help.
        example: arguments for the example in the help.
        add_arguments: adds its arguments to its parser.
    """

    name: str
    summary: str
    example: str
    add_arguments: Callable[[Parser], None]


def _place(options: Parser) -> None:
    options.add_argument("place", metavar="DIR[@STEP]", help=_PLACE)


def _place_and_json(options: Parser) -> None:
    _place(options)
    options.add_argument("--json", action="store_true", help="print JSON")


def _diff(options: Parser) -> None:
    options.add_argument("one", metavar="A[@STEP]", help=_PLACE)
    options.add_argument("other", metavar="B[@STEP]", help="the same")


def _prune(options: Parser) -> None:
    options.description = (
        f"{options.description} The newest intact step is never removed; to find it, the newest steps are read."
    )
    options.add_argument("place", metavar="DIR", help="folder of a run or of checkpoints")
    options.add_argument("--last", type=int, required=True, help="number of newest steps to keep")
    options.add_argument("--best", type=int, default=0, help="number of best steps to keep, by --metric")
    options.add_argument("--metric", default="", help="a metric that was saved with the steps, such as val_loss")
    options.add_argument("--mode", choices=["min", "max"], default="min", help="whether small or large values are best")
    options.add_argument("--every", type=int, default=0, help="keep steps that are multiples of this")
    options.add_argument("--dry-run", action="store_true", help="only print which steps would be removed")


def _copy(options: Parser) -> None:
    _place(options)
    options.add_argument("target", metavar="TO", help="folder of checkpoints, new or existing")
    options.add_argument("--all", action="store_true", help="copy all steps, not only the newest")


def _export(options: Parser) -> None:
    _place(options)
    _out(options)
    _use_ema(options)
    options.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of floating-point tensors")
    options.add_argument(
        "--merge", action="store_true", help="of a run with adapters, write the merged model, not the adapters"
    )
    _shard_bytes(options)


def _import(options: Parser) -> None:
    options.description = (
        f"{options.description} It resumes with the settings of `autoshard train` that are given here."
    )
    options.add_argument("folder", metavar="PATH", help="folder of a pretrained model")
    options.add_argument("run", metavar="RUN", help="a new folder")
    options.add_argument(
        "settings", metavar="...", nargs=argparse.REMAINDER, help="options of `autoshard train`, such as --plan fsdp:8"
    )


def _merge(options: Parser) -> None:
    options.add_argument("base", metavar="BASE", help=f"{_PLACE}; or a folder with model.safetensors")
    options.add_argument("adapter", metavar="ADAPTER", type=Path, help="folder of a LoRA adapter that PEFT wrote")
    _out(options)
    _use_ema(options)
    _shard_bytes(options)


def _use_ema(options: Parser) -> None:
    options.add_argument(
        "--use-ema",
        action=argparse.BooleanOptionalAction,
        help="use the moving average of the parameters (default: as the run's evaluation did)",
    )


def _out(options: Parser) -> None:
    options.add_argument("out", metavar="OUT", type=Path, help="a new folder")


def _shard_bytes(options: Parser) -> None:
    options.add_argument(
        "--shard-bytes", type=int, default=5_000_000_000, help="maximum size of a file, in bytes (default: 5e9)"
    )


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action("ls", "list steps with sizes, meshes and metrics", "runs/mine", _place_and_json),
        Action("describe", "describe the contents of a step", "runs/mine@200", _place_and_json),
        Action("verify", "read every array and compare it with its digest", "runs/mine", _place),
        Action("diff", "compare two steps by their digests, without reading arrays", "runs/a@200 runs/b", _diff),
        Action("export", "write a model as safetensors", "runs/mine out/mine --use-ema", _export),
        Action("import", "make a run, at step 0, of a pretrained model's folder", "Llama-3.1-8B runs/mine", _import),
        Action("merge", "merge a LoRA adapter into a model", "runs/mine adapter out/mine", _merge),
        Action("prune", "remove steps", "runs/mine --last 2 --every 1000", _prune),
        Action("copy", "copy a step and verify the copy by its digests", "runs/mine kept", _copy),
    )
}
