"""Compare the estimated time of associative scans with that of the compiled programs.

    python benchmarks/scans.py [--target v5e:2x2]     # all rows; they are stored
    python benchmarks/scans.py --show                 # the stored rows beside today's estimates, without compiling

The scan is a linear recurrence, `h[t] = a[t] h[t-1] + b[t]` (RG-LRU, S5, Mamba). Each is compiled for one machine, with
16 million elements of each operand on each device. A row shows, in milliseconds, the planner's estimate of compute and
the joined estimate of the compiled program (`estimate.py`): its compute, and its whole step with exposed copies between
device memory and on-chip memory. Nothing runs. Rows are stored in `results/scans.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

import common  # sets up the path and the devices first
import jax
from judged_steps import estimated, exported
from rich.console import Console
from rich.table import Table

from autoshard import Plan, plan
from autoshard.sharding.audit import compile_job
from autoshard.sharding.audit.compiler_process import versions
from autoshard.sharding.machines.targets import find_target

PATH = common.RESULTS / "scans.json"
TIMEOUT_S = 900.0  # chosen: seconds after which a compiler is stopped
ELEMENTS, WIDTH = 2**24, 2048  # elements on each device; features
FORWARD, GRADIENT = "forward", "gradient"
CASES = tuple(product((FORWARD, GRADIENT), ("float32", "bfloat16"), (1, 0), (512, 2048, 4096)))


def scanned(passes: str, axis: int) -> Callable[..., Any]:
    """Return the recurrence along an axis, or its gradients."""

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def forward(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.associative_scan(combine, (a, b), axis=axis)[1]

    def gradient(a: jax.Array, b: jax.Array, d_result: jax.Array) -> Any:
        return jax.vjp(forward, a, b)[1](d_result)

    return forward if passes == FORWARD else gradient


def planned(passes: str, dtype: str, axis: int, length: int, target: str) -> Plan:
    """Plan a scan of `length` steps along an axis; the rows of the other axis are sharded."""
    devices = find_target(target).devices
    rows = devices * ELEMENTS // (length * WIDTH)
    x = jax.ShapeDtypeStruct((rows, length, WIDTH) if axis else (length, rows, WIDTH), dtype)
    return plan(scanned(passes, axis), *[x] * (2 if passes == FORWARD else 3), target=target, plan=f"dp:{devices}")


def compiled(made: Plan, target: str) -> dict[str, float | str]:
    """Compile a scan, and return its milliseconds."""
    result = compile_job(exported(made, target), TIMEOUT_S)
    row: dict[str, float | str] = {"kind": result.kind}
    if result.kind == "ok":
        judged = estimated(result, target)
        row |= {"compute_ms": judged.compute["joined"] * 1e3, "step_ms": judged.step["joined"] * 1e3}
    return row


def main(arguments: Sequence[str]) -> None:
    """Compile the scans, store them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x2", help="a TPU machine; default: v5e:2x2")
    parser.add_argument("--show", action="store_true", help="compile nothing")
    given = parser.parse_args(arguments)
    known = json.loads(PATH.read_text()) if given.show else {}
    target, rows, ratios = known.get("target", given.target), [], []
    table = Table("scan", "estimate ms", "compute ms", "step ms", "estimate / step")
    for number, case in enumerate(CASES):
        made = planned(*case, target)
        row: dict[str, Any] = known["rows"][number] if known else {"case": list(case)} | compiled(made, target)
        row["estimate_ms"] = made.estimate.step_time_us / 1e3
        rows.append(row)
        passes, dtype, axis, length = case
        name = f"{passes} {dtype} axis {axis}, {length} steps"
        if row["kind"] != "ok":
            table.add_row(name, str(row["kind"]))
            continue
        ratios.append(float(row["estimate_ms"]) / float(row["step_ms"]))
        cells = [f"{float(row[key]):.3f}" for key in ("estimate_ms", "compute_ms", "step_ms")]
        table.add_row(name, *cells, f"{ratios[-1]:.2f}")
    console = Console(width=100)
    console.print(table)
    console.print(f"estimate / step: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    if not given.show:
        body = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "target": target, "versions": versions()}
        PATH.write_text(json.dumps(body | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
