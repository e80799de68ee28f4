"""Compare the estimated time of convolutions with the compiler's cycles.

    python benchmarks/convolutions.py [--target v5e:2x2]

Each convolution is compiled for one machine, with the same number of images on each device. A row shows, in
microseconds, the operations over the chip's peak, the planner's estimate, the compiler's cycles of the convolution
alone, and those of the whole program with its transposes. On memory-bound and elementwise work, cycles are two to five
times too many (`compiler_cycles.py`). Nothing runs. Rows are stored in `results/convolutions/TARGET.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import common  # sets up the path and the devices first
import jax
import jax.numpy as jnp
from judged_steps import estimated, exported
from rich.console import Console
from rich.table import Table

from autoshard import plan
from autoshard.sharding.audit import compile_job
from autoshard.sharding.audit.compiler_process import versions
from autoshard.sharding.machines.targets import find_target

FOLDER = common.RESULTS / "convolutions"
TIMEOUT_S = 900.0  # chosen: seconds after which a compiler is stopped


@dataclass(frozen=True)
class Convolution:
    """A convolution of square images, NHWC. `groups` divide the channels."""

    images: int
    size: int
    channels: int
    results: int
    window: int
    stride: int = 1
    groups: int = 1

    @property
    def name(self) -> str:
        """`16 x 56 x 56, 3 x 3, 192 -> 192`."""
        more = f", stride {self.stride}" * (self.stride > 1) + f", {self.groups} groups" * (self.groups > 1)
        return (
            f"{self.images} x {self.size} x {self.size}, {self.window} x {self.window}, "
            f"{self.channels} -> {self.results}{more}"
        )

    @property
    def flops(self) -> float:
        """Operations on one device, with those at the borders."""
        positions = self.images * (self.size // self.stride) ** 2
        return 2.0 * positions * self.results * self.channels // self.groups * self.window**2


CASES = (
    Convolution(16, 56, 192, 192, 3),
    Convolution(16, 56, 96, 96, 3),
    Convolution(16, 56, 64, 64, 3),
    Convolution(16, 56, 256, 64, 1),
    Convolution(16, 224, 3, 192, 7, stride=4),
    Convolution(16, 56, 256, 256, 3, groups=32),
    Convolution(64, 28, 256, 256, 3, groups=4),
    Convolution(16, 56, 192, 192, 7, groups=192),
)


def compiled(case: Convolution, target: str) -> dict[str, float | str]:
    """Plan and compile a convolution, and return its times in microseconds."""

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers, stride = ("NHWC", "HWIO", "NHWC"), (case.stride, case.stride)
        return jax.lax.conv_general_dilated(
            x, kernel, stride, "SAME", dimension_numbers=numbers, feature_group_count=case.groups
        )

    machine = find_target(target)
    x = jax.ShapeDtypeStruct((machine.devices * case.images, case.size, case.size, case.channels), jnp.bfloat16)
    inputs = case.channels // case.groups
    kernel = jax.ShapeDtypeStruct((case.window, case.window, inputs, case.results), jnp.bfloat16)
    made = plan(convolve, x, kernel, target=target, plan=f"dp:{machine.devices}")
    result = compile_job(exported(made, target), TIMEOUT_S)
    row: dict[str, float | str] = {
        "kind": result.kind,
        "operations_us": case.flops / machine.chip.flops * 1e6,
        "estimate_us": made.estimate.step_time_us,
    }
    if result.kind == "ok":
        judged = estimated(result, target)
        row["convolution_us"] = sum(each.seconds["cycles"] for each in judged.rows if each.flops) * 1e6
        row["program_us"] = judged.step["cycles"] * 1e6
    return row


def main(arguments: Sequence[str]) -> None:
    """Compile the convolutions, print the table and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x2", help="a TPU machine; default: v5e:2x2")
    given = parser.parse_args(arguments)
    rows = [asdict(case) | {"name": case.name} | compiled(case, given.target) for case in CASES]
    names = ("operations_us", "estimate_us", "convolution_us", "program_us")
    table = Table("a device's convolution", *(name.replace("_us", ", us") for name in names))
    for row in rows:
        table.add_row(str(row["name"]), *(f"{row[name]:.0f}" if name in row else str(row["kind"]) for name in names))
    Console(width=140).print(table)
    body = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "target": given.target, "versions": versions()}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{given.target.replace(':', '-')}.json").write_text(json.dumps(body | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
