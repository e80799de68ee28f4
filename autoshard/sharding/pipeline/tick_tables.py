"""The numbers that a tick takes: for each part its microbatch, its chunk of layers, and the slots of waiting values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.sharding.pipeline.schedules import BACKWARD, FORWARD, IDLE, ON_STAGES, Schedule, Slots

Tables = dict[str, np.ndarray]


def tick_tables(
    schedule: Schedule,
    waiting: Mapping[str, tuple[str, Sequence[str]]],
    slots: Mapping[str, Slots],
    reverse: bool,
) -> Tables:
    """Return the tables, `[T, ...]` each. The last dimension is the stages, in the order of their layers.

    `PART` has the microbatch of a part, and `NAME PART` the slots of a waiting value that the part writes or reads. An
    idle stage reads none, but writes one in which nothing waits. If
    a stage has several chunks of layers, `PART chunk` has the chunk. `PART enters`, `[T, 1]`, is then whether a
    microbatch begins its way through the stages, and the first of them takes nothing from the last one.

    Args:
        schedule: the schedule.
        waiting: waiting value -> the part that makes it, and those that take it. If no part takes it, it does not wait.
        slots: waiting value -> its slots.
        reverse: whether the first stage has the last layers.
    """
    found = {part: schedule.working(part) for part in schedule.ticks}
    for name, (made, taken) in waiting.items():
        for part in taken:
            found[f"{name} {part}"] = schedule.slot_table(slots[name], part)
        if taken:
            found[f"{name} {made}"] = schedule.write_table(slots[name], made, taken)
    if schedule.chunks > 1:
        found |= {f"{part} chunk": schedule.working_chunks(part) for part in ON_STAGES if part in schedule.ticks}
        found[f"{FORWARD} enters"] = found[f"{FORWARD} chunk"][:, :1] == 0
        if BACKWARD in schedule.ticks:
            found[f"{BACKWARD} enters"] = found[f"{BACKWARD} chunk"][:, -1:] == schedule.chunks - 1
    return _in_order_of_layers(found, schedule.chunks) if reverse else found


def always_write(schedule: Schedule, waiting: Mapping[str, tuple[str, Sequence[str]]], tables: Tables) -> set[str]:
    """Return the waiting values of which every stage writes a slot in each tick, see `Schedule.write_table`."""
    runs = {part: np.zeros(schedule.length, bool) for part in schedule.ticks}
    for start, end, parts in schedule.phases:
        for part in parts:
            runs[part][start:end] = True
    found = ((name, tables[f"{name} {made}"][runs[made]]) for name, (made, taken) in waiting.items() if taken)
    return {name for name, table in found if (table != IDLE).all()}


def _in_order_of_layers(tables: Mapping[str, np.ndarray], chunks: int) -> dict[str, np.ndarray]:
    """Return tables for a stack whose last layer runs first: stages and chunks in the order of the layers."""
    found = {}
    for name, table in tables.items():
        if name.endswith(" chunk"):
            table = np.where(table == IDLE, IDLE, chunks - 1 - table)
        found[name] = (table[:, ::-1] if table.ndim == 3 else table)[..., ::-1]
    return found
