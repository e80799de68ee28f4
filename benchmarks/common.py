"""Shared parts of the benchmarks: eight virtual devices, timing, one format of results."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402  after the devices are set up
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

if not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", "cpu")  # JAX ignores the environment if it was imported before

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class Row:
    """One figure: a value, or a median with its 95 % interval, and the target that it should not exceed."""

    name: str
    value: float
    unit: str
    target: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the target is met: `met`, `missed`, or `unclear` if the target is inside the interval."""
        if self.target is None:
            return ""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return "met" if high <= self.target else "missed" if low > self.target else "unclear"


def summary(samples: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Return the median and its 95 % interval. Order statistics assume nothing about the distribution."""
    ordered = np.sort(np.asarray(samples, float))
    count = len(ordered)
    spread = 0.98 * count**0.5
    low, high = int(max(np.floor((count - 1) / 2 - spread), 0)), int(min(np.ceil((count - 1) / 2 + spread), count - 1))
    return float(np.median(ordered)), float(ordered[low]), float(ordered[high])


def measured(
    name: str, samples: Sequence[float] | np.ndarray, unit: str, target: float | None = None, note: str = ""
) -> Row:
    """Make a row from samples."""
    value, low, high = summary(samples)
    return Row(name, value, unit, target, low, high, note)


def timed(action: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    """Call a function once and return the seconds that it took and its result."""
    begin = time.perf_counter()
    result = action(*args, **kwargs)
    return time.perf_counter() - begin, result


def report(name: str, rows: Sequence[Row], **context: Any) -> None:
    """Print a table and write `results/NAME.json`."""
    table = Table(title=name, title_justify="left")
    for column in ("", "median", "95 % interval", "target", "", ""):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        interval = "" if row.low is None else f"{_shown(row.low)} .. {_shown(row.high)}"
        target = "" if row.target is None else f"<= {_shown(row.target)} {row.unit}"
        table.add_row(row.name, f"{_shown(row.value)} {row.unit}", interval, target, row.verdict, row.note)
    Console(width=140).print(table)
    RESULTS.mkdir(exist_ok=True)
    body = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "devices": f"{jax.device_count()} {jax.devices()[0].platform}",
            "load": os.getloadavg()[0],
        },
        "context": context,
        "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(body, indent=2) + "\n")


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
