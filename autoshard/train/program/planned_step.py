"""Plan the train step and the evaluation step, and give the shardings of the train state and the batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

import autoshard
from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.offload_words import globbed_names, moves_optimizer, offloaded_names
from autoshard.models.remat.policies import HOST
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.machines.targets import find_target, is_made_of
from autoshard.sharding.offload.words import AUTO, NONE, OPTIMIZER, Words
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.build import is_pipelined, make_program_of, train_step_of
from autoshard.train.program.constants import REMATS, SEARCHED_MICROBATCHES
from autoshard.train.program.offloading import plan_within_memory, planner_offload, planner_words
from autoshard.train.program.pretrained import with_dtype_note
from autoshard.train.program.remat_search import remat_search
from autoshard.train.program.remat_space import RematSpace
from autoshard.train.step.train_state import Program, TrainState, Tree
from autoshard.train.step.train_step import EvalStep, TrainStep, batch_shapes


@shown
@dataclass(frozen=True)
class PlacedStep:
    """A train step under its plan.

    Attributes:
        step: The sharded step; it donates its state.
        plan: Its plan.
        state_shapes: Shapes, dtypes and shardings of the state.
        batch_shapes: Shapes and dtypes of a batch.
        batch_shardings: Shardings of a batch.
    """

    step: Any
    plan: Any
    state_shapes: TrainState
    batch_shapes: dict[str, jax.ShapeDtypeStruct]
    batch_shardings: dict[str, NamedSharding]


@shown
@dataclass(frozen=True)
class PlacedEvalStep:
    """An evaluation step that takes the train state with its shardings as they are.

    Attributes:
        step: The sharded step.
        batch_shapes: Shapes and dtypes of a batch.
        batch_shardings: Shardings of a batch.
    """

    step: Any
    batch_shapes: dict[str, jax.ShapeDtypeStruct]
    batch_shardings: dict[str, NamedSharding]


def plan_options(config: TrainConfig) -> dict[str, Any]:
    """Return the keywords of `autoshard.plan` that the config sets."""
    options = {
        "mesh": parse_mesh(config.mesh),
        "target": config.target,
        "memory_limit_bytes": config.memory_limit_bytes,
        "plan": config.plan,
        "compiler_options": config.compiler_options,
        "gather": None if config.gather == "auto" else config.gather,
        "overlap": config.overlap,
        "kernels": None if config.kernels == "off" else config.kernels,
        "offload": planner_offload(config),
        "measure": config.measure or None,
        "schedule": config.schedule,
        "microbatches": config.microbatches if is_pipelined(config) and config.microbatches > 1 else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """Parse a mesh such as `data=4,model=2` into axis names and sizes.

    Raises:
        ConfigError: The text has another form.
    """
    if text is None:
        return None
    axes: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        name, _, size = part.partition("=")
        if not (name.isidentifier() and size.isdigit() and int(size) > 0) or name in axes:
            raise ConfigError(f"--mesh {text!r} is not a mesh: write axis names and sizes, such as data=4,model=2")
        axes[name] = int(size)
    return axes


def place_step(train_step: TrainStep, program: Program, config: TrainConfig, plan: Plan | None = None) -> PlacedStep:
    """Plan the train step, or bind a given plan to it, and collect its shardings. No array is allocated."""
    _check_devices(config)
    options: dict[str, Any] = plan_options(config)
    if plan is not None:  # it was made with the other options
        options = {"plan": plan, "target": config.target}
    step = autoshard.auto_shard(train_step, donate_argnums=0, **options)
    shapes, batch = program.abstract_state(), batch_shapes(config.batch_size, config.gpt.context, config.batch_kind)
    made = with_dtype_note(step.plan(shapes, batch), config, shapes)
    state_shardings, batch_shardings = made.in_shardings()
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings,
    )
    return PlacedStep(step, made, placed, batch, batch_shardings)


def search_variants(config: TrainConfig, **verification: Any) -> tuple[TrainConfig, Plan]:
    """Search what the layers keep, recompute or offload, and the number of microbatches, of the fastest step that fits.

    Values are offloaded only as `config.offload` says. The number of microbatches stays as configured in two cases:
    with `variants="given"`, and with dropout, because dropout masks are drawn per microbatch.

    Args:
        config: The run.
        **verification: Options `verify` and `verify_timeout_s` of `autoshard.plan`.

    Returns:
        The config with the best variant, and its plan, which lists the variants that were planned. A note of the plan
        names each setting of `config` that the variant replaces, unless it had its default.

    Raises:
        ConfigError: The model is not the built-in one.
        AutoshardError: No variant can be planned with the config's plan, mesh and limit.
    """
    if not config.is_built_in:
        raise ConfigError(
            f"--variants search supports only the built-in model, not {config.model_name}: leave out --variants"
        )
    steps: dict[Any, TrainStep] = {}
    program = make_program_of(config)
    pipelined, automatic = is_pipelined(config), config.offload == AUTO
    names = () if automatic else offloaded_names(config.offload)
    free = config.variants == "search" and not config.gpt.dropout
    counts = {config.microbatches, *(n for n in SEARCHED_MICROBATCHES if free and not config.batch_size % n)}
    batch = batch_shapes(config.batch_size, config.gpt.context)

    def variant(remat: str, microbatches: int) -> TrainConfig:
        # The policy takes the place of the names of `offload`, which it may contain.
        state = OPTIMIZER if moves_optimizer(config.offload) else NONE
        return replace(
            config,
            offload=AUTO if automatic else state,
            microbatches=microbatches,
            gpt=replace(config.gpt, remat=remat),
        )

    def train_step(state: TrainState, batch: Mapping[str, Any], *, remat: str, microbatches: int) -> Any:
        if (remat, microbatches) not in steps:
            chosen = variant(remat, microbatches)
            steps[remat, microbatches] = train_step_of(chosen, make_program_of(chosen))
        return steps[remat, microbatches](state, batch)

    stacked_state = make_program_of(_stacked(variant("none", 1))).abstract_state()

    def stacked_step(remat: str, microbatches: int) -> tuple[Any, ...]:
        chosen = _stacked(variant(remat, microbatches))
        return train_step_of(chosen, make_program_of(chosen)), stacked_state, batch

    options = {name: value for name, value in plan_options(config).items() if name != "offload"}

    def planned(words: Words) -> Plan:
        if pipelined:  # the planner chooses the microbatches
            remats = [f"{HOST}:{'+'.join(names)}"] if names else REMATS
            variants: Any = {"remat": remats, "microbatches": [config.microbatches]}
        else:
            variants = remat_search(
                RematSpace(
                    stacked_step,
                    tuple(NAMED_VALUES),
                    config.gpt.layers,
                    sorted(counts),
                    offloads=automatic,
                    host=names,
                    optional=() if automatic else globbed_names(config.offload),
                    options=options | {"offload": words},
                )
            )
        shapes = program.abstract_state(), batch
        how = {"variants": variants, "offload": words or None, **verification, **options}
        return autoshard.plan(train_step, *shapes, donate_argnums=0, **how)

    if automatic:
        place = {name: options.get(name) for name in ("mesh", "target")}
        plan = plan_within_memory(planned, (), (AUTO,) if pipelined else (OPTIMIZER,), **place)
    else:
        plan = planned(planner_words(config.offload, "", pipelined=pipelined))
    found = variant(**plan.variant)
    return found, plan.where(notes=(*plan.notes, *_replaced(config, found)))


def _replaced(given: TrainConfig, found: TrainConfig) -> list[str]:
    """Return a note for each setting that a search replaced, unless it had its default."""
    settings = (
        ("gpt.remat", given.gpt.remat, found.gpt.remat, type(given.gpt)().remat),
        ("microbatches", given.microbatches, found.microbatches, type(given).microbatches),
    )
    ways = {
        "--variants given": given.variants == "search",
        "another --offload than auto": given.offload == AUTO,
    }
    keeps = " with ".join(way for way, is_needed in ways.items() if is_needed)
    return [
        f"the search chose {name} {after} in place of {before}, which was set; {keeps} keeps it"
        for name, before, after, default in settings
        if before not in (after, default)
    ]


def _stacked(config: TrainConfig) -> TrainConfig:
    return replace(config, gpt=replace(config.gpt, scan_layers=True))


def _check_devices(config: TrainConfig) -> None:
    """Refuse a mesh that is larger than this machine, and a target of other devices, before planning."""
    if config.target is not None and not is_made_of(find_target(config.target), jax.devices()):
        kind = jax.devices()[0].device_kind
        raise ConfigError(
            f"--target {config.target} is another machine than this one, whose devices are {kind}: leave out --target "
            f"to train here. `autoshard plan ... --target {config.target}` shows its plan anywhere"
        )
    requested, attached = math.prod((parse_mesh(config.mesh) or {}).values()), jax.device_count()
    if requested > attached:
        raise ConfigError(
            f"--mesh {config.mesh} has {requested} devices, this machine has {attached}: give a smaller mesh, or on "
            f"CPU --virtual-devices {requested}"
        )


def place_eval_step(eval_step: EvalStep, state_parts: tuple[Tree, Tree, Tree], config: TrainConfig) -> PlacedEvalStep:
    """Plan the evaluation step on the mesh of the train state's arrays.

    Under a pipeline, the forward passes run in its stages, and the arrays stay where they are.
    """
    mesh = jax.tree.leaves(state_parts)[0].sharding.mesh
    options: dict[str, Any] = {"mesh": mesh, "compiler_options": config.compiler_options}
    if config.kernels != "off":
        options["kernels"] = "auto"
    if config.stages > 1:
        same = ("plan", "microbatches", "schedule", "gather")
        options |= {name: x for name, x in plan_options(config).items() if name in same}
    step = autoshard.auto_shard(eval_step, **options)
    batch = batch_shapes(config.eval_batch_size, config.gpt.context, config.batch_kind)
    batch_shardings = step.plan(*state_parts, batch).in_shardings()[3]
    return PlacedEvalStep(step, batch, batch_shardings)
