"""Reads the files of a run's folder, local or in a bucket, and changes none."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from etils import epath

from autoshard._shown import shown
from autoshard.ckpt import Checkpointer, CheckpointError, RetentionPolicy
from autoshard.errors import ConfigError, PlanError
from autoshard.sharding.api.plan import Plan
from autoshard.train.config import run_directory
from autoshard.train.config.stored_config import from_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.report.series import Metrics, read_series
from autoshard.train.run.attempts import read_attempts

METRIC = "val_loss"  # decides which checkpoints are the best, as in the trainer


@shown
@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that the run saved.

    Attributes:
        step: Its step.
        time: When it was saved, as text; empty if unknown.
        state_bytes: Bytes of the state; None if it was removed or is damaged.
        file_bytes: Bytes of its files; None if it was removed or is damaged.
        metrics: Metrics that were saved with it.
        fate: What became of it: `kept: newest`, `removed`, `damaged: ...`.
    """

    step: int
    time: str
    state_bytes: int | None
    file_bytes: int | None
    metrics: Mapping[str, float]
    fate: str


@shown
@dataclass(frozen=True)
class RunPlan:
    """A plan of the run.

    Attributes:
        step: The step from which it was used.
        plan: The plan; None if this version cannot read it.
        text: The plan as text.
        problem: Why it cannot be read.
    """

    step: int
    plan: Plan | None
    text: str
    problem: str = ""


@shown
@dataclass(frozen=True)
class Run:
    """Everything that the page shows.

    Attributes:
        place: The folder, as the user gave it.
        settings: The stored settings.
        config: The settings as a config; None if this version does not know some of them.
        metrics: The metrics.
        attempts: The events of `attempts.jsonl`, oldest first.
        plans: The plans, oldest first.
        checkpoints: The checkpoints, oldest first.
        problems: What could not be read.
    """

    place: str
    settings: Mapping[str, Any]
    config: TrainConfig | None
    metrics: Metrics
    attempts: Sequence[Mapping[str, Any]]
    plans: Sequence[RunPlan]
    checkpoints: Sequence[Checkpoint]
    problems: Sequence[str] = ()

    @property
    def steps(self) -> int | None:
        """Steps of the whole run; None if the settings do not say."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step's batch; None if the settings cannot be read."""
        if self.config is None:
            return None
        return self.config.batch_size * self.config.gpt.context * (2 if self.config.batch_kind == "pairs" else 1)

    @property
    def per(self) -> str:
        """What the loss is a mean over."""
        return "pair" if self.settings.get("loss") == "dpo" else "token"


def folder_of(place: str | Path) -> Any:
    """Return a folder as a path; a URL such as `gs://bucket/run` as a path in the bucket."""
    return epath.Path(str(place)) if "://" in str(place) else Path(place)


def read_run(place: str | Path) -> Run:
    """Read the folder of a run, which may be in progress or have failed before its first step.

    Raises:
        ConfigError: The folder is not that of a run.
    """
    folder = folder_of(place)
    settings = run_directory.read_config(folder)
    problems: list[str] = []
    config = None
    try:
        config = from_dict(settings, f"{place}/{run_directory.CONFIG}")
    except ConfigError as error:
        problems.append(f"this version does not know all settings: {error}")
    attempts = [event for event in read_attempts(folder / run_directory.ATTEMPTS) if _is_event(event)]
    checkpoints: Sequence[Checkpoint] = ()
    try:
        checkpoints = read_checkpoints(folder, attempts, config)
    except (CheckpointError, OSError) as error:
        problems.append(f"the checkpoints cannot be read: {error}")
    plans = read_plans(folder)
    problems += [f"the plan of step {each.step} cannot be drawn: {each.problem}" for each in plans if each.problem]
    return Run(str(place), settings, config, read_series(folder), attempts, plans, checkpoints, problems)


def _is_event(event: Any) -> bool:
    """Whether a line is an event with a readable time."""
    if not isinstance(event, Mapping) or not {"attempt", "event", "time", "step"} <= event.keys():
        return False
    try:
        datetime.fromisoformat(event["time"])
    except (TypeError, ValueError):
        return False
    return True


def read_plans(folder: Any) -> list[RunPlan]:
    """Read the plans of a run, oldest first: `plan.json`, and those that later attempts made."""
    found = []
    for path in folder.iterdir():
        if match := re.fullmatch(r"plan(?:-(\d+))?(?:-(\d+))?\.json", path.name):
            step, number = int(match[1] or 0), int(match[2] or 1)
            text = path.with_name(f"{path.name.removesuffix('.json')}.txt")
            shown_text = text.read_text() if text.exists() else ""
            try:
                found.append((step, number, RunPlan(step, Plan.from_json(path.read_text()), shown_text)))
            except PlanError as error:
                found.append((step, number, RunPlan(step, None, shown_text, str(error))))
    return [each[-1] for each in sorted(found, key=lambda each: each[:2])]


def read_checkpoints(
    folder: Any, attempts: Sequence[Mapping[str, Any]], config: TrainConfig | None
) -> list[Checkpoint]:
    """Read the checkpoints of a run, those that were removed included, oldest first.

    Raises:
        CheckpointError: The folder of checkpoints belongs to another program.
    """
    saved = {event["step"]: event["time"] for event in attempts if event["event"] == "save"}
    place = folder / run_directory.CHECKPOINTS
    described: dict[int, Any] = {}
    if place.exists():
        checkpoints = Checkpointer(place, keep=None)
        for step in checkpoints.steps():
            try:
                described[step] = checkpoints.describe(step)
            except CheckpointError as error:
                described[step] = error
    intact = {step: one.metrics for step, one in described.items() if not isinstance(one, CheckpointError)}
    fates = fates_of(intact, config)
    found = []
    for step in sorted({*saved, *described}):
        one = described.get(step)
        if step in intact and one is not None:
            time = saved.get(step) or one.written_by.get("time", "")
            found.append(Checkpoint(step, time, one.nbytes, one.file_bytes, one.metrics, fates[step]))
        else:
            fate = "removed" if one is None else f"damaged: {one}"
            found.append(Checkpoint(step, saved.get(step, ""), None, None, {}, fate))
    return found


def fates_of(metrics: Mapping[int, Mapping[str, float]], config: TrainConfig | None) -> dict[int, str]:
    """Return why each step is kept."""
    reasons: dict[int, list[str]] = {step: [] for step in metrics}
    best = _best(metrics, 1)
    for step in best:
        reasons[step].append("best")
    if config is not None:
        for step in RetentionPolicy(config.keep_checkpoints or None).of(metrics) if metrics else ():
            reasons[step].append("newest" if config.keep_checkpoints else "all are kept")
        for step in _best(metrics, config.keep_best) - best:
            reasons[step].append(f"among the best {config.keep_best}")
        for step in metrics:
            if config.keep_every and step % config.keep_every == 0:
                reasons[step].append(f"multiple of {config.keep_every}")
    return {step: f"kept: {', '.join(words)}" if words else "kept" for step, words in reasons.items()}


def _best(metrics: Mapping[int, Mapping[str, float]], count: int) -> set[int]:
    """Return the `count` steps with the smallest finite held-out loss. The newer step wins a tie."""
    losses = {step: values.get(METRIC, math.nan) for step, values in metrics.items()}
    scored = sorted((loss, -step) for step, loss in losses.items() if math.isfinite(loss))
    return {-step for _, step in scored[:count]}
