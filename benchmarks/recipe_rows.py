"""One row of results for each recipe: its own settings as a plan, and our best plan, predicted and compiled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import common
from estimate import CHIPS as JUDGED
from plan_rows import Planned, Row, Store
from recipe_file import Entry, Options
from recipe_settings import Settings, UnavailableError, settings_of

from autoshard import plan
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.sharding.audit.aot_compile import missing_compiler
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.options import (
    asynchronous_kinds,
    keeps_gathers,
    keeps_reduce_scatters,
    reported_numerics,
    without_reported,
)
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_step, workload_variants
from autoshard.train.program.workload_search import workload_search

FOLDER = common.RESULTS / "recipes"


@dataclass(frozen=True)
class Side:
    """A plan of a recipe's step: the recipe's own, or our best one. Seconds and bytes are of one device and one step.

    Attributes:
        words: the strategy; empty if there is no plan.
        remat: the policy of the layers.
        microbatches: the number of microbatches.
        predicted: the planner's `seconds`, `compute_seconds`, `exposed_seconds`, `memory_bytes`, `host_bytes`,
            `limit_bytes`; empty if there is no plan.
        compiled: the referee's figures, see `_compiled`; None if it was not compiled.
        problem: why there is no plan, or why it was not compiled.
    """

    words: str = ""
    remat: str = ""
    microbatches: int = 1
    predicted: Mapping[str, float] = field(default_factory=dict)
    compiled: Mapping[str, Any] | None = None
    problem: str = ""

    @property
    def seconds(self) -> float | None:
        """The predicted step time; None if there is no plan."""
        return self.predicted.get("seconds")

    @property
    def fits(self) -> bool | None:
        """Whether the planner says that it fits; None if there is no plan."""
        if not self.predicted:
            return None
        return not self.predicted["limit_bytes"] or self.predicted["memory_bytes"] <= self.predicted["limit_bytes"]

    @property
    def name(self) -> str:
        """`fsdp:16, full, 2 microbatches`."""
        if not self.words:
            return ""
        return f"{self.words}, {self.remat}" + (f", {self.microbatches} microbatches" if self.microbatches > 1 else "")


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


def result_of(entry: Entry, *, compile_plans: bool, timeout_s: float, folder: Path = FOLDER) -> Result:
    """Plan a recipe, and compile both plans if asked to.

    Args:
        entry: a row of a file.
        compile_plans: whether to compile the plans and let the referee judge them.
        timeout_s: seconds after which a compiler is stopped.
        folder: the folder for compiled rows.
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
    options, chip = settings.recipe.xla_options, settings.recipe.machine.partition(":")[0]
    found = reported_numerics(chip, options or {})
    if compile_plans:
        store = Store(entry.id, settings.recipe.machine, folder, timeout_s)
        if found and options is not None:
            without = without_reported(chip, options)
            head["recipe_without"] = _with_compiled(own, own_made, store, "recipe without", without)
        own = _with_compiled(own, own_made, store, "recipe", options)
        best = _with_compiled(best, best_made, store, "plan", None)
    head |= {"remat": dict(settings.remat.actions), "notes": settings.notes}
    head["reported"] = tuple(f"{name} ({report})" for name, report in found)
    head["same_precision"] = settings.same_precision
    return Result(**head, status="ok", recipe=own, best=best)


def own_plan(settings: Settings) -> tuple[Side, Any]:
    """Plan the recipe's own settings, whether they fit or not. Compute hides what it can under the recipe's options."""
    work, words = settings.work, settings.sharding.words
    remat = getattr(work.config, "gpt", work.config).remat
    with _recipe_options(settings), _unless_impossible() as outcome:
        made = plan(*workload_step(work), target=settings.recipe.machine, plan=words, donate_argnums=0)
        return _side(made, remat, 1), made
    return Side(words=words, remat=remat, problem=outcome.problem), None


def _best_plan(settings: Settings) -> tuple[Side, Any]:
    """Search for our best plan over all variants that keep the values, with values on the host where that pays."""
    work, target = settings.work, settings.recipe.machine
    with _unless_impossible() as outcome:
        search = workload_search(work, {"target": target})
        made = plan(*workload_variants(work), target=target, variants=search, donate_argnums=0)
        return _side(made, **made.variant), made
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


@dataclass
class _Outcome:
    """Why there is no plan; empty if there is one."""

    problem: str = ""


@contextlib.contextmanager
def _unless_impossible() -> Iterator[_Outcome]:
    """Plan without warnings, because the result says whether a plan fits, and turn errors into an outcome."""
    outcome = _Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        try:
            yield outcome
        except AutoshardError as error:
            outcome.problem = str(error)
        except Exception as error:  # a fault of the planner in one row must not cost the others
            outcome.problem = f"the planner failed: {type(error).__name__}: {error}"


def _side(made: Any, remat: str, microbatches: int) -> Side:
    found = made.estimate
    predicted = {
        "seconds": found.step_time_us / 1e6,
        "compute_seconds": found.compute_us / 1e6,
        "exposed_seconds": (found.step_time_us - found.compute_us) / 1e6,
        "memory_bytes": found.peak_memory_bytes,
        "host_bytes": found.host_memory_bytes,
        "limit_bytes": made.limit_bytes,
    }
    return Side(made.chosen, remat, microbatches, predicted)


def _with_compiled(side: Side, made: Any, store: Store, name: str, options: Options | None) -> Side:
    """Compile a plan under these options, by default its own, and let the referee judge it."""
    if made is None:
        return side
    if problem := _not_judged(store.target):
        return replace(side, problem=problem)
    platform = find_target(store.target).platform
    used: Any = made.compiler_options.get(platform, {}) if options is None else options
    predicted = {"step": side.predicted["seconds"], "memory_bytes": side.predicted["memory_bytes"]}
    planned = Planned(name, side.words, side.words, side.remat, side.microbatches, None, predicted)
    try:
        row = store.finish(planned, used, export_plan(bound_or_error(made.bound).executable, used))
    except Exception as error:  # a fault of the export or of the referee in one row must not cost the others
        return replace(side, problem=f"not judged: {type(error).__name__}: {error}")
    return replace(side, compiled=_compiled(row), problem=row.message)


def _not_judged(target: str) -> str:
    """Why the referee does not judge programs of a target; empty if it does."""
    chip = target.partition(":")[0]
    platform = find_target(target).platform
    if "*" in target:
        return "not compiled: the referee does not know the network between slices"
    if chip not in JUDGED or platform != "tpu":
        return f"not compiled: predicted only on {chip}"
    return missing_compiler(platform) or ""


def _compiled(row: Row) -> dict[str, Any]:
    """The figures of a compiled plan.

    `kind` is `ok`, or how it failed; `seconds` is by measure (`cycles`, `roofline`); `memory_bytes` is the compiler's
    peak; `dropped` are the options that the compiler does not know.
    """
    return {
        "kind": row.kind,
        "fits": row.ok,
        "seconds": dict(row.step),
        "exposed_seconds": dict(row.exposed),
        "memory_bytes": row.needed_bytes,
        "limit_bytes": row.limit_bytes,
        "dropped": list(row.dropped),
        "options": dict(row.options),
        "versions": dict(row.versions),
    }
