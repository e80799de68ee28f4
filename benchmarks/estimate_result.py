"""The result of `estimate.py` for a compiled step: its times, traffic and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hlo_collectives import Collective

MEASURES = ("cycles", "roofline", "joined")
"""The measures of compute on a TPU. On a GPU there is only the roofline."""


@dataclass(frozen=True)
class Row:
    """An instruction of the schedule: how often it runs, and the cost of all its runs.

    `seconds` is keyed by measure (`cycles`, `roofline`, `joined`). So is `exposed`: the exposed seconds of a collective
    or copy.
    """

    name: str
    what: str
    trips: float
    flops: float = 0.0
    hbm_bytes: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    exposed: Mapping[str, float] = field(default_factory=dict)
    op_name: str = ""
    source: str = ""


@dataclass(frozen=True)
class Traffic:
    """A collective: how often it runs, the seconds and links of one run, and the exposed seconds of all runs."""

    collective: Collective
    trips: float
    seconds: float
    over: str
    exposed: Mapping[str, float]


@dataclass(frozen=True)
class Estimate:
    """A step on a target. Times are keyed by measure: `cycles` and `joined` (not on a GPU), and `roofline`."""

    target: str
    partitions: int
    compute: Mapping[str, float]
    exposed: Mapping[str, float]
    copies: Mapping[str, float]
    flops: float
    hbm_bytes: float
    rows: list[Row] = field(repr=False)
    traffic: list[Traffic] = field(repr=False)
    memory_bytes: float | None
    peak_bytes: float | None
    memory_limit: float
    without_cycles: int
    without_cycles_seconds: float
    unknown_loops: list[str]
    opaque: list[str]

    @property
    def step(self) -> dict[str, float]:
        """Seconds of a step, by measure."""
        return {name: self.compute[name] + self.exposed[name] + self.copies[name] for name in self.compute}

    @property
    def fits(self) -> bool | None:
        """Whether the step fits the device's memory, or None if unknown. A TPU's compiler refuses one that does not."""
        needed = [size for size in (self.memory_bytes, self.peak_bytes) if size is not None]
        return min(needed) <= self.memory_limit if needed else None

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends."""
        return sum(each.trips * each.collective.wire_bytes for each in self.traffic)

    def split(self, groups: Mapping[str, str]) -> dict[str, dict[str, float]]:
        """Group compute seconds by the first pattern that matches an instruction's `op_name`, else under `other`."""
        found: dict[str, dict[str, float]] = {name: dict.fromkeys(self.compute, 0.0) for name in (*groups, "other")}
        for row in self.rows:
            if row.what == "compute":
                name = next((name for name, pattern in groups.items() if re.search(pattern, row.op_name)), "other")
                for measure, seconds in row.seconds.items():
                    found[name][measure] += seconds
        return found

    def top(self, count: int = 15, measure: str = "roofline") -> list[Row]:
        """Return the instructions that take longest."""
        return sorted(self.rows, key=lambda row: -row.seconds.get(measure, 0.0) - row.exposed.get(measure, 0.0))[:count]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON data. A collective's groups become their number and size."""
        data = asdict(replace(self, traffic=[])) | {"step": self.step, "wire_bytes": self.wire_bytes}
        data["traffic"] = [
            {key: value for key, value in asdict(each.collective).items() if key != "groups"}
            | {"groups": len(each.collective.groups), "size": each.collective.size, "over": each.over}
            | {"wire_bytes": each.collective.wire_bytes, "trips": each.trips, "seconds": each.seconds}
            | {"exposed": dict(each.exposed)}
            for each in self.traffic
        ]
        return data
