"""From a recipe to what the planner takes: a workload, a target and a strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import recipe_stand_ins as stand_ins
from recipe_file import Entry, Recipe
from recipe_words import Remat, Sharding, WordsError, parse_note, parse_remat, parse_sharding

from autoshard.errors import AutoshardError
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.moe_config import MoEConfig
from autoshard.models.workloads import WORKLOADS, Workload, workload
from autoshard.sharding.machines.targets import TargetError, find_target
from autoshard.train.step.optimizer import OptimizerConfig


class UnavailableError(Exception):
    """A recipe that cannot be planned; the message says why."""


@dataclass(frozen=True)
class Settings:
    """A recipe in the planner's terms.

    Attributes:
        recipe: the recipe, with the settings of its note.
        work: its workload, with the recipe's remat as far as our policies have it.
        sharding: its mesh.
        remat: what a layer does with its values.
        optimizer: AdamW, with the dtype of the recipe's first moment.
        notes: what the workload leaves out, and the recipe's kernels.
        same_precision: whether its products have the recipe's precision.
    """

    recipe: Recipe
    work: Workload
    sharding: Sharding
    remat: Remat
    optimizer: OptimizerConfig
    notes: tuple[str, ...]
    same_precision: bool


def settings_of(entry: Entry) -> Settings:
    """Map a row of a file.

    Raises:
        UnavailableError: the row cannot be read, its model or machine is unknown, or its words are not understood.
    """
    if entry.recipe is None:
        raise UnavailableError(f"not readable: {'; '.join(entry.problems)}")
    recipe = entry.recipe
    from_note = {key: value for key, value in parse_note(recipe.note).items() if getattr(recipe, key) is None}
    recipe = replace(recipe, **from_note)
    if recipe.model not in WORKLOADS:
        raise UnavailableError("model not available")
    try:
        target = find_target(recipe.machine)
        machine = {"devices": target.devices, "slices": recipe.slices, "devices_per_chip": target.chip.cores}
        sharding = parse_sharding(recipe.sharding, **machine)
        actions = parse_remat(recipe.remat)
    except TargetError as error:
        raise UnavailableError(f"target not available: {error}") from error
    except WordsError as error:
        raise UnavailableError(f"not understood: {error}") from error
    base = workload(recipe.model)
    changes: dict[str, Any] = {"context": recipe.seq}
    if recipe.param_dtype is not None:
        changes["param_dtype"] = recipe.param_dtype
    if isinstance(base.config, MoEConfig):
        changes |= {name: getattr(recipe, name) for name in ("dispatch", "capacity_factor") if getattr(recipe, name)}
    precision = stand_ins.precision(recipe, dropless=_is_dropless(base.config, changes))
    missing = (
        stand_ins.remat(actions),
        stand_ins.attention(recipe),
        precision,
        stand_ins.embedding(recipe),
        stand_ins.loss(recipe),
    )
    for each in missing:
        changes |= each.changes
    try:
        work = base.with_(batch_size=recipe.batch, **changes)
    except (AutoshardError, ValueError) as error:
        raise UnavailableError(f"not possible: {error}") from error
    ignored = tuple(f"field {name!r} is unknown and ignored" for name in entry.ignored)
    kernel = stand_ins.kernel_note(recipe)
    notes = (*(each.note for each in missing if each.note), *([kernel] if kernel else []), *ignored)
    optimizer = _optimizer(recipe.moment_dtype, recipe.param_dtype or "float32")
    return Settings(recipe, work, sharding, actions, optimizer, notes, same_precision=not precision.note)


def _optimizer(moment_dtype: str | None, param_dtype: str) -> OptimizerConfig:
    """Return AdamW with a first moment in this dtype; by default that of the parameters."""
    if moment_dtype in (None, param_dtype):
        return OptimizerConfig()
    return OptimizerConfig(arguments=(f"mu_dtype={moment_dtype}",))


def _is_dropless(config: Any, changes: dict[str, Any]) -> bool:
    """Say whether the model has experts that drop no choice. Those of a `Decoder` never do."""
    if isinstance(config, DecoderConfig):
        return config.experts is not None
    return changes.get("dispatch", getattr(config, "dispatch", None)) == "dropless"
