"""The arguments of `autoshard plan MODEL`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autoshard._typed import read_value
from autoshard.commands.arguments import AUTO, auto_or_number, parser, verification_or_number
from autoshard.errors import ConfigError
from autoshard.sharding.program.kernel_records import WORDS


def unique(option: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Collect the values of a repeatable option by name; a name that is given twice is an error."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{option} names {name!r} twice: give it once")
        found[name] = value
    return found


def parse_path_spec(text: str) -> tuple[str, Any] | tuple[str]:
    """Parse `0/params/w`, or `0/params/w=-,fsdp+tp` with the mesh axes of each dimension (`-` for none)."""
    from jax.sharding import PartitionSpec

    path, equals, spec = text.partition("=")
    if not equals:
        return (path,)
    dims = [tuple(axis for axis in dim.strip().split("+") if axis not in ("", "-")) for dim in spec.split(",")]
    return path, PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims))


def parse_fixed(text: str) -> tuple[str, Any]:
    """Parse a value of `--fixed`: a path or a pattern, and its sharding."""
    found = parse_path_spec(text)
    if len(found) == 1:
        raise ConfigError(
            f"--fixed {text!r} has no sharding: write a path and the mesh axes of each dimension, "
            "such as '0/params/w=-,fsdp'"
        )
    return found


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse a value of `--set`, such as `layers=4`: a field of the model's config and its value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r} has no value: write a field of the model's config and its value, such as "
                          "layers=4")  # fmt: skip
    return name, read_value(value)


def parse_microbatches(text: str) -> int | None:
    """Parse a value of `--microbatches`: a number, or None for `auto`."""
    found = auto_or_number(text)
    return None if found == AUTO else found


def plan_parser() -> argparse.ArgumentParser:
    """Make the parser of `autoshard plan MODEL`."""
    options = parser(
        "plan MODEL",
        "Show the plan of a named model's train step (AdamW, clipped gradients) for this machine or another.",
        "autoshard plan mixtral-8x7b --target v5p:4x4x4 --batch-size 128 --verify 2 --html plan.html",
    )
    options.add_argument(
        "model",
        help="name of a model, or a folder of a pretrained model, of which only config.json is read; the error for an "
        "unknown name lists the names. Or MODULE:FUNCTION: a function of yours that takes no arguments and returns "
        "(step, arguments), where arguments are arrays or shapes; the working directory is searched first",
    )
    options.add_argument("--target", help="machine to plan for: v5p:4x4x4, h100:4x8, cpu:8, or a .toml file")
    options.add_argument("--mesh", help="mesh to plan for, such as data=4,model=2")
    options.add_argument("--plan", help="plan to use, such as 'fsdp:8 tp:4 seq'")
    options.add_argument("--memory-limit-bytes", type=float, help="memory limit of the plan, in bytes per device")
    options.add_argument("--batch-size", type=int, help="sequences or images per batch")
    options.add_argument("--context", type=int, help="tokens per sequence")
    options.add_argument(
        "--microbatches", type=parse_microbatches, metavar="auto|N",
        help="microbatches per batch, or auto (default): the best of 1, 2, 4 that does not change the results",
    )  # fmt: skip
    options.add_argument(
        "--schedule",
        help="with a plan such as 'pp:4 dp:16', or without --plan and --mesh: gpipe, 1f1b (default), interleaved:V, "
        "zb, ftb or 1f1b-inputs, see docs/planning.md",
    )
    options.add_argument(
        "--remat",
        help="remat policy of the layers: none, dots, full, named values such as 'host:residual+qkv keep:out_proj', or "
        "a list that repeats over the layers, such as dots,full; default: the best that --offload allows",
    )
    options.add_argument(
        "--offload", default="auto", metavar="auto|none|NAMES",
        help="what waits in the host's memory: optimizer, the optimizer's state; values of a layer, by names such as "
        "residual+qkv, and what happens to the other values is searched; none; or the best (auto, the default). "
        "residual@::2 selects every second layer, and then nothing is searched. The error for an unknown name lists "
        "the known ones. For your own step, the words of offload= of auto_shard",
    )  # fmt: skip
    options.add_argument(
        "--allow-numerics", action="store_true",
        help="search microbatches even if they change the results: batch statistics, routers, expert capacity",
    )  # fmt: skip
    options.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="set another field of the model's config"
    )
    options.add_argument(
        "--verify", type=verification_or_number, nargs="?", const=1, metavar="K|auto|schedule",
        help="compile the K best plans (without a number, one plan) for the target and show the compiler's findings. "
        "auto: compile as few plans as it takes to find the fastest kind of plan. schedule: the same without machine "
        "code on TPUs, in seconds for each plan. Default: schedule for TPUs and auto for GPUs, if their compiler is "
        "installed, else 0",
    )  # fmt: skip
    options.add_argument(
        "--verify-timeout-s", type=float, metavar="SECONDS",
        help="time limit for all compilations of --verify auto or schedule together (default: 600); then the best plan "
        "so far is shown",
    )  # fmt: skip
    options.add_argument(
        "--measure", type=int, default=0, metavar="K",
        help="run the K best plans for some steps on the attached devices and take the fastest",
    )  # fmt: skip
    options.add_argument(
        "--explain", action="append", default=[], metavar="PATH[=AXES]",
        help="explain how an array is sharded: its path, a glob, or the end of a path that only one array has. With "
        "mesh axes for each dimension (-,fsdp+tp), price that sharding",
    )  # fmt: skip
    options.add_argument(
        "--fixed", action="append", default=[], metavar="PATH=AXES",
        help="fix the sharding of an array: its path, a glob, or the end of a path that only one array has, and the "
        "mesh axes of each dimension, '*/wq=-,fsdp,tp,-'",
    )  # fmt: skip
    options.add_argument(
        "--compiler-options", action="append", default=[], metavar="SET|NAME=VALUE",
        help="option set, such as scoped-vmem, or XLA option, such as xla_tpu_host_transfer_overlap_limit=24, which "
        "takes precedence over the planner's own; several are joined by +. The error for an unknown set lists them",
    )  # fmt: skip
    options.add_argument(
        "--gather", choices=["auto", "prefetch", "sequential", "once", "repeat"],
        help="order in which stored parameters are gathered. auto (default): the compiler's order, or sequential if "
        "nothing else fits; prefetch: while the layer before theirs computes; sequential: one after another; once, "
        "repeat: the stages of a pipeline gather their layers once a step, or in each microbatch",
    )  # fmt: skip
    options.add_argument(
        "--kernels", choices=WORDS,
        help="whether kernels take the place of attention that the step computes itself: off (default), auto, or "
        "require, which makes it an error if some is left",
    )  # fmt: skip
    options.add_argument(
        "--overlap", action="append", default=[], metavar="PATH:KIND=on|off",
        help="whether collectives of some parameters may run beside compute, such as 'experts/*:gather=off' or "
        "'*/wq:gather=off,reduce=off,matmul=on'. The error for an unknown path or kind lists those that exist",
    )  # fmt: skip
    options.add_argument(
        "--show", choices=["program"],
        help="print the traced step instead of a plan: its scans and their bodies, what crosses from the forward to "
        "the backward pass, and repeated equations",
    )  # fmt: skip
    options.add_argument("--json", type=Path, help="write the plan as JSON to this file; - prints it")
    options.add_argument("--html", type=Path, help="write the plan as an HTML page to this file")
    return options
