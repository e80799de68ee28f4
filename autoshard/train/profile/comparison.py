"""The trace of some steps beside the plan: predicted and measured time by kind of collective and by module.

Times are of one step on one device, in microseconds: means over the recorded steps and the devices of the trace. A
collective also waits until all devices of its group have begun. `waiting` is what a device spends in a collective
beyond the device that spends least in the same run of it, so it is an upper bound of the time lost to slower devices.

An asynchronous collective occupies the device at its start and its end only. What the trace has at these two is the
time that compute did not hide.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.sharding.hlo.collectives import KINDS, SENDS
from autoshard.train.config import run_directory
from autoshard.train.profile.constants import FOLDER, FORMAT, NAMES
from autoshard.train.profile.trace import OpEvent, Trace, main_program, read_trace

COMPUTE = "compute"
_CONTAINERS = ("while", "conditional", "call")  # their events contain those of their bodies


@shown
@dataclass(frozen=True)
class KindRow:
    """A kind of collective, or compute.

    Attributes:
        kind: The kind.
        planned_us: The plan's estimate; None if the plan has none of this kind.
        predicted_us: By the schedule of the compiled program; None if unknown.
        measured_us: What the trace has.
        waiting_us: The part of it that is spent waiting for other devices; 0 for compute.
        runs: Runs in a step.
    """

    kind: str
    planned_us: float | None
    predicted_us: float | None
    measured_us: float
    waiting_us: float
    runs: float


@shown
@dataclass(frozen=True)
class ModuleRow:
    """A module: its compute, and the collectives of its operators.

    Attributes:
        module: Its scope; empty for operators outside all modules.
        compute_us: Measured compute.
        predicted_us: Predicted time of its collectives.
        measured_us: Measured time of its collectives.
    """

    module: str
    compute_us: float
    predicted_us: float
    measured_us: float


@shown
@dataclass(frozen=True)
class CollectiveRow:
    """A collective.

    Attributes:
        instruction: Its instruction.
        name: What it is, in one line.
        predicted_us: Predicted time of all its runs in a step.
        measured_us: Measured time of them.
        waiting_us: The part of it that is spent waiting for other devices.
        runs: Runs in a step, as measured.
        step_bytes: Bytes that each device sends in a step.
    """

    instruction: str
    name: str
    predicted_us: float
    measured_us: float
    waiting_us: float
    runs: float
    step_bytes: float


@shown
@dataclass(frozen=True)
class Comparison:
    """A trace beside the plan; see the docstring of this module.

    Attributes:
        run: The folder of the run.
        session: Name of the trace's folder.
        strategy: The strategy of the plan.
        target: The machine of the plan.
        platform: `TPU`, `GPU` or `CPU`.
        steps: The recorded steps.
        devices: Devices in the trace.
        planned_step_us: The plan's estimate of a step.
        step_us: From the first to the last event of a step on a device; None if the trace does not tell steps apart.
        kinds: Compute first, then the kinds of collectives, the longest first.
        modules: The modules, those with the most measured time first.
        collectives: The collectives, the longest first.
        notes: What the figures do not include.
    """

    run: str
    session: str
    strategy: str
    target: str
    platform: str
    steps: tuple[int, ...]
    devices: int
    planned_step_us: float
    step_us: float | None
    kinds: tuple[KindRow, ...]
    modules: tuple[ModuleRow, ...]
    collectives: tuple[CollectiveRow, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The comparison as JSON."""
        return json.dumps(asdict(self), indent=1)


@shown
@dataclass
class Measured:
    """Measured microseconds of one instruction: of all its runs, on all devices, in all recorded steps."""

    total_us: float = 0.0
    waiting_us: float = 0.0
    runs: int = 0
    parts: list[OpEvent] = field(default_factory=list)


def compare_trace(run: Path) -> Comparison:
    """Read the newest trace of a run and compare it with the plan.

    Args:
        run: Folder of the run.

    Raises:
        ConfigError: The run has no trace, or the trace has no events of the planned step.
    """
    names = read_names(run)
    session = run / FOLDER / "plugins" / "profile" / str(names["session"])
    if not session.is_dir():
        raise ConfigError(f"{str(session)!r} does not exist, but {NAMES} names it: record a trace with --profile")
    return compare(read_trace(session), names, str(run))


def read_names(run: Path) -> dict[str, Any]:
    """Read `collectives.json` of a run.

    Raises:
        ConfigError: The run has none, or it is damaged.
    """
    run_directory.read_config(run)  # says what is wrong with a folder that is not a run
    file = run / FOLDER / NAMES
    if not file.exists():
        raise ConfigError(f"{str(run)!r} has no trace: record one with `autoshard train --profile STEPS`")
    try:
        names = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from error
    if not isinstance(names, Mapping) or names.get("format") != FORMAT:
        raise ConfigError(f"{str(file)!r} has another format than {FORMAT}: record a trace with this version")
    return dict(names)


def compare(trace: Trace, names: Mapping[str, Any], run: str = "") -> Comparison:
    """Compare a trace with the names and predictions of `collectives.json`.

    Raises:
        ConfigError: The trace has no events of devices, or none of the planned step.
    """
    module = names["module"]
    if not trace.platform:
        raise ConfigError("the trace has events of the host only, none of devices: record it again with --profile")
    events = trace.of(module)
    if not events:
        known = ", ".join(sorted(trace.ops)[:5])
        raise ConfigError(f"the trace has no events of {module!r}; its programs are {known}. Record more steps")
    events, programs = main_program(events)
    notes = []
    if programs > 1:
        again = f"the trace has {programs} programs of it. The figures are of one of them"
        notes.append(f"the step was compiled again: {again}")
    events = [event for event in events if event.op.partition(".")[0] not in _CONTAINERS]
    collectives = {each["instruction"]: each for each in names["collectives"]}
    ends = {end: each["instruction"] for each in names["collectives"] for end in each["ends"]}
    scopes = {op: scope for scope, ops in names["modules"].items() for op in ops}
    measured: dict[str, Measured] = defaultdict(Measured)
    for event in events:
        measured[ends.get(event.op, event.op)].parts.append(event)
    for op, each in measured.items():
        _add_up(each, op)
    devices, steps = len({event.device for event in events}), tuple(names["steps"])
    share = 1.0 / (devices * max(len(steps), 1))
    unknown = sorted(op for op in measured if op not in collectives and _is_collective(op))
    if unknown:
        notes.append(f"the step was compiled again: the recorded program has no {', '.join(unknown[:3])}")
    if names.get("compiled"):
        notes.append(f"step {steps[0]} was the first of its attempt, so the trace has its compilation on the host")
    rows = [_row(each, measured.get(op, Measured()), share) for op, each in collectives.items()]
    missing = [row for row in rows if not row.runs and row.predicted_us]
    if missing:
        notes.append(f"{len(missing)} collectives of the program have no event, {missing[0].instruction} for one: they "
                     f"are predicted to take {sum(row.predicted_us for row in missing):.0f} us")  # fmt: skip
    if trace.platform == "CPU":
        notes.append("on CPU, the devices are threads that share cores: times include waiting for a core")
    return Comparison(
        run=run,
        session=str(names.get("session", "")),
        strategy=names["strategy"],
        target=names["target"],
        platform=trace.platform,
        steps=steps,
        devices=devices,
        planned_step_us=names["planned"]["step_time_us"],
        step_us=_step_us(events, len(steps)),
        kinds=tuple(_kinds(names, collectives, measured, share)),
        modules=tuple(_modules(collectives, scopes, measured, share)),
        collectives=tuple(sorted(rows, key=lambda row: -row.measured_us)),
        notes=tuple(notes),
    )


def _is_collective(op: str) -> bool:
    base = op.partition(".")[0]
    return base.removesuffix("-start").removesuffix("-done") in (*KINDS, *SENDS)


def _add_up(measured: Measured, op: str) -> None:
    """Sum the events of an instruction, and what devices wait for each other in each of its runs."""
    by_device: dict[int, list[OpEvent]] = defaultdict(list)
    for event in measured.parts:
        by_device[event.device].append(event)
        measured.total_us += event.duration_ns / 1e3
        measured.runs += event.op == op
    runs = [sorted(events, key=lambda event: event.start_ns) for events in by_device.values()]
    if len({len(each) for each in runs}) == 1:  # the same runs on every device
        for same in zip(*runs, strict=True):
            least = min(event.duration_ns for event in same)
            measured.waiting_us += sum(event.duration_ns - least for event in same) / 1e3


def _row(each: Mapping[str, Any], measured: Measured, share: float) -> CollectiveRow:
    return CollectiveRow(
        instruction=each["instruction"],
        name=each["name"],
        predicted_us=each["predicted_us"],
        measured_us=measured.total_us * share,
        waiting_us=measured.waiting_us * share,
        runs=measured.runs * share,
        step_bytes=each["step_bytes"],
    )


def _kinds(
    names: Mapping[str, Any],
    collectives: Mapping[str, Mapping[str, Any]],
    measured: Mapping[str, Measured],
    share: float,
) -> Iterator[KindRow]:
    compute = [each for op, each in measured.items() if op not in collectives and not _is_collective(op)]
    yield KindRow(COMPUTE, names["planned"]["compute_us"], names["compute_us"],
                  sum(each.total_us for each in compute) * share, 0.0,
                  sum(each.runs for each in compute) * share)  # fmt: skip
    planned, predicted = dict(names["planned"]["kinds"]), defaultdict(float)
    found: dict[str, Measured] = defaultdict(Measured)
    for op, each in collectives.items():
        predicted[each["kind"]] += each["predicted_us"]
        one = measured.get(op, Measured())
        total = found[each["kind"]]
        total.total_us, total.waiting_us = total.total_us + one.total_us, total.waiting_us + one.waiting_us
        total.runs += one.runs
    rows = [
        KindRow(kind, planned.get(kind), predicted.get(kind), found[kind].total_us * share,
                found[kind].waiting_us * share, found[kind].runs * share)
        for kind in dict.fromkeys([*predicted, *planned])
    ]  # fmt: skip
    yield from sorted(rows, key=lambda row: (-row.measured_us, -(row.planned_us or 0.0)))


def _modules(
    collectives: Mapping[str, Mapping[str, Any]],
    scopes: Mapping[str, str],
    measured: Mapping[str, Measured],
    share: float,
) -> list[ModuleRow]:
    compute: dict[str, float] = defaultdict(float)
    moved: dict[str, float] = defaultdict(float)
    predicted: dict[str, float] = defaultdict(float)
    for op, each in measured.items():
        if op in collectives:
            moved[collectives[op]["module"]] += each.total_us * share
        elif not _is_collective(op):
            compute[scopes.get(op, "")] += each.total_us * share
    for each in collectives.values():
        predicted[each["module"]] += each["predicted_us"]
    rows = [ModuleRow(name, compute[name], predicted[name], moved[name]) for name in {*compute, *moved, *predicted}]
    return sorted(rows, key=lambda row: (-(row.compute_us + row.measured_us), row.module))


def _step_us(events: Sequence[OpEvent], steps: int) -> float | None:
    """The mean time from the first event of a step to that of the next; of one step, to its last event.

    The first instruction of a step is that which a device runs first, once in each step.
    """
    times = []
    for device in {event.device for event in events}:
        own = sorted((event for event in events if event.device == device), key=lambda event: event.start_ns)
        begins = [event.start_ns for event in own if event.op == own[0].op]
        if len(begins) != steps:
            return None
        last = max(event.start_ns + event.duration_ns for event in own)
        times.append((begins[-1] - begins[0]) / (steps - 1) if steps > 1 else last - begins[0])
    return sum(times) / len(times) / 1e3
