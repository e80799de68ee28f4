"""`autoshard plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autoshard._shown import shown
from autoshard.commands.arguments import cannot_write, check_writable, parser
from autoshard.commands.settings import read_settings
from autoshard.errors import AutoshardError, ConfigError
from autoshard.train.config.train_config import TrainConfig

_DESCRIPTION = """Show the plan of a train step: of a named model, or of the one that `autoshard train` would run
with the same options.

example: autoshard plan llama2-7b --target v5p:4x4x4 --batch-size 128 --context 2048 --verify
         autoshard plan --preset gpt2-small --target v5e:4x4 --json plan.json

No array is made and no data is read; with --target or --mesh the machine need not be there. `autoshard plan MODEL
--help` lists the options of named models."""


@shown
@dataclasses.dataclass(frozen=True)
class PlanCommand(TrainConfig):
    """The settings of a run, and where its plan is written."""

    json: Path | None = None
    """File to write the plan to, as JSON; - prints it instead of the table."""
    html: Path | None = None
    """File to write the plan to, as a page."""
    verify: int = 0
    """Plans to compile for the target, the best of which is shown with what the compiler made of it."""


def run(arguments: Sequence[str]) -> int:
    """Plan; see `autoshard plan --help`."""
    if arguments and not arguments[0].startswith("-"):
        return _run_named(arguments)
    config = read_settings(arguments, PlanCommand, "plan", _DESCRIPTION)
    _check_files(config.json, config.html)
    return show(plan_train_step(config), config.json, config.html)


def show(plan: Any, json_path: Path | None, html_path: Path | None, explain: Sequence[str] = ()) -> int:
    """Print a plan and write its files; 1 where what the compiler made of it is not what the plan says."""
    if json_path == Path("-"):
        print(plan.to_json())
    else:
        print(plan)
        for text in explain:
            print("", plan.explain(*_wish(text)), sep="\n")
        for audit in plan.audits:
            print("", audit, sep="\n")
    files = ("--json", json_path, lambda p: p.write_text(plan.to_json())), ("--html", html_path, plan.to_html)
    for option, path, write in files:
        if path is not None and path != Path("-"):
            try:
                write(path)
            except OSError as error:
                raise cannot_write(option, path, error) from error
    return 0 if all(audit.ok for audit in plan.audits) else 1


def _check_files(json_path: Path | None, html_path: Path | None) -> None:
    """Refuses, before the search, files that cannot be written."""
    if html_path == Path("-"):
        raise ConfigError("--html '-': a page goes to a file, such as plan.html")
    check_writable("--json", None if json_path == Path("-") else json_path)
    check_writable("--html", html_path)


def plan_train_step(config: TrainConfig):
    """The plan of the config's train step, from shapes only."""
    import autoshard
    from autoshard.train.program.build import fit_tokenizer, make_program_of, train_step_of
    from autoshard.train.program.planned_step import plan_options, search_variants
    from autoshard.train.step.train_step import batch_shapes

    config, verify = fit_tokenizer(config), getattr(config, "verify", 0)
    if config.variants == "search":
        return search_variants(config, verify)[1]
    program = make_program_of(config)
    shapes = program.abstract_state(), batch_shapes(config.batch_size, config.gpt.context)
    return autoshard.plan(
        train_step_of(config, program), *shapes, donate_argnums=0, verify=verify, **plan_options(config)
    )


def _run_named(arguments: Sequence[str]) -> int:
    from autoshard.train.config.old_names import current_options

    given = _parser().parse_args(current_options(arguments))
    _check_files(given.json, given.html)
    settings = _by_name("--set", map(_setting, given.set))
    import jax

    import autoshard
    from autoshard.models.workloads import workload
    from autoshard.train.program.build import layers_of, search_of, variants_of, workload_variants
    from autoshard.train.program.planned_step import parse_mesh

    if given.target and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # nothing that is attached is needed
    named = {"context": given.context, "batch_size": given.batch_size}
    remat = {"remat": given.remat} if given.remat is not None else {}
    try:
        work = workload(given.model).with_(**settings, **remat, **{k: v for k, v in named.items() if v is not None})
    except AutoshardError:
        raise
    except ValueError as error:  # a config says what is wrong with its fields
        raise ConfigError(f"{given.model}: {error}") from error
    options = {
        "target": given.target,
        "mesh": parse_mesh(given.mesh),
        "plan": given.plan,
        "memory_limit_bytes": given.memory_limit_bytes,
        "fixed": _by_name("--fixed", map(_pin, given.fixed)) or None,
    }
    chosen = {
        "remat": settings.get("remat") if given.remat is None else given.remat,
        "microbatches": given.microbatches,
    }
    step, *shapes = workload_variants(work)
    if given.explain:
        _check_asked(given.explain, partial(step, remat="none", microbatches=1), shapes, options["mesh"], given.plan)
    plan = autoshard.plan(
        step,
        *shapes,
        donate_argnums=0,
        variants=search_of(
            variants_of(work, numerics=given.allow_numerics)
            | {name: [value] for name, value in chosen.items() if value is not None},
            layers_of(work.config),
        ),
        verify=given.verify,
        measure=given.measure,
        **{k: v for k, v in options.items() if v is not None},
    )
    return show(plan, given.json, given.html, given.explain)


def _check_asked(
    asked: Sequence[str], step: Any, shapes: Sequence[Any], mesh: Mapping[str, int] | None, words: str | None
) -> None:
    """Refuses, before the search, what cannot be explained.

    Raises:
        PlanError: a path that neither an input nor a result of the step has; a sharding of a result.
        ConfigError: a mesh axis that no plan has.
    """
    import jax

    from autoshard.sharding.layout.plan_request import KINDS, may_name
    from autoshard.sharding.program.tracing import path_of
    from autoshard.sharding.report.alternatives import check_fixable
    from autoshard.sharding.report.explanation import check_path
    from autoshard.spmdrules.core.placement import axes_of, from_partition_spec

    inputs, outputs = (
        [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        for tree in (tuple(shapes), jax.eval_shape(step, *shapes))
    )
    for text in asked:
        path, *wish = _wish(text)
        check_path(path, [*inputs, *outputs])
        if not wish:
            continue
        check_fixable(path, inputs)
        over = axes_of(from_partition_spec(wish[0], len(wish[0])))
        unknown = [axis for axis in over if not may_name(axis, mesh, words)]
        if unknown:
            there = f"--mesh has {', '.join(mesh)}" if mesh else f"axes are called {', '.join(KINDS)} without --mesh"
            raise ConfigError(f"--explain {text!r}: no plan has a mesh axis {unknown[0]!r}; {there}")


def _by_name(option: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What an option that may be given more than once says; each name once."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{option} names {name!r} twice: give it once")
        found[name] = value
    return found


def _wish(text: str) -> tuple[str, Any] | tuple[str]:
    """`0/params/w` alone, or with a sharding as in `0/params/w=-,fsdp+tp`: for each dimension mesh axes, or none."""
    from jax.sharding import PartitionSpec

    path, equals, spec = text.partition("=")
    if not equals:
        return (path,)
    dims = [tuple(axis for axis in dim.strip().split("+") if axis not in ("", "-")) for dim in spec.split(",")]
    return path, PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims))


def _pin(text: str) -> tuple[str, Any]:
    """What `--fixed` says: a path or a pattern, and its sharding."""
    found = _wish(text)
    if len(found) == 1:
        raise ConfigError(f"--fixed {text!r}: write a path and its mesh axes by dimension, such as '0/params/w=-,fsdp'")
    return found


def _setting(text: str) -> tuple[str, Any]:
    """`layers=4` as a field of a model's config and its value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: write a field of the model's config and its value, such as layers=4")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "plan MODEL",
        "Show the plan of a named model's train step (AdamW, clipped gradients), for this machine or another.",
        "autoshard plan mixtral-8x7b --target v5p:4x4x4 --batch-size 128 --verify 2 --html plan.html",
    )
    made.add_argument("model", help="name of a model; an unknown one lists those that there are")
    made.add_argument("--target", help="machine to plan for: v5p:4x4x4, h100:4x8, cpu:8, a .toml file")
    made.add_argument("--mesh", help="mesh to plan for, such as data=4,model=2")
    made.add_argument("--plan", help="plan to use, such as 'fsdp:8 tp:4 seq'")
    made.add_argument("--memory-limit-bytes", type=float, help="memory that the plan may use on each device")
    made.add_argument("--batch-size", type=int, help="rows of a batch")
    made.add_argument("--context", type=int, help="tokens in a row")
    made.add_argument(
        "--microbatches", type=int, help="microbatches that a batch is processed in; default: the best of 1, 2, 4"
    )
    made.add_argument(
        "--remat",
        help="what a layer keeps for its backward pass; default: the best of none, dots, full, or two of them for "
        "layers in turn, such as dots,full",
    )
    made.add_argument(
        "--allow-numerics", action="store_true",
        help="search microbatches where they change the numbers too: batch statistics, routers, expert capacity",
    )  # fmt: skip
    made.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="another field of the model's config"
    )
    made.add_argument(
        "--verify", type=int, nargs="?", const=1, default=0, metavar="K",
        help="compile the K best plans (1) for the target and show what the compiler made of them",
    )  # fmt: skip
    made.add_argument(
        "--measure", type=int, default=0, metavar="K",
        help="run the K best plans for some steps on the attached devices and take the fastest",
    )  # fmt: skip
    made.add_argument(
        "--explain", action="append", default=[], metavar="PATH[=AXES]",
        help="why a tensor is sharded so; with mesh axes for each dimension (-,fsdp+tp) what that would cost",
    )  # fmt: skip
    made.add_argument(
        "--fixed", action="append", default=[], metavar="PATH=AXES",
        help="pin tensors, by path or pattern, to mesh axes for each dimension: '*/wq=-,fsdp,tp,-'",
    )  # fmt: skip
    made.add_argument("--json", type=Path, help="file to write the plan to, as JSON; - prints it")
    made.add_argument("--html", type=Path, help="file to write the plan to, as a page")
    return made
