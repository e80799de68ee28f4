"""`autoshard plan`: plan a train step for this machine or another, and print, explain or compile the plan."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from autoshard._shown import shown
from autoshard.commands.arguments import cannot_write, check_writable
from autoshard.commands.plan_options.arguments import parse_fixed, parse_path_spec, plan_parser, unique
from autoshard.commands.plan_options.named_model import NamedModel
from autoshard.commands.plan_options.own_step import is_own_step, own_step
from autoshard.commands.plan_options.verification import verification
from autoshard.commands.settings import read_settings
from autoshard.errors import ConfigError
from autoshard.train.config.train_config import TrainConfig

_DESCRIPTION = """Show the plan of a train step: that of a named model, or the one that `autoshard train` runs with the
same options.

example: autoshard plan llama2-7b --target v5p:4x4x4 --batch-size 128 --context 2048 --verify
         autoshard plan --preset gpt2-small --target v5e:4x4 --json plan.json
         autoshard plan train:example --target v5e:4x4   # example() returns (train_step, (state, batch))

No array is allocated and no data is read. With --target or --mesh the machine need not be attached.
`autoshard plan MODEL --help` lists the options for named models and for a step of your own."""


@shown
@dataclasses.dataclass(frozen=True)
class PlanCommand(TrainConfig):
    """The settings of a run, and the output files of its plan."""

    json: Path | None = None
    """Write the plan as JSON to this file; - prints JSON instead of the table."""
    html: Path | None = None
    """Write the plan as an HTML page to this file."""
    verify: int | Literal["auto", "schedule"] | None = None
    """Number of best plans to compile for the target, or auto: as few as it takes to find the fastest kind of plan.
    The best is shown with the compiler's findings. schedule: like auto, without machine code. The default is schedule
    for TPUs and auto for GPUs, if their compiler is installed, else 0."""
    verify_timeout_s: float | None = None
    """Seconds for all compilations of --verify auto or schedule; by default 600."""
    show: Literal["program"] | None = None
    """Print the traced step instead of a plan: its scans, what crosses from the forward to the backward pass."""


def run(arguments: Sequence[str]) -> int:
    """Plan a train step; see `autoshard plan --help`."""
    if arguments and not arguments[0].startswith("-"):
        return _run_named(arguments)
    config = read_settings(arguments, PlanCommand, "plan", _DESCRIPTION)
    if config.show:
        print(train_step_text(config))
        return 0
    _check_files(config.json, config.html)
    return show(plan_train_step(config), config.json, config.html)


def show(plan: Any, json_path: Path | None, html_path: Path | None, explain: Sequence[str] = ()) -> int:
    """Print a plan and write its files.

    Args:
        plan: the plan.
        json_path: file for JSON, `-` for standard output.
        html_path: file for the HTML page.
        explain: `PATH` or `PATH=AXES` for each explanation to print.

    Returns:
        The exit code: 1 if the compiled program differs from the plan, else 0.
    """
    if json_path == Path("-"):
        print(plan.to_json())
    else:
        print(plan)
        for text in explain:
            print("", plan.explain(*parse_path_spec(text)), sep="\n")
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
    """Refuse output files that cannot be written, before the search starts."""
    if html_path == Path("-"):
        raise ConfigError("--html '-': a page cannot be printed. Name a file, such as plan.html")
    check_writable("--json", None if json_path == Path("-") else json_path)
    check_writable("--html", html_path)


def plan_train_step(config: TrainConfig):
    """Plan the train step of a config, from shapes only."""
    import autoshard
    from autoshard.train.program.build import fit_tokenizer, make_program_of, train_step_of
    from autoshard.train.program.offloading import with_offload
    from autoshard.train.program.planned_step import plan_options, search_variants
    from autoshard.train.program.pretrained import with_dtype_note
    from autoshard.train.step.train_step import batch_shapes

    config = fit_tokenizer(config)
    verify = {}
    if isinstance(config, PlanCommand):
        options = {"target": config.target}
        verify = verification(config.verify, config.verify_timeout_s, options, config.measure)
    if config.searches_variants:
        return search_variants(config, **verify)[1]
    config = with_offload(config)
    program = make_program_of(config)
    shapes = program.abstract_state(), batch_shapes(config.batch_size, config.gpt.context, config.batch_kind)
    plan = autoshard.plan(train_step_of(config, program), *shapes, donate_argnums=0, **verify, **plan_options(config))
    return with_dtype_note(plan, config, shapes[0])


def train_step_text(config: TrainConfig) -> str:
    """Return the traced train step of a config as text."""
    from autoshard.sharding.rewrite.printed_program import function_text
    from autoshard.train.program.build import fit_tokenizer, make_program_of, train_step_of
    from autoshard.train.program.offloading import with_offload
    from autoshard.train.step.train_step import batch_shapes

    config = with_offload(fit_tokenizer(config))
    program = make_program_of(config)
    step = train_step_of(config, program)
    return function_text(
        step, program.abstract_state(), batch_shapes(config.batch_size, config.gpt.context, config.batch_kind)
    )


def _run_named(arguments: Sequence[str]) -> int:
    from autoshard.train.old_names import current_options

    given = plan_parser().parse_args(current_options(arguments))
    _check_files(given.json, given.html)
    if given.target and not os.environ.get("JAX_PLATFORMS"):
        import jax

        jax.config.update("jax_platforms", "cpu")  # no attached accelerator is needed
    if is_own_step(given.model):
        return _run_own(given, arguments)
    from autoshard.sharding.rewrite.printed_program import function_text

    model = NamedModel.of(given)
    step, shapes = model.step()
    options = _plan_options(given)
    if given.explain:
        _check_explain(given.explain, model.plain(step), shapes, options["mesh"], given.plan)
    if given.show:
        print(function_text(model.shown(step), *shapes))
        return 0
    given_options = {name: value for name, value in options.items() if value is not None}
    how = verification(given.verify, given.verify_timeout_s, options, given.measure)
    plan = model.plan(step, shapes, given_options, measure=given.measure, **how)
    return show(plan, given.json, given.html, given.explain)


def _plan_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `autoshard.plan` that named models and own steps share; None if not given."""
    from autoshard.train.program.planned_step import parse_mesh

    return {
        "target": given.target,
        "mesh": parse_mesh(given.mesh),
        "plan": given.plan,
        "memory_limit_bytes": given.memory_limit_bytes,
        "fixed": unique("--fixed", map(parse_fixed, given.fixed)) or None,
        "compiler_options": given.compiler_options or None,
        "gather": given.gather,
        "overlap": given.overlap or None,
        "kernels": given.kernels,
        "schedule": given.schedule,
    }


def _run_own(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Plan the step that `MODULE:FUNCTION` returns."""
    import autoshard
    from autoshard.sharding.rewrite.printed_program import function_text

    step, values, own = own_step(given, arguments)
    if given.show:
        print(function_text(step, *values))
        return 0
    options = _plan_options(given) | own
    if given.explain:
        _check_explain(given.explain, step, values, options["mesh"], given.plan)
    plan = autoshard.plan(
        step,
        *values,
        measure=given.measure,
        **verification(given.verify, given.verify_timeout_s, options, given.measure),
        **{name: value for name, value in options.items() if value is not None},
    )
    return show(plan, given.json, given.html, given.explain)


def _check_explain(
    requested: Sequence[str], step: Any, shapes: Sequence[Any], mesh: Mapping[str, int] | None, strategy: str | None
) -> None:
    """Refuse values of `--explain` that no plan can explain, before the search starts.

    Args:
        requested: the values of `--explain`.
        step: the train step.
        shapes: its arguments.
        mesh: the requested mesh, if any.
        strategy: the requested plan, if any.

    Raises:
        PlanError: a path is neither an input nor a result of the step, or a sharding is given for a result.
        ConfigError: a mesh axis exists in no plan.
    """
    import jax

    from autoshard.sharding.layout.plan_request import KINDS, may_be_mesh_axis
    from autoshard.sharding.program.argument_names import argument_names, path_forms
    from autoshard.sharding.program.tracing import path_of
    from autoshard.sharding.report.alternatives import check_fixable
    from autoshard.sharding.report.explanation import checked_path
    from autoshard.spmdrules.core.placement import axes_of, from_partition_spec

    inputs, outputs = (
        [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        for tree in (tuple(shapes), jax.eval_shape(step, *shapes))
    )
    arguments = argument_names(step)
    named_inputs = [path_forms(path, arguments) for path in inputs]
    for text in requested:
        path, *spec = parse_path_spec(text)
        found = checked_path(path, named_inputs, outputs)
        if not spec:
            continue
        check_fixable(path, found.group == 0)
        named = axes_of(from_partition_spec(spec[0], len(spec[0])))
        unknown = [axis for axis in named if not may_be_mesh_axis(axis, mesh, strategy)]
        if unknown:
            known = f"--mesh has {', '.join(mesh)}" if mesh else f"without --mesh, axes are named {', '.join(KINDS)}"
            raise ConfigError(f"--explain {text!r}: no plan has a mesh axis {unknown[0]!r}; {known}")
