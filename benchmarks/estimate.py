"""Estimate a compiled step from its scheduled HLO. Serves as a referee between plans of any origin.

    python benchmarks/estimate.py PROGRAM.hlo[.gz] v5e:4x4 [result.json beside it]

The estimate uses only the compiler's text and the machine figures below. It imports nothing of autoshard. Units:
seconds, bytes, operations (2 for a multiply-add), of one device and one step.

Compute, by two independent measures and one that joins them, summed over all scheduled instructions times the trips of
their enclosing loops:
    cycles     the compiler's own `estimated_cycles` / clock. Where it has none (2^63 - 1, or no entry), roofline
    roofline   max(work / (0.95 peak), bytes / (0.8 memory bandwidth), host bytes / host bandwidth)
               work and bytes as in `hlo_cost.py`: only products are work; slices and in-place updates cost the bytes
               that they touch; buffers that the compiler keeps on the chip cost only the copies there and back
    joined     cycles for instructions that are limited by products (by the roofline), and the roofline for all others
On a TPU the cycles of memory-bound instructions are two to five times too many (`compiler_cycles.py`). The roofline
ignores elementwise arithmetic and the inefficiency of small shapes. Trust the order of two plans where both measures
agree. A GPU's compiler gives no cycles, so there is only the roofline.

Communication: kind, payload and wire bytes of each collective as in `hlo_collectives.py`, time on the links as in
`links.py`, at 0.9 of their rated bandwidth. The exposed part of collectives and of asynchronous copies is the part that
compute does not hide, as in `hlo_schedule.py`. Synchronous collectives are fully exposed.

    step time = compute + exposed communication + exposed copies          by each measure of compute
    memory    = arguments + temporaries + results - results that reuse an argument's memory   (compiler's analysis)
    peak      = the compiler's own, if it reports one: less than `memory` where not all buffers are live at once.
                At most `memory`, because the compiler also counts buffers on the host and in a TPU's vector memory

Left out: padding of tiles, contention of collectives with the memory, start-up of kernels, stragglers, and custom
kernels without a cost (listed in `opaque`; only their operands and results count).
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimate_report import table
from estimate_result import Estimate, Row, Traffic
from hlo import Instruction, read
from hlo_collectives import Collective
from hlo_cost import Cost, has_unknown_cost, stated_cost
from hlo_schedule import Device, Schedule
from links import Chip, Target, wire

# Fractions of the peak and of the memory bandwidth that kernels reach. Chosen, not measured.
FLOPS_SHARE, MEMORY_SHARE = 0.95, 0.8
UNKNOWN_CYCLES = 2**63 - 1
VECTOR_LANES = 8 * 128 * 4  # of a TPU's core: lanes times arithmetic units (jax-ml.github.io/scaling-book)
GiB = 2**30
# TPU: Google Cloud's page on each version gives the peak, the memory bandwidth and the interconnect bandwidth per chip,
# which is divided by the number of links and by 2. `network` is the data center network per chip on the page of tpu7x
# (v5p, v6e, tpu7x), per pod on that of v5e; v4 is assumed to have that of v5p. The clock is the one at which the matrix
# units reach the peak. At that clock, XLA's cycles of large products are 88 to 97 % of the peak. The memory is the
# limit in XLA's own messages. A dimension of v5e or v6e is a ring from size 16 on. v4, v5p and tpu7x consist of
# 4 x 4 x 4 cubes, and either all dimensions are rings or none. A v4 device is a chip with both cores. A tpu7x device is
# one of a chip's two dies: its figures are half of a chip's, but for the links, which both dies share. Rings and
# bandwidth to the host: jax-ml.github.io/scaling-book; for tpu7x, an assumed PCIe 5.0 x16 link per chip. GPU: NVIDIA's
# data sheets of the H100 and H200 SXM (`link` is all NVLinks together) and of the DGX H100 (one 400 Gb/s port for each
# GPU).
CHIPS: Mapping[str, Chip] = {
    "v4": Chip(
        1.05e9, 275e12, 1228e9, 30.75 * GiB, 50e9, 15e9, network=6.25e9, torus=3, wraps_at=4, all_wrap=True, cores=2
    ),
    "v5e": Chip(1.5e9, 197e12, 819e9, 15.75 * GiB, 50e9, 15e9, network=3.125e9, torus=2, wraps_at=16),
    "v5p": Chip(
        1.75e9, 459e12, 2765e9, 95.74 * GiB, 100e9, 15e9, network=6.25e9, torus=3, wraps_at=4, all_wrap=True, cores=2
    ),
    "v6e": Chip(1.75e9, 918e12, 1640e9, 31.25 * GiB, 100e9, 32e9, network=12.5e9, torus=2, wraps_at=16),
    "tpu7x": Chip(2.2e9, 1154e12, 3690e9, 94.75 * GiB, 100e9, 32e9, network=6.25e9, torus=3, wraps_at=4, all_wrap=True),
    "h100": Chip(0.0, 989e12, 3350e9, 80e9, 450e9, 55e9, network=50e9),
    "h200": Chip(0.0, 989e12, 4800e9, 141e9, 450e9, 55e9, network=50e9),
}


def find_target(name: str) -> Target:
    """Return a machine by name: `v5p:4x4x4`, `v5e:4x4*2` (two slices), `h100:4x8` (hosts x devices of a host)."""
    chip, _, written = name.partition(":")
    shape, _, slices = written.partition("*")
    sizes = tuple(int(size) for size in shape.split("x")) if shape else ()
    dimensions = CHIPS[chip].torus if chip in CHIPS else 0
    if chip not in CHIPS or len(sizes) != (dimensions or 2):
        known = ", ".join(f"{key}:{'x'.join('4' * (each.torus or 2))}" for key, each in CHIPS.items())
        raise ValueError(f"{name!r} is not a target. Give {known}, or another shape with as many dimensions.")
    return Target(name, CHIPS[chip], sizes, int(slices or 1))


def estimate(
    text: str,
    target: str | Target,
    places: Sequence[Sequence[int]] | None = None,
    memory: Mapping[str, float] | None = None,
    *,
    has_code: bool = True,
) -> Estimate:
    """Estimate a step on a target.

    Args:
        text: the scheduled HLO of the program.
        target: the machine, or its name.
        places: the coordinates of each partition's device: (x, y, z, core) on a TPU, (slice, host, index) on a GPU. On
            several slices of TPUs (x, y, z, core, slice). XLA then compiles a module for one slice, which numbers the
            partitions of its slice in their order. By default row by row, with x (on a GPU the index) running fastest.
        memory: the compiler's analysis, in bytes: `argument`, `temp`, `output`, `alias`, `peak`; and `device`, the size
            of the device's memory space, for a program with values on the host: `peak` can be that of the host's memory
        has_code: whether the compiler made machine code. Without, `memory` has only `device`, the program states no
            cycles, and the only measure is the roofline.

    Raises:
        ValueError: the program has more partitions than the target has devices.
    """
    machine = find_target(target) if isinstance(target, str) else target
    module = read(text)
    at = [tuple(place) for place in places or machine.places()]
    if machine.slices > 1:
        at = [place[:4] for place in at if len(place) < 5 or place[4] == 0]
    if len(at) < module.partitions:
        raise ValueError(f"{machine.name} has {len(at)} devices, the program {module.partitions} partitions")
    wires = {}

    def wire_of(collective: Collective) -> Any:
        shape = (collective.kind, collective.groups, collective.payload_bytes)
        if shape not in wires:
            wires[shape] = wire(machine, *shape, at)
        return wires[shape]

    parts = {
        name: Schedule(module, measure, wire_of, _copies(machine), machine.gpu)
        for name, measure in _measures(machine).items()
        if has_code or name == "roofline"
    }
    runs = {name: part.run() for name, part in parts.items()}
    most = sum(memory[key] for key in ("argument", "temp", "output")) - memory["alias"] if memory and has_code else None
    peak = memory.get("device") or memory.get("peak") if memory else None
    schedule = parts["roofline"]
    named = {(where.name, i.name): i for where in module.computations.values() for i in where.instructions}
    rows = _rows(schedule, runs, named, module.source)
    computed = [named[entry.key] for entry in runs["roofline"].log if entry.what == "compute"]
    without = {i.name for i in computed if has_code and machine.chip.clock and cycles(i) is None}
    return Estimate(
        target=machine.name,
        partitions=module.partitions,
        compute={name: _sum(device, "compute") for name, device in runs.items()},
        exposed={name: _sum(device, "wire") for name, device in runs.items()},
        copies={name: _sum(device, "copy") for name, device in runs.items()},
        flops=sum(row.flops for row in rows),
        hbm_bytes=sum(row.hbm_bytes for row in rows),
        rows=rows,
        traffic=_traffic(schedule, runs, wire_of),
        memory_bytes=most,
        peak_bytes=min(peak, most or peak) if peak and (most or not has_code) else None,
        memory_limit=machine.chip.memory_bytes,
        without_cycles=len(without),
        without_cycles_seconds=sum(row.seconds["roofline"] for row in rows if row.name in without and row.seconds),
        unknown_loops=sorted(name for _, name in schedule.unknown_loops),
        opaque=sorted({i.name for i in computed if has_unknown_cost(i)}),
    )


def measures(target: str | Target) -> tuple[str, ...]:
    """Return the names of the measures of compute on a target."""
    return tuple(_measures(find_target(target) if isinstance(target, str) else target))


def cycles(instruction: Instruction) -> int | None:
    """Return the compiler's estimate for an instruction, or None."""
    found = re.search(r'"estimated_cycles":"?(\d+)', instruction.attributes)
    return int(found[1]) if found and int(found[1]) != UNKNOWN_CYCLES else None


def roofline(chip: Chip, cost: Cost) -> tuple[float, float]:
    """Return the seconds of an instruction, and of its memory traffic alone."""
    traffic = cost.hbm_bytes / (MEMORY_SHARE * chip.hbm)
    vector = cost.vector / (chip.cores * VECTOR_LANES * chip.clock) if chip.clock else 0.0
    return max(cost.work / (FLOPS_SHARE * chip.flops), vector, traffic, cost.host_bytes / chip.host), traffic


def _measures(machine: Target) -> dict[str, Callable[[Instruction, Cost], tuple[float, float]]]:
    chip = machine.chip

    def by_cycles(instruction: Instruction, cost: Cost) -> tuple[float, float]:
        seconds, traffic = roofline(chip, cost)
        count = None if stated_cost(instruction) else cycles(instruction)  # a kernel has 0 cycles
        return (seconds if count is None else count / chip.clock), traffic

    def by_roofline(_: Instruction, cost: Cost) -> tuple[float, float]:
        return roofline(chip, cost)

    def joined(instruction: Instruction, cost: Cost) -> tuple[float, float]:
        bound_by_products = cost.work / (FLOPS_SHARE * chip.flops) >= roofline(chip, cost)[0] > 0.0
        return (by_cycles if bound_by_products else by_roofline)(instruction, cost)

    if not chip.clock:
        return {"roofline": by_roofline}
    return {"cycles": by_cycles, "roofline": by_roofline, "joined": joined}


def _copies(machine: Target) -> Callable[[Cost], tuple[float, float]]:
    def seconds(cost: Cost) -> tuple[float, float]:
        host = cost.host_bytes / machine.chip.host
        return roofline(machine.chip, replace(cost, host_bytes=0.0))[0], host

    return seconds


def _rows(
    schedule: Schedule, runs: Mapping[str, Device], named: Mapping[Any, Instruction], source: Callable[..., str]
) -> list[Row]:
    found: dict[Any, dict[str, Any]] = {}
    for measure, device in runs.items():
        for entry in (entry for entry in device.log if entry.what != "sent"):
            row = found.setdefault((entry.key, entry.what), {"trips": {}, "seconds": {}, "exposed": {}})
            spent = row["seconds" if entry.what == "compute" else "exposed"]
            spent[measure] = spent.get(measure, 0.0) + entry.weight * entry.seconds
            row["trips"][measure] = row["trips"].get(measure, 0.0) + entry.weight
    rows = []
    for (key, what), row in found.items():
        count = max(row.pop("trips").values())
        cost, one = schedule.costs.get(key, Cost()), named[key]
        work = {"flops": count * cost.flops, "hbm_bytes": count * cost.hbm_bytes} if what != "wire" else {}
        rows.append(Row(one.name, what, count, **work, **row, op_name=one.op_name, source=source(one)))
    return rows


def _traffic(schedule: Schedule, runs: Mapping[str, Device], wire_of: Callable[[Collective], Any]) -> list[Traffic]:
    weights: dict[Any, float] = {}
    exposed: dict[Any, dict[str, float]] = {}
    for measure, device in runs.items():
        for entry in device.log:
            spent = exposed.setdefault(entry.key, dict.fromkeys(runs, 0.0))
            spent[measure] += entry.weight * entry.seconds if entry.what == "wire" else 0.0
            if entry.what == "sent" and measure == "roofline":
                weights[entry.key] = weights.get(entry.key, 0.0) + entry.weight
    found = []
    for key, each in schedule.collectives.items():
        for collective in each:  # a fusion can contain several, which share its exposed time
            share = {name: seconds / len(each) for name, seconds in exposed.get(key, {}).items()}
            one = wire_of(collective)
            found.append(Traffic(collective, weights.get(key, 0.0) / len(each), one.seconds, one.over, share))
    return found


def _sum(device: Device, what: str) -> float:
    return sum(entry.weight * entry.seconds for entry in device.log if entry.what == what)


def main(path: str, target: str, result: str = "") -> None:
    """Print the estimate of a program."""
    data = Path(path).read_bytes()
    text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
    known = json.loads(Path(result).read_text()) if result else {}
    print(table(estimate(text, target, known.get("coordinates"), known.get("memory"))))


if __name__ == "__main__":
    main(*sys.argv[1:])
