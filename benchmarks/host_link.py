"""The bandwidth of the host link that XLA:TPU's scheduler assumes, by the option that scales it.

    python benchmarks/host_link.py                 every machine and value
    python benchmarks/host_link.py v6e:1x1         one machine
    python benchmarks/host_link.py --show          the stored rows, without compiling

Each iteration of a loop fetches 32 MiB from host memory, multiplies small matrices, and then uses what it fetched. XLA
gives the fetch as much compute as it expects the fetch to take. So the bytes of the fetch divided by the time of the
products between its start and its end are the bandwidth that XLA assumes, up to the time of one product. Times are
the compiler's cycles. Each row is compiled with one value of `xla_tpu_pcie_bandwidth_multiplier`. Nothing runs.

Some fetches start at the beginning of the iteration. Then the assumed bandwidth is unknown. On v5e and tpu7x this
happens with every value of the option.

`planned` is the bandwidth that the planner expects: `HOST_BANDWIDTH_REACHED` times `Chip.host_bandwidth`. Rows are
stored in `results/host_link.json`. They are the source of the values in
`autoshard.sharding.machines.options.host_memory`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from common import RESULTS
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.sharding.audit import CompileJob, compile_job, missing_compiler
from autoshard.sharding.audit.export import export
from autoshard.sharding.machines.constants import HOST_BANDWIDTH_REACHED
from autoshard.sharding.machines.options.option_table import LINK_SPEED
from autoshard.sharding.machines.targets import find_target

PATH = RESULTS / "host_link.json"
MACHINES = ("v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")
VALUES = ("", "0.5", "1")  # of the option; the first leaves it out
ITERATIONS, PRODUCTS, ROWS, WIDTH = 4, 400, 4096, 1024
FETCHED = 16384  # rows of the fetched slice
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Row:
    """A loop compiled under one value of the option.

    Attributes:
        target: the machine.
        value: the value of the option; empty if it was left out.
        kind: the compiler's result: `ok`, `error`, ...
        bytes: the bytes of a fetch.
        us: the compute between its start and its end, in microseconds.
        iteration_us: the compute of an iteration, in microseconds; the upper limit of `us`.
        planned: bytes per second that the planner expects of the link.
        versions: the compiler's versions.
    """

    target: str
    value: str
    kind: str
    bytes: float
    us: float
    iteration_us: float
    planned: float
    versions: Mapping[str, str]

    def __str__(self) -> str:
        head = f"{self.target} {LINK_SPEED} {self.value or 'default'}"
        if not self.us:
            return f"{head}: {self.kind}, no compute beside the fetch"
        assumed = f"{self.bytes / self.us / 1e3:.1f} GB/s"
        if self.us > 0.99 * self.iteration_us:
            assumed = "unknown, the fetch starts with the iteration"
        return f"{head}: {assumed}; planned {self.planned / 1e9:.1f} GB/s"


def loop(x: jax.Array, w: jax.Array, stack: jax.Array) -> list[jax.Array]:
    """Fetch a slice in each iteration, and use it after many small products."""

    def body(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        index, x = jax.lax.optimization_barrier(carry)  # no fetch moves to the iteration before
        one = jax.device_put(jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), jax.memory.Space.Device)
        for _product in range(PRODUCTS):
            x = jnp.tanh(x @ w)
        return (index + 1, x + x @ one[:WIDTH]), None

    return [jax.lax.scan(body, (jnp.int32(0), x), None, length=ITERATIONS)[0][1]]


def measured(target: str, value: str) -> Row:
    """Compile the loop for one device of a machine under one value of the option."""
    machine = find_target(target)
    mesh = AbstractMesh((machine.devices,), ("x",), axis_types=(AxisType.Auto,))
    here, there = (NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in ("device", "pinned_host"))
    sizes = ((ROWS, WIDTH), (WIDTH, WIDTH), (ITERATIONS, FETCHED, WIDTH))
    avals = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    with jax.sharding.use_abstract_mesh(mesh):
        program = export(loop, avals, [here, here, there], [here], "tpu")
    options = {LINK_SPEED: value} if value else {}
    devices = tuple(range(machine.devices))
    found = compile_job(CompileJob(program, "tpu", target, {"x": machine.devices}, devices, (), options))
    kind, text = ("option refused", "") if found.dropped else (found.kind, found.text)
    head = (target, value, kind, FETCHED * WIDTH * 2, *_window_us(text, machine.chip.clock_hz))
    return Row(*head, HOST_BANDWIDTH_REACHED * machine.chip.host_bandwidth, dict(found.versions))


def _window_us(text: str, clock_hz: float) -> tuple[float, float]:
    """Return the compute time between the start and the end of the loop's fetch, and that of one iteration."""
    body = next((each for each in re.split(r"\n(?=%|ENTRY)", text) if "dynamic-slice-start" in each), "")
    start = end = total = 0.0
    for line in body.splitlines():
        if re.match(r"\s*%dynamic-slice-start[\w.-]* = ", line):
            start = total
        elif re.match(r"\s*%dynamic-slice-done[\w.-]* = ", line):
            end = total
        cycles = CYCLES.search(line)
        if cycles and int(cycles[1]) < 2**60:
            total += int(cycles[1]) / clock_hz * 1e6
    return end - start, total


def stored() -> list[Row]:
    """Read the stored rows."""
    return [Row(**row) for row in json.loads(PATH.read_text())] if PATH.exists() else []


def save(new: Row) -> None:
    """Write a row, in the place of an older one of the same machine and value."""
    rows = [row for row in stored() if (row.target, row.value) != (new.target, new.value)]
    PATH.write_text(json.dumps([asdict(row) for row in [*rows, new]], indent=1) + "\n")


def main() -> None:
    """Compile, store and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*", help=f"default: {' '.join(MACHINES)}")
    parser.add_argument("--show", action="store_true", help="print the stored rows and compile nothing")
    given = parser.parse_args()
    if given.show:
        print(*stored(), sep="\n")
        return
    if unknown := [name for name in given.machines if name not in MACHINES]:
        parser.error(f"no machine {', '.join(unknown)}; choose from {', '.join(MACHINES)}")
    if missing := missing_compiler("tpu"):
        sys.exit(missing)
    for target in given.machines or MACHINES:
        for value in VALUES:
            row = measured(target, value)
            save(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
