"""What a resumed run keeps: its settings, its searched variant, and its plan as far as the devices allow.

If the run had other devices, its plan is made anew:

    the run requested a plan or a mesh    it is scaled in its own words, `fsdp:8` to `fsdp:4`. If no scaled plan divides
                                          the batch and fits in memory, a plan is searched
    the run searched its plan             a plan is searched
"""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from autoshard.ckpt import Checkpointer
from autoshard.errors import AutoshardWarning, CheckpointError, ConfigError, PlanError, PlanRequestError
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.layout.plan_request import is_request, parse_request
from autoshard.sharding.layout.request_scaling import scaled_meshes, scaled_requests
from autoshard.sharding.machines.targets import find_target, target_for
from autoshard.train.config import run_directory
from autoshard.train.config.merging import changed_settings
from autoshard.train.config.stored_config import from_dict, identity
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.offloading import planner_offload
from autoshard.train.program.planned_step import PlacedStep, parse_mesh

Place = Callable[[TrainConfig, Plan | None], PlacedStep]
"""Plans the train step with the options of a config, or binds a given plan to it."""


def stored_config(config: TrainConfig) -> TrainConfig:
    """Read the settings of the run that a config resumes.

    Raises:
        ConfigError: The folder has no run, or its settings are damaged.
    """
    run_dir = config.run_dir
    if run_dir is None or not run_directory.is_taken(run_dir):
        raise ConfigError(f"--resume: {str(run_dir)!r} is not a run: give the folder of a run with --run-dir")
    return from_dict(run_directory.read_config(run_dir), str(run_dir))


def with_searched_variant(config: TrainConfig, stored: TrainConfig) -> TrainConfig:
    """Return the config with the remat policy and microbatches that the run searched at its start, if it did so."""
    if not (config.searches_variants and stored.searches_variants):
        return config
    kept = replace(config, microbatches=stored.microbatches, gpt=replace(config.gpt, remat=stored.gpt.remat))
    if kept != config:
        warnings.warn(
            f"the run keeps the variant that it searched at its start: --gpt.remat {kept.gpt.remat} --microbatches "
            f"{kept.microbatches}, not --gpt.remat {config.gpt.remat} --microbatches {config.microbatches}",
            AutoshardWarning,
            stacklevel=2,
        )
    return kept


def with_newer_request(config: TrainConfig) -> TrainConfig:
    """Return the config of a resumed run without stored settings of its plan that newer ones contradict.

    `--mesh data=4,model=2` contradicts a stored `--plan fsdp:8`, because that plan has another mesh.
    """
    now, before = _requested(config), _requested(stored_config(config))
    newer = {name: value for name, value in now.items() if value not in (None, before[name])}
    kept = {name: value for name, value in now.items() if value is not None and name not in newer}
    replaced = [name for name in kept if not all(_agree({name: kept[name]} | {n: v}) for n, v in newer.items())]
    if not replaced:
        return config
    old, new = (
        " ".join(f"--{name} {_value(value)}" for name, value in some.items())
        for some in ({name: kept[name] for name in replaced}, newer)
    )
    warnings.warn(f"{new} replaces {old} of the resumed run: they do not fit together", AutoshardWarning, stacklevel=2)
    return replace(config, **dict.fromkeys(replaced))


def _agree(requested: Mapping[str, str]) -> bool:
    """Whether two of a plan, a mesh and a target fit together: the same axes, or as many devices."""
    plan, mesh, target = (requested.get(name) for name in ("plan", "mesh", "target"))
    if plan is not None and mesh is not None:
        return dict(parse_request(plan).sizes) == parse_mesh(mesh)
    devices = parse_request(plan).devices if plan is not None else math.prod((parse_mesh(mesh) or {}).values())
    return target is None or devices == find_target(target).devices


def check_same_run(config: TrainConfig, stored: TrainConfig) -> None:
    """Refuse settings that differ from those of the run and that define what is trained.

    Raises:
        ConfigError: Settings differ; the message has each option with its value and that of the run.
    """
    changed = changed_settings(identity(stored), identity(config))
    if not changed:
        return
    problems = [f"{_option(name)} is {_value(now)}, the run has {_value(before)}" for name, before, now in changed]
    # A setting without a value, such as no --data, cannot be given as an option.
    given = [_setting(name, before) for name, before, _ in changed if before not in (None, [])]
    left_out = [_option(name) for name, before, _ in changed if before in (None, [])]
    verbs = {"give": given, "leave out": left_out}
    remedy = " and ".join(f"{verb} {' '.join(options)}" for verb, options in verbs.items() if options)
    raise ConfigError(
        f"{str(config.run_dir)!r} cannot be resumed with other settings: {'; '.join(problems)}. "
        f"{remedy[0].upper()}{remedy[1:]}, or give another --run-dir"
    )


def check_resumable(config: TrainConfig, digest: str | None, step: int, saved: Mapping[str, Any]) -> None:
    """Refuse to resume with other data, or from a step beyond the last.

    Args:
        config: The settings of the resumed run.
        digest: Digest of its data; None if unknown.
        step: Step of the restored checkpoint.
        saved: The checkpoint's config.

    Raises:
        ConfigError: The run cannot be resumed; the message lists all reasons.
    """
    before, problems = saved.get("data"), []
    if None not in (before, digest) and before != digest and not config.allow_other_data:
        problems.append(
            f"it was trained on other data than {config.data or 'the standard library'!r} has now "
            "(restore its data, or accept the new with --allow-other-data)"
        )
    if step > config.steps:
        problems.append(f"it is at step {step}, but --steps is {config.steps} (give --steps {step} or more)")
    if problems:
        raise ConfigError(
            f"{str(config.run_dir)!r} cannot be resumed: {'; '.join(problems)}. Or give another --run-dir"
        )


def saved_progress(config: TrainConfig) -> tuple[Path, int]:
    """Return the folder of a run that has started, and the step of its newest checkpoint; 0 without one."""
    assert config.run_dir is not None
    return config.run_dir, Checkpointer(config.run_dir / run_directory.CHECKPOINTS, keep=None).latest() or 0


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _setting(name: str, value: Any) -> str:
    """A setting as an option with its value: `--gpt.layers 2`, `--gpt.no-bias`."""
    if isinstance(value, bool):
        table, dot, last = name.rpartition(".")
        return _option(name if value else f"{table}{dot}no_{last}")
    return f"{_option(name)} {_value(value)}"


def _value(value: Any) -> str:
    """A value as it is written on the command line."""
    if value in (None, []):
        return "none"
    return shlex.join(map(str, value)) if isinstance(value, list) else shlex.quote(str(value))


def place_again(place: Place, config: TrainConfig, stored: TrainConfig) -> tuple[PlacedStep, str | None]:
    """Plan the train step of a resumed run.

    Args:
        place: Plans the step.
        config: The settings of the resumed run.
        stored: The settings that it had.

    Returns:
        The planned step, and one line that says why its plan differs from the one that the run had; None if it does
        not.
    """
    count = jax.device_count()
    if config.plan is None and config.mesh is None and config.target is None:
        saved, here = newest_plan(config), target_for(jax.devices(), count).name
        if saved is None or (saved.target == here and saved.mesh.size == count):
            same = all(
                getattr(config, name) == getattr(stored, name)
                for name in ("compiler_options", "gather", "overlap", "kernels")
            )
            moves_same = planner_offload(config) == planner_offload(stored)
            kept = same and moves_same and config.memory_limit_bytes is None
            return place(config, saved if kept else None), None
        placed = place(config, None)
        return placed, (
            f"planned anew: the checkpoint's plan, {saved.chosen}, is for {saved.target}; on {here} the plan is "
            f"{placed.plan.chosen}"
        )
    if not _lacks_devices(config, count):
        return place(config, None), None
    if _requested(config) != _requested(stored):  # the user's own request, which is not changed
        try:
            return place(config, None), None
        except (ConfigError, PlanError) as error:
            if not (new := _new_options(config, stored)):
                raise
            raise PlanError(
                f"{error}. Leave out {' and '.join(new)} to scale the plan of the run to {count} "
                f"device{'s' * (count > 1)}"
            ) from error
    before = " ".join(f"--{name} {_value(value)}" for name, value in _requested(config).items() if value is not None)
    why = f"planned anew: the run was started with {before}; on {count} device{'s' * (count > 1)} the plan is"
    for scaled in scalings(config, count):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                placed = place(scaled, None)
            except (PlanError, PlanRequestError):
                continue
        if placed.plan.fits:
            for each in caught:
                warnings.warn(each.message, each.category, stacklevel=2)
            return placed, f"{why} {placed.plan.chosen}"
    placed = place(replace(config, plan=None, mesh=None, target=None), None)
    return placed, f"{why} {placed.plan.chosen}, from a search, because no scaling of the request fits"


def _new_options(config: TrainConfig, stored: TrainConfig) -> list[str]:
    """The options of the plan that are new in a resumed run."""
    before = _requested(stored)
    return [_option(name) for name, value in _requested(config).items() if value not in (None, before[name])]


def _requested(config: TrainConfig) -> dict[str, str | None]:
    return {"plan": config.plan, "mesh": config.mesh, "target": config.target}


def _lacks_devices(config: TrainConfig, count: int) -> bool:
    """Whether the requested plan, mesh or target cannot be used with this number of attached devices."""
    if config.mesh is not None:
        return math.prod((parse_mesh(config.mesh) or {}).values()) > count
    if config.target is not None:
        return find_target(config.target).devices > count
    return config.plan is not None and is_request(config.plan) and parse_request(config.plan).devices != count


def scalings(config: TrainConfig, count: int) -> Iterator[TrainConfig]:
    """Scale the plan and the mesh of a config to `count` devices. Yield the config with the smallest change first."""
    if config.plan is not None:
        for request in scaled_requests(parse_request(config.plan), count, config.microbatch_size):
            mesh = _mesh_text(request.sizes) if config.mesh is not None else None
            yield replace(config, plan=str(request), mesh=mesh, target=None)
    elif config.mesh is not None:
        for sizes in scaled_meshes(parse_mesh(config.mesh) or {}, count):
            yield replace(config, mesh=_mesh_text(sizes), target=None)


def _mesh_text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def newest_plan(config: TrainConfig) -> Plan | None:
    """Read the plan of the newest readable checkpoint of a run; None if it has none."""
    assert config.run_dir is not None
    checkpoints = Checkpointer(config.run_dir / run_directory.CHECKPOINTS, keep=None)
    for step in reversed(checkpoints.steps()):
        try:
            kept = checkpoints.describe(step).plan
            return None if kept is None else Plan.from_json(json.dumps(kept))
        except (CheckpointError, PlanError):  # damaged, or written by another version
            continue
    return None
