"""One row of results for each recipe: its own settings as a plan, and our best plan, predicted and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import common
from plan_rows import Store
from plan_sides import Side, moved_by_compiler, side_of, unless_impossible, with_compiled
from recipe_file import Entry
from recipe_settings import Settings, UnavailableError, settings_of

from autoshard import plan
from autoshard.sharding.audit.aot_compile import Until
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.options import (
    Options,
    applicable_sets,
    asynchronous_kinds,
    keeps_gathers,
    keeps_reduce_scatters,
    reported_numerics,
    with_set,
    without_reported,
)
from autoshard.sharding.machines.options.host_memory import LINK_SPEEDS
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.plan.program_facts import program_facts
from autoshard.train.program.build import workload_step, workload_variants
from autoshard.train.program.workload_search import workload_search

FOLDER = common.RESULTS / "recipes"


@dataclass(frozen=True)
class Result:
    """The results of a recipe.

    Attributes:
        id: its id.
        status: `ok`, or why it cannot be planned.
        measured: its measured seconds; None if the row cannot be read.
        model: the model.
        target: the machine.
        precision: of the products.
        same_precision: whether they are planned in this precision.
        remat: what the recipe does with a layer's values: our name -> action.
        notes: what the plans leave out of the recipe.
        recipe: the recipe's own settings.
        best: our best plan.
        reported: option sets of the recipe for which wrong numbers were reported on this chip, with the report.
        recipe_without: the recipe's own settings, compiled without these options; None if it has none of them.
        best_with: our best plan if these option sets are requested; None if the recipe has none of them.
    """

    id: str
    status: str
    measured: float | None = None
    model: str = ""
    target: str = ""
    precision: str = ""
    same_precision: bool = True
    remat: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recipe: Side = Side()
    best: Side = Side()
    reported: tuple[str, ...] = ()
    recipe_without: Side | None = None
    best_with: Side | None = None


def result_of(
    entry: Entry, *, compile_plans: bool, timeout_s: float, folder: Path = FOLDER, until: Until = "code"
) -> Result:
    """Plan a recipe, and compile both plans if asked to.

    Args:
        entry: a row of a file.
        compile_plans: whether to compile the plans and let the referee judge them.
        timeout_s: seconds after which a compiler is stopped.
        folder: the folder for compiled rows.
        until: how far programs are compiled (`compile_job`).
    """
    given = entry.recipe
    head: dict[str, Any] = {"id": entry.id}
    if given is not None:
        head |= {"measured": given.seconds, "model": given.model, "target": given.machine}
        head["precision"] = given.precision
    try:
        settings = settings_of(entry)
    except UnavailableError as error:
        return Result(**head, status=str(error))
    own, own_made = own_plan(settings)
    best, best_made = _best_plan(settings)
    best_with, made_with = None, None
    options, chip = settings.recipe.xla_options, settings.recipe.machine.partition(":")[0]
    found = reported_numerics(chip, options or {})
    if found:
        best_with, made_with = _best_plan(settings, [name for name, _ in found])
    if compile_plans:
        store = Store(entry.id, settings.recipe.machine, folder, timeout_s, until)
        if found and options is not None:
            without = without_reported(chip, options)
            head["recipe_without"] = with_compiled(own, own_made, store, "recipe without", without, compiler_moves=True)
        own = with_compiled(own, own_made, store, "recipe", options, compiler_moves=True)
        best = with_compiled(best, best_made, store, "plan", None, alternatives=_link_options(best_made))
        if best_with is not None:
            links = _link_options(made_with)
            best_with = with_compiled(best_with, made_with, store, "plan with", None, alternatives=links)
    head |= {"remat": dict(settings.remat.actions), "notes": settings.notes}
    head["reported"] = tuple(f"{name} ({report})" for name, report in found)
    head["same_precision"] = settings.same_precision
    return Result(**head, status="ok", recipe=own, best=best, best_with=best_with)


def _link_options(made: Any) -> list[Options]:
    """The options of our plan with each option set for the host's link; empty if it moves no values to the host.

    `verify` tries these sets, and more.
    """
    if made is None or (facts := program_facts(made)) is None:
        return []
    own: Options = made.compiler_options.get("tpu", {})
    return [with_set(own, each, facts) for each in applicable_sets(facts, own) if each.name in LINK_SPEEDS]


def own_plan(settings: Settings) -> tuple[Side, Any]:
    """Plan the recipe's own settings, whether they fit or not, as they are compiled.

    Compute hides what it can under the recipe's options, and the compiler moves slices of stacks in host memory.
    """
    work, words = settings.work, settings.sharding.words
    remat = getattr(work.config, "gpt", work.config).remat
    with _recipe_options(settings), moved_by_compiler(), unless_impossible() as outcome:
        step = workload_step(work, optimizer=settings.optimizer)
        made = plan(*step, target=settings.recipe.machine, plan=words, donate_argnums=0)
        return side_of(made, remat, 1), made
    return Side(words=words, remat=remat, problem=outcome.problem), None


def _best_plan(settings: Settings, option_sets: Sequence[str] = ()) -> tuple[Side, Any]:
    """Search for our best plan over all variants that keep the values, with values on the host where that pays."""
    work, target = settings.work, settings.recipe.machine
    options: dict[str, Any] = {"compiler_options": list(option_sets)} if option_sets else {}
    with unless_impossible() as outcome:
        search = workload_search(work, {"target": target}, optimizer=settings.optimizer)
        step = workload_variants(work, settings.optimizer)
        made = plan(*step, target=target, variants=search, donate_argnums=0, **options)
        return side_of(made, **made.variant), made
    return Side(problem=outcome.problem), None


@contextlib.contextmanager
def _recipe_options(settings: Settings) -> Iterator[None]:
    """Plan for a chip on which compute hides what it can under the recipe's options.

    Compute is assumed to hide at least what it hides under the chip's default sets: recipes are tuned for that, some by
    options whose effect on reductions no compiled program has shown.
    """
    target, options = find_target(settings.recipe.machine), settings.recipe.xla_options
    name = next(name for name, chip in CHIPS.items() if chip == target.chip)
    if target.platform != "tpu" or not options:
        yield
        return
    kinds = dict.fromkeys((*target.chip.hides, *asynchronous_kinds(name, options)))
    keeps = {
        "keeps_gathers": keeps_gathers(name, options),
        "keeps_reduce_scatters": keeps_reduce_scatters(name, options),
    }
    chip = replace(target.chip, hides=tuple(kinds), **keeps)
    with mock.patch.dict(CHIPS, {name: chip}):  # pyright: ignore[reportArgumentType]
        yield
