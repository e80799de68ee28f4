"""The search over the variants of a named workload: what its layers keep, recompute or offload, and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.errors import ConfigError
from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.offload_words import (
    globbed_names,
    names_values,
    offload_remat,
    offloaded_names,
    selects_layers,
)
from autoshard.models.wide_resnet import WideResNetConfig
from autoshard.models.workloads import Workload
from autoshard.sharding.offload.words import AUTO, OPTIMIZER
from autoshard.sharding.planner.variants import Attempt
from autoshard.train.program.build import (
    ADAMW,
    remat_unit_count,
    variant_search,
    workload_steps,
    workload_variant_values,
)
from autoshard.train.program.constants import REMATS
from autoshard.train.program.remat_search import remat_search
from autoshard.train.program.remat_space import RematSpace
from autoshard.train.step.optimizer import OptimizerConfig


def workload_search(
    work: Workload,
    options: Mapping[str, Any],
    *,
    offload: str = AUTO,
    remat: str | None = None,
    microbatches: int | None = None,
    numerics: bool = False,
    optimizer: OptimizerConfig = ADAMW,
    pipelined: bool = False,
) -> Callable[[Sequence[Attempt]], list[dict[str, Any]]]:
    """Make the function that `autoshard.plan` takes as `variants` for the step of `workload_variants`.

    Args:
        work: the workload.
        options: `target`, `mesh`, `plan`, `memory_limit_bytes`, `fixed`, `offload` and others of `autoshard.plan`, as
            far as given.
        offload: `auto`, `none`, or words of what waits on the host.
        remat: the policy of the layers; None to search for it.
        microbatches: the number of microbatches; None to search for it.
        numerics: whether to try numbers of microbatches that change the results.
        optimizer: how parameters are updated.
        pipelined: whether the planner cuts the step into stages and microbatches. Then the variants are the policies.

    Raises:
        ConfigError: `offload` and `remat` contradict each other, a name is unknown, or the model has no named values.
    """
    names = named_values_of(work.config)
    host = checked_offload(offload, has_named_values=bool(names), model=work.name)
    if remat is not None and host:
        raise ConfigError(
            f"offload is {offload!r} and remat is {remat!r}; both say what a layer keeps. Give one of them; "
            f"remat='host:{'+'.join(host)} keep:NAMES' says what stays on the device, too"
        )
    if host and (pipelined or selects_layers(offload)):
        remat = _selective_remat(work, offload)
    if pipelined:
        policies = REMATS if remat is None else (remat,)
        return lambda attempts: [] if attempts else [{"remat": policy} for policy in policies]
    values = workload_variant_values(work, numerics=numerics)
    if microbatches is not None:
        values["microbatches"] = [microbatches]
    if remat is not None:
        values["remat"] = [remat]
    if remat is not None or not names:
        return variant_search(values, remat_unit_count(work.config))
    space = RematSpace(
        workload_steps(work.with_(scan_layers=True, remat="none"), optimizer),
        names,
        remat_unit_count(work.config),
        values["microbatches"],
        offloads=offload == AUTO,
        host=host,
        optional=() if offload == AUTO else globbed_names(offload),
        options=options,
    )
    return remat_search(space)


def _selective_remat(work: Workload, offload: str) -> str:
    """Return the policies of the layers for an `offload` that names values.

    Raises:
        ConfigError: a slice is not valid, or the layers are stacked and cannot differ as the slices say.
    """
    scan = getattr(getattr(work.config, "gpt", work.config), "scan_layers", False)
    try:
        layers = remat_unit_count(work.config)
        return offload_remat(offload, layers, scan=scan, written_out="--set scan_layers=False")
    except ValueError as error:
        raise ConfigError(f"{work.name}: {error}") from error


def named_values_of(config: Any) -> tuple[str, ...]:
    """Return the named values that the layers of a model may have, in the order of a layer."""
    return () if isinstance(config, WideResNetConfig) else tuple(NAMED_VALUES)


def checked_offload(offload: str, *, has_named_values: bool, model: str) -> tuple[str, ...]:
    """Return the names of a layer's values that a text of `offload` moves to the host; none for `auto` and `none`.

    Raises:
        ConfigError: a name is unknown, or the model has no named values.
    """
    if offload == AUTO:
        return ()
    if names_values(offload) and not has_named_values:
        raise ConfigError(
            f"offload is {offload!r}, but the layers of {model} have no named values. Give auto, none or {OPTIMIZER}, "
            "or give remat one of its words"
        )
    try:
        return offloaded_names(offload)
    except ValueError as error:
        raise ConfigError(str(error)) from error
