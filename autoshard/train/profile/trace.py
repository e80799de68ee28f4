"""Read what ran on the devices from a trace (`.xplane.pb`), by `jax.profiler.ProfileData`.

Where the instructions of a compiled program are, by platform:

    TPU     a plane `/device:TPU:0` for each core; its line `XLA Ops` has an event for each instruction, whose name is
            the text of the instruction (`%fusion.3 = ...`) or its name; its line `XLA Modules` has an event for each
            run of a program, `jit_train_step(123)`
    GPU     a plane `/device:GPU:0` for each device; its lines `Stream #...` have the kernels, with the statistics
            `hlo_op` and `hlo_module`
    CPU     the plane `/host:CPU`; its lines are threads, and their events have `hlo_op`, `hlo_module`, `program_id` and
            `device_ordinal`
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from autoshard._shown import shown
from autoshard.errors import ConfigError

_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)")
_HOST = "/host:CPU"
_OPS, _MODULES = "XLA Ops", "XLA Modules"
_NAME = re.compile(r"%?([\w.\-]+)")
_RUN = re.compile(r"(.+?)(?:\((\d+)\))?")


@shown
@dataclass(frozen=True)
class OpEvent:
    """One run of an instruction on a device.

    Attributes:
        device: Number of the device.
        op: Name of the instruction.
        program: Identifies the compiled program, as the trace does; empty if it does not.
        start_ns: When it began, in nanoseconds.
        duration_ns: How long it ran, in nanoseconds.
    """

    device: int
    op: str
    program: str
    start_ns: float
    duration_ns: float


@shown
@dataclass
class Trace:
    """What ran on the devices.

    Attributes:
        platform: `TPU`, `GPU` or `CPU`; empty if the trace has no events of devices.
        ops: Name of a program -> its events.
    """

    platform: str = ""
    ops: dict[str, list[OpEvent]] = field(default_factory=dict)

    def of(self, module: str) -> list[OpEvent]:
        """The events of a program."""
        return self.ops.get(module, [])

    @property
    def devices(self) -> int:
        """Number of devices with events."""
        return len({event.device for events in self.ops.values() for event in events})


def read_trace(folder: Path) -> Trace:
    """Read the traces of all hosts of a session.

    Args:
        folder: The folder of the session, which has the files `HOST.xplane.pb`.

    Raises:
        ConfigError: The folder has no such file.
    """
    files = sorted(folder.glob("*.xplane.pb"))
    if not files:
        raise ConfigError(f"{str(folder)!r} has no trace: no file ends in .xplane.pb. Record one with --profile")
    return trace_of(plane for file in files for plane in ProfileData.from_file(str(file)).planes)


def trace_of(planes: Iterable[Any]) -> Trace:
    """Read the planes of a trace: those of accelerators if there are any, else that of the host's CPU."""
    ops: Mapping[str, dict[str, list[OpEvent]]] = {name: defaultdict(list) for name in ("TPU", "GPU", "CPU")}
    for plane in planes:
        if found := _DEVICE.match(plane.name):
            events = _tpu(plane, int(found[2])) if found[1] == "TPU" else _with_statistics(plane, int(found[2]))
            for module, event in events:
                ops[found[1]][module].append(event)
        elif plane.name == _HOST:
            for module, event in _with_statistics(plane, None):
                ops["CPU"][module].append(event)
    for platform, found in ops.items():
        if found:
            return Trace(platform, dict(found))
    return Trace()


def main_program(events: Sequence[OpEvent]) -> tuple[list[OpEvent], int]:
    """Return the events of the program that ran most, and the number of programs.

    There are several if the step was compiled again.
    """
    counts = Counter(event.program for event in events)
    most = max(counts, key=counts.__getitem__, default="")
    return [event for event in events if event.program == most], len(counts)


def _tpu(plane: Any, device: int) -> Iterator[tuple[str, OpEvent]]:
    """Yield the instructions of a core, each with the program in whose run it is."""
    lines = {line.name: line for line in plane.lines}
    if _OPS not in lines:
        return
    runs = sorted((event.start_ns, event.end_ns, event.name) for event in _events(lines.get(_MODULES)))
    starts = [run[0] for run in runs]
    for event in lines[_OPS].events:
        at = bisect.bisect_right(starts, event.start_ns) - 1
        name = runs[at][2] if at >= 0 and event.start_ns < runs[at][1] else ""
        op = _NAME.match(event.name)
        run = _RUN.fullmatch(name)
        if op and run:
            yield run[1], OpEvent(device, op[1], run[2] or "", event.start_ns, event.duration_ns)


def _events(line: Any) -> Iterable[Any]:
    return () if line is None else line.events


def _with_statistics(plane: Any, device: int | None) -> Iterator[tuple[str, OpEvent]]:
    """Yield the events whose statistics name an instruction; without a device, they name that as well."""
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" not in stats or "hlo_module" not in stats:
                continue
            where = int(stats.get("device_ordinal", 0)) if device is None else device
            program = str(stats.get("program_id", ""))
            op = _NAME.match(str(stats["hlo_op"]))
            run = _RUN.fullmatch(str(stats["hlo_module"]))
            if op and run:
                yield run[1], OpEvent(where, op[1], program or run[2] or "", event.start_ns, event.duration_ns)
