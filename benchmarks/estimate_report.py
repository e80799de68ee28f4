"""The table that `estimate.py` prints."""

from __future__ import annotations

import io

from estimate_result import Estimate
from rich.console import Console
from rich.table import Table

SHOWN = 12
WIDTH = 160


def table(estimate: Estimate) -> str:
    """Return the text: step, compute, communication, memory; the largest collectives; the longest instructions."""
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(f"{estimate.target}, {estimate.partitions} partitions, one device: {_sums(estimate)}")
    console.print(_summary(estimate))
    console.print(_collectives(estimate))
    console.print(_instructions(estimate))
    for note in _notes(estimate):
        console.print(note)
    return console.export_text().rstrip()


def _sums(estimate: Estimate) -> str:
    gigabytes = f"{estimate.hbm_bytes / 1e9:.4g} GB of memory traffic, {estimate.wire_bytes / 1e9:.4g} GB sent"
    return f"{estimate.flops:.4g} operations, {gigabytes}"


def _summary(estimate: Estimate) -> Table:
    rows = Table()
    for column in ("ms", "step", "compute", "exposed wire", "exposed copies", "memory", "peak", "limit"):
        rows.add_column(column, justify="right" if column != "ms" else "left")
    for name in estimate.compute:
        parts = (estimate.step[name], estimate.compute[name], estimate.exposed[name], estimate.copies[name])
        memory = (estimate.memory_bytes, estimate.peak_bytes, estimate.memory_limit)
        rows.add_row(name, *map(_ms, parts), *("" if size is None else f"{size / 2**30:.2f} GiB" for size in memory))
    return rows


def _collectives(estimate: Estimate) -> Table:
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
    largest = sorted(estimate.traffic, key=lambda each: -each.trips * each.seconds)
    for each in largest[:SHOWN]:
        one = each.collective
        rows.add_row(
            one.kind, one.name, f"{len(one.groups)} x {one.size}", each.over, f"{each.trips:g}",
            f"{one.payload_bytes / 1e6:.4g}", f"{each.trips * one.wire_bytes / 1e6:.4g}",
            _ms(each.trips * each.seconds), " / ".join(map(_ms, each.exposed.values())), short_source(one.source),
        )  # fmt: skip
    return rows


def _instructions(estimate: Estimate) -> Table:
    rows = Table(title="instructions", title_justify="left")
    for column in ("name", "what", "trips", *(f"{name} ms" for name in estimate.compute), "of", "source"):
        rows.add_column(column, justify="right" if "ms" in column or column == "trips" else "left")
    measure = "cycles" if "cycles" in estimate.compute else "roofline"
    for row in estimate.top(SHOWN, measure):
        spent = [row.seconds.get(name, row.exposed.get(name, 0.0)) for name in estimate.compute]
        rows.add_row(
            row.name, row.what, f"{row.trips:g}", *map(_ms, spent), row.op_name[-44:], short_source(row.source)
        )
    return rows


def _notes(estimate: Estimate) -> list[str]:
    notes = []
    if estimate.without_cycles:
        seconds = _ms(estimate.without_cycles_seconds)
        notes.append(f"{estimate.without_cycles} instructions have no cycles and count by the roofline: {seconds} ms")
    if estimate.unknown_loops:
        notes.append(f"loops with unknown trip counts, counted once: {', '.join(estimate.unknown_loops)}")
    if estimate.opaque:
        notes.append(f"kernels with unknown cost: {', '.join(estimate.opaque)}")
    return notes


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def short_source(source: str) -> str:
    """Return a source line with the last two parts of its path."""
    return "/".join(source.split("/")[-2:])
