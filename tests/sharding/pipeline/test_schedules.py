"""Tables of schedules: what runs when, how long values wait, and what idle stages cost."""

import numpy as np
import pytest

from autoshard.errors import PlanError
from autoshard.sharding.pipeline.loop_state import WAITING
from autoshard.sharding.pipeline.schedule_words import make_schedule, read_schedule
from autoshard.sharding.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    IDLE,
    MIDDLE,
    ON_STAGES,
    RECOMPUTE,
    SCHEDULES,
    WEIGHTS,
    Schedule,
    Slots,
)
from autoshard.sharding.pipeline.tick_tables import always_write, tick_tables

SIZES = [(2, 2), (2, 5), (4, 4), (4, 8), (3, 16)]
WORDS = [*SCHEDULES, "interleaved:2", "interleaved:3"]


@pytest.fixture(params=[(name, *size) for name in WORDS for size in SIZES], ids=str)
def schedule(request):
    """Every schedule in several sizes."""
    return make_schedule(*request.param)


def test_every_stage_runs_every_chunk_for_every_microbatch_once(schedule):
    for part in schedule.ticks:
        ran, chunks = schedule.working(part), schedule.chunks if part in ON_STAGES else 1
        assert ran.shape == (schedule.length, schedule.stages if part in ON_STAGES else 1)
        of_chunk = schedule.working_chunks(part) if part in ON_STAGES else np.where(ran == IDLE, IDLE, 0)
        for stage, chunk in zip(ran.T, of_chunk.T, strict=True):
            done = sorted((m, c) for m, c in zip(stage, chunk, strict=True) if m != IDLE)
            assert done == [(m, c) for m in range(schedule.microbatches) for c in range(chunks)]


def test_phases_run_the_parts_of_their_ticks(schedule):
    assert [a for a, _, _ in schedule.phases] == [0, *(b for _, b, _ in schedule.phases[:-1])]
    assert schedule.phases[-1][1] == schedule.length
    assert schedule.phases[-1][1] == sum(count * (phases[-1][1] - phases[0][0]) for count, phases in schedule.periods)
    for part in ON_STAGES + (MIDDLE,):
        if part in schedule.ticks:
            busy = (schedule.working(part) != IDLE).any(axis=1)
            assert [part in parts for a, b, parts in schedule.phases for _ in range(a, b)] == busy.tolist()


def test_no_slot_is_overwritten_before_it_is_read(schedule):
    last = WEIGHTS if WEIGHTS in schedule.ticks else BACKWARD
    slots = schedule.slots(FORWARD, (BACKWARD, last))
    write, read = (schedule.slot_table(slots, part) for part in (FORWARD, last))
    held = np.full((slots.count, schedule.stages), IDLE)
    for tick in range(schedule.length):
        for stage in range(schedule.stages):
            if write[tick, stage] != IDLE:
                held[write[tick, stage], stage] = schedule.items(FORWARD)[tick, stage]
            if read[tick, stage] != IDLE:
                assert held[read[tick, stage], stage] == schedule.items(last)[tick, stage]


def releases(schedule, slots, made, taken):
    """Run a schedule; return (stage, slot) of each value in the order in which its last part frees it.

    Raises:
        AssertionError: a value is written to a slot that is in use, or a slot is freed that is free already.
    """
    owners, freed = {}, []
    for tick in range(schedule.length):
        for stage in range(schedule.stages):
            for item in np.flatnonzero(schedule.by_item(made)[:, stage] == tick):
                place = stage, int(slots.of[item, stage])
                assert place not in owners, f"slot {place} is in use"
                owners[place] = item
        for stage in range(schedule.stages):
            last = np.max([np.broadcast_to(schedule.by_item(p), slots.of.shape)[:, stage] for p in taken], axis=0)
            for item in np.flatnonzero(last == tick):
                place = stage, int(slots.of[item, stage])
                assert owners.pop(place, None) == item, f"slot {place} is freed twice"
                freed.append(place)
    assert not owners
    return freed


def waiting(schedule):
    """The kinds of values that wait in a schedule: the part that makes them, and those that take them."""
    kinds = {(made, tuple(p for p in taken if p in schedule.ticks)) for made, taken in WAITING.values()}
    return [(made, taken) for made, taken in kinds if made in schedule.ticks and taken]


def test_a_slot_has_one_owner_and_is_freed_once(schedule):
    for made, taken in waiting(schedule):
        slots = schedule.slots(made, taken)
        freed = releases(schedule, slots, made, taken)
        assert len(freed) == schedule.stages * schedule.microbatches * schedule.chunks
        assert slots.count == schedule.live(made, taken).max() == 1 + max(slot for _, slot in freed)
        if slots.count > 1:
            with pytest.raises(AssertionError, match="is in use|is freed twice"):
                releases(schedule, Slots(slots.count, slots.of % (slots.count - 1)), made, taken)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_each_backward_part_frees_one_input(stages, microbatches):
    made = SCHEDULES["ftb"](stages, microbatches)
    assert made.kept == ("inputs", (RECOMPUTE,))
    held = made.live(FORWARD, RECOMPUTE)
    for stage in range(stages):
        first, last = made.ticks[BACKWARD][[0, -1], stage]
        assert held[first : last + 1, stage].tolist() == [*range(microbatches, 0, -1)]
        assert not held[last + 1 :, stage].any()


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_residuals_that_a_stage_holds(stages, microbatches):
    count = {name: make(stages, microbatches).slots(FORWARD, BACKWARD).count for name, make in SCHEDULES.items()}
    assert count["gpipe"] == count["ftb"] == microbatches
    assert count["1f1b"] == min(microbatches, 2 * stages - 1)
    assert SCHEDULES["1f1b"](stages, microbatches).live(FORWARD, BACKWARD).max(axis=0).tolist() == [
        min(microbatches, 2 * (stages - 1 - stage) + 1) for stage in range(stages)
    ]


def test_fewer_slots_would_be_wrong():
    made = SCHEDULES["1f1b"](4, 16)
    assert made.slots(FORWARD, BACKWARD).count == 7
    stage = made.slots(FORWARD, BACKWARD).of[:, 0]
    assert len({*stage[:7].tolist()}) == 7  # seven microbatches wait at once


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_what_idle_stages_cost(stages, microbatches):
    costs, n, m = {FORWARD: 1.0, BACKWARD: 2.0}, stages, microbatches
    for name in ("gpipe", "1f1b"):
        assert SCHEDULES[name](n, m).ideal(costs) == ((m + n - 1) * 3.0, m * 3.0)
    # Each backward tick has one forward part more.
    assert SCHEDULES["ftb"](n, m).ideal({**costs, RECOMPUTE: 1.0}) == ((m + n - 1) * 4.0, m * 4.0)
    # The gradients of the weights are half of the backward pass, and no stage is idle while they are computed.
    split = SCHEDULES["zb"](n, m).ideal({FORWARD: 1.0, BACKWARD: 1.0, WEIGHTS: 1.0})
    assert split == ((m + n - 1) * 2.0 + m, m * 3.0)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 16), (3, 9)])
def test_chunks_make_idle_stages_cheaper(stages, microbatches, chunks):
    made = make_schedule(f"interleaved:{chunks}", stages, microbatches)
    n, m, v = stages, microbatches, chunks
    total, work = made.ideal({FORWARD: 1.0, BACKWARD: 2.0, MIDDLE: 0.5})
    assert work == 3.5 * m and total == pytest.approx(3 * (m + (n - 1) / v) + 0.5 * m)  # the head has no idle ticks
    waiting = made.slots(FORWARD, BACKWARD).count / v  # in residuals of all layers of a stage
    assert waiting == min(m, n + (n - 1) / v) <= make_schedule("1f1b", n, m).slots(FORWARD, BACKWARD).count


def test_microbatches_that_the_stages_do_not_divide_leave_gaps():
    made = make_schedule("interleaved:2", 4, 6)
    idle = (made.working(FORWARD) == IDLE).sum(axis=0) - (made.length - made.ticks[FORWARD].max() - 1)
    assert made.ticks[FORWARD].max() < make_schedule("interleaved:2", 4, 8).ticks[FORWARD].max()
    assert (idle > 4).all()


@pytest.mark.parametrize("word", ["interleaved", "interleaved:", "interleaved:0", "interleaved:1", "interleaved:x",
                                  "interleaved:-2", "interleaved:2.5", "interleaved:\u0662"])  # fmt: skip
def test_words_without_a_number_of_chunks(word):
    with pytest.raises(PlanError, match=r"schedule is .*; give the number of chunks .* such as 'interleaved:2'"):
        read_schedule(word)


def test_a_table_that_skips_a_tick_is_refused():
    made = SCHEDULES["1f1b"](2, 4)
    late = {**made.ticks, FORWARD: made.ticks[FORWARD] * 2}
    with pytest.raises(AssertionError, match="forward moves one stage in each tick"):
        Schedule("late", 2, 4, late)


def test_an_idle_stage_writes_a_slot_in_which_nothing_waits(schedule):
    for made, every in WAITING.values():
        taken = [part for part in every if part in schedule.ticks]
        if not taken or made not in schedule.ticks:
            continue
        slots, live = schedule.slots(made, taken), schedule.live(made, taken)
        table, own = schedule.write_table(slots, made, taken), schedule.slot_table(slots, made)
        held = [[set() for _ in range(schedule.stages)] for _ in range(schedule.length)]
        last = np.max([np.broadcast_to(schedule.by_item(p), slots.of.shape) for p in taken], axis=0)
        for item, stage in np.ndindex(*slots.of.shape):
            for tick in range(schedule.by_item(made)[item, stage] + 1, last[item, stage] + 1):
                held[tick][stage].add(slots.of[item, stage])
        for tick, stage in np.ndindex(*table.shape):
            assert table[tick, stage] not in held[tick][stage]
            assert own[tick, stage] in (IDLE, table[tick, stage])
            assert table[tick, stage] != IDLE or live[tick, stage] == slots.count


@pytest.mark.parametrize(
    ("word", "expected"), [("1f1b", True), ("zb", True), ("interleaved:2", True), ("gpipe", False)]
)
def test_which_schedules_always_write(word, expected):
    schedule = make_schedule(word, 4, 8)
    waiting = {"residuals": (FORWARD, [part for part in (BACKWARD, WEIGHTS) if part in schedule.ticks])}
    slots = {"residuals": schedule.slots(*waiting["residuals"])}
    tables = tick_tables(schedule, waiting, slots, reverse=False)
    assert always_write(schedule, waiting, tables) == ({"residuals"} if expected else set())
