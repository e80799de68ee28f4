"""The curves of a run: each metric by step, read from `metrics.jsonl`, and thinned to what a chart can show."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard._shown import shown
from autoshard.train.config.run_directory import METRICS
from autoshard.train.report.constants import BUCKETS, SMOOTHED

Numbers = np.ndarray


@shown
@dataclass
class Series:
    """The values of one metric, float64 `[records]`, and their steps, in the order of the file."""

    steps: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))

    @property
    def arrays(self) -> tuple[Numbers, Numbers]:
        """Steps and values."""
        return np.array(self.steps), np.array(self.values)

    @property
    def finite(self) -> tuple[Numbers, Numbers]:
        """Steps and values of the records whose value is finite."""
        steps, values = self.arrays
        kept = np.isfinite(values)
        return steps[kept], values[kept]


@shown
@dataclass
class Metrics:
    """What `metrics.jsonl` has.

    Attributes:
        series: Name of a metric -> its values.
        incidents: The records of incidents.
        last_step: The largest step with metrics; 0 without metrics.
    """

    series: dict[str, Series] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    last_step: int = 0

    def get(self, name: str) -> Series:
        """Return the values of a metric; empty if the run has none."""
        return self.series.get(name, Series())


def read_series(run_dir: Any) -> Metrics:
    """Read the metrics of a run, line by line. Lines that a crash left incomplete are skipped.

    A run that was killed trains the steps after its last checkpoint again. If it skips one of them again, the records
    of both are one incident.

    Args:
        run_dir: Folder of the run, local or remote.
    """
    found = Metrics()
    incidents: dict[Any, dict[str, Any]] = {}
    for record in _records(run_dir / METRICS):
        step = record.get("step")
        if not isinstance(step, int):
            continue
        if "incident" in record:  # its step may be one that a rollback undid
            is_skip = record["incident"] == "skip"
            incidents[(step, str(record.get("batch"))) if is_skip else len(incidents)] = record
            continue
        found.last_step = max(found.last_step, step)
        for name, value in record.items():
            if name != "step" and (value is None or isinstance(value, int | float)):
                series = found.series.get(name) or found.series.setdefault(name, Series())
                series.steps.append(step)
                series.values.append(math.nan if value is None else value)  # JSON has no number that is not finite
    found.incidents.extend(incidents.values())
    return found


def _records(path: Any) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("r") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def smoothed(values: Numbers) -> Numbers:
    """Average each value over a centred window of a twentieth of the run. The width is chosen, not measured.

    Example:
        >>> smoothed(np.array([1.0, 3.0])).tolist()
        [1.0, 3.0]
    """
    half = len(values) // SMOOTHED
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def runs(steps: Numbers) -> list[slice]:
    """Split a curve where its steps go back, as after a rollback.

    Example:
        >>> runs(np.array([1.0, 2.0, 3.0, 2.0, 3.0]))
        [slice(0, 3, None), slice(3, 5, None)]
    """
    edges = [0, *(np.flatnonzero(np.diff(steps) < 0) + 1).tolist(), len(steps)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def thinned(steps: Numbers, values: Numbers, buckets: int = BUCKETS) -> tuple[Numbers, Numbers]:
    """Keep of each of `buckets` ranges of steps the first and the last value, the smallest and the largest one.

    A curve that is drawn through what is left has the same extremes, so that a spike of one step stays visible.

    Args:
        steps: Steps in ascending order, `[records]`.
        values: Finite values, `[records]`.
        buckets: Number of ranges.

    Returns:
        At most `4 * buckets` steps and values.

    Example:
        >>> steps, values = np.arange(1e6), np.zeros(1_000_000)
        >>> values[123_456] = 7.0
        >>> kept_steps, kept_values = thinned(steps, values)
        >>> len(kept_steps), float(kept_values.max())
        (501, 7.0)
    """
    if len(steps) <= 4 * buckets:
        return steps, values
    width = (steps[-1] - steps[0]) / buckets or 1.0
    bucket = np.minimum((steps - steps[0]) // width, buckets - 1).astype(int)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(bucket) != 0]))
    ends = np.concatenate([starts[1:], [len(steps)]])
    kept: set[int] = set()
    for a, b in zip(starts.tolist(), ends.tolist(), strict=True):
        part = values[a:b]
        kept |= {a, b - 1, a + int(part.argmin()), a + int(part.argmax())}
    index = np.array(sorted(kept))
    return steps[index], values[index]
