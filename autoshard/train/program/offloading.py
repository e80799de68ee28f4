"""What of a run waits in the host's memory, and what moves it.

                             built-in model      in a pipeline       other models
    values of a layer        its layers          the planner         the planner
    the optimizer's state    the planner         the planner         the planner

The layers of the built-in model move values by their policy, `remat`. In a pipeline, values wait in slots of the
stages, which only the planner fills. So there the layers keep the values, and the planner moves them. A pretrained
model, or one of the user's own, gets all words of `offload=` of `auto_shard`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from autoshard.errors import PlanError
from autoshard.models.remat.offload_words import moves_optimizer, offload_remat, offloaded_names, value_patterns
from autoshard.models.remat.policies import host_names
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.machines.device_mesh import MeshLike, find_machine
from autoshard.sharding.offload.words import AUTO, NONE, OPTIMIZER, Words
from autoshard.sharding.planner.infeasible import DoesNotFitError
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.build import is_pipelined
from autoshard.train.program.constants import OFFLOADING_PLATFORMS


def with_offload(config: TrainConfig) -> TrainConfig:
    """Return the config with the remat policy that the names of `offload` set. Searched variants stay as they are."""
    if not config.is_built_in or config.searches_variants or not offloaded_names(config.offload):
        return config
    remat = offload_remat(config.offload, config.gpt.layers, scan=config.gpt.scan_layers)
    return replace(config, gpt=replace(config.gpt, remat=remat))


def planner_words(offload: str, remat: str, *, pipelined: bool) -> Words:
    """Return the words of the planner's `offload=` for layers of this package.

    Args:
        offload: words, not `auto`.
        remat: the policy of the layers.
        pipelined: whether the layers run in the stages of a pipeline.
    """
    state = (OPTIMIZER,) if moves_optimizer(offload) else ()
    if not pipelined:
        return state
    named = offloaded_names(offload)
    return (*value_patterns(offload), *(name for name in host_names(remat) if name not in named), *state)


def planner_offload(config: TrainConfig) -> str | Words | None:
    """Return the planner's `offload=` for a run; None if it moves nothing."""
    if not config.is_built_in or config.offload == AUTO:
        return None if config.offload.strip() == NONE else config.offload
    return planner_words(config.offload, config.gpt.remat, pipelined=is_pipelined(config)) or None


def plan_within_memory(
    planned: Callable[[Words], Plan], words: Words, otherwise: Words, *, mesh: MeshLike | None, target: str | None
) -> Plan:
    """Plan a step with `offload="auto"`. If no plan fits, more may wait on the host.

    Args:
        planned: plans the step with the planner's words.
        words: what the planner moves in any case.
        otherwise: what it moves if nothing fits.
        mesh: see `autoshard.plan`.
        target: see `autoshard.plan`.

    Raises:
        PlanError: nothing fits, and a limit or a target was given.
    """
    machine = find_machine(mesh, target).target
    if machine.platform not in OFFLOADING_PLATFORMS or not machine.chip.host_bandwidth:
        return planned(words)
    first = failure = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            first = planned(words)
        except DoesNotFitError as error:
            failure = error
    if first is None or not first.fits:
        more = _if_fits(planned, otherwise)
        if more is not None:
            return more
    for each in caught:
        warnings.warn(each.message, each.category, stacklevel=3)
    if failure is not None:
        raise DoesNotFitError(f"{failure}. With more in host memory ({'+'.join(otherwise)}), nothing fits either")
    assert first is not None
    return first


def _if_fits(planned: Callable[[Words], Plan], words: Words) -> Plan | None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = planned(words)
        except PlanError:
            return None
    if not made.fits or not made.offload:
        return None
    for each in caught:
        warnings.warn(each.message, each.category, stacklevel=4)
    note = f"no plan fits with less in host memory, so offload='auto' also moves {'+'.join(made.offload)}"
    return made.where(notes=(*made.notes, note))
