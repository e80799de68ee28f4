"""The table that `estimate.py` prints."""

from __future__ import annotations

import io

from estimate_result import Estimate
from rich.console import Console
from rich.table import Table

SHOWN = 12
WIDTH = 160


def table(found: Estimate) -> str:
    """Step, compute, communication and memory; the largest collectives; the instructions that take longest."""
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(f"{found.target}, {found.partitions} partitions, one device: {_sums(found)}")
    console.print(_summary(found))
    console.print(_collectives(found))
    console.print(_instructions(found))
    for note in _notes(found):
        console.print(note)
    return console.export_text().rstrip()


def _sums(found: Estimate) -> str:
    gigabytes = f"{found.hbm_bytes / 1e9:.4g} GB of memory traffic, {found.wire_bytes / 1e9:.4g} GB sent"
    return f"{found.flops:.4g} operations, {gigabytes}"


def _summary(found: Estimate) -> Table:
    rows = Table()
    for column in ("ms", "step", "compute", "exposed wire", "exposed copies", "memory", "peak", "limit"):
        rows.add_column(column, justify="right" if column != "ms" else "left")
    for name in found.compute:
        parts = (found.step[name], found.compute[name], found.exposed[name], found.copies[name])
        memory = (found.memory_bytes, found.peak_bytes, found.memory_limit)
        rows.add_row(name, *map(_ms, parts), *("" if size is None else f"{size / 2**30:.2f} GiB" for size in memory))
    return rows


def _collectives(found: Estimate) -> Table:
    rows = Table(title="collectives", title_justify="left")
    for column in (
        "kind",
        "name",
        "groups",
        "over",
        "trips",
        "payload MB",
        "wire MB",
        "wire ms",
        "exposed ms",
        "source",
    ):
        rows.add_column(column, justify="left" if column in ("kind", "name", "over", "source") else "right")
    largest = sorted(found.traffic, key=lambda each: -each.trips * each.seconds)
    for each in largest[:SHOWN]:
        one = each.collective
        rows.add_row(
            one.kind, one.name, f"{len(one.groups)} x {one.size}", each.over, f"{each.trips:g}",
            f"{one.payload_bytes / 1e6:.4g}", f"{each.trips * one.wire_bytes / 1e6:.4g}",
            _ms(each.trips * each.seconds), " / ".join(map(_ms, each.exposed.values())), _short(one.source),
        )  # fmt: skip
    return rows


def _instructions(found: Estimate) -> Table:
    rows = Table(title="instructions", title_justify="left")
    for column in ("name", "what", "trips", *(f"{name} ms" for name in found.compute), "of", "source"):
        rows.add_column(column, justify="right" if "ms" in column or column == "trips" else "left")
    measure = "cycles" if "cycles" in found.compute else "roofline"
    for row in found.top(SHOWN, measure):
        spent = [row.seconds.get(name, row.exposed.get(name, 0.0)) for name in found.compute]
        rows.add_row(row.name, row.what, f"{row.trips:g}", *map(_ms, spent), row.op_name[-44:], _short(row.source))
    return rows


def _notes(found: Estimate) -> list[str]:
    notes = []
    if found.without_cycles:
        seconds = _ms(found.without_cycles_seconds)
        notes.append(f"{found.without_cycles} instructions without cycles: roofline in their place, {seconds} ms")
    if found.unknown_loops:
        notes.append(f"loops of unknown trips, counted once: {', '.join(found.unknown_loops)}")
    if found.opaque:
        notes.append(f"kernels of unknown cost: {', '.join(found.opaque)}")
    return notes


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _short(source: str) -> str:
    return "/".join(source.split("/")[-2:])
