"""Simulated schedules: compute time, exposed communication, and what compute hides."""

import pytest

from autoshard.sharding.hlo.kernel_costs import Kernels
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.hlo.schedule import Schedule
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.targets import find_target
from tests.sharding.hlo.texts import loop, text_of

TARGET = find_target("v5e:2x4")
CLOCK = TARGET.chip.clock_hz / 1e6  # cycles per microsecond
ROWS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
SENT = 45_000_000  # bytes: 1 ms on one link, and twice that for an all-reduce
WIRE = TARGET.topology.time_us("all-gather", ProgramLinks(TARGET.topology, tuple(range(8))).pieces((0, 1)), SENT / 2)


def work(name, us, operand="a"):
    """An instruction that takes `us` microseconds by the compiler's cycles."""
    cycles = round(us * CLOCK)
    return f'%{name} = f32[8]{{0:S(1)}} negate(%{operand}), backend_config={{"estimated_cycles":"{cycles}"}}'


def run(entry, *computations):
    program = parse_program(text_of(entry, *computations))
    schedule = Schedule(program, Kernels(program, TARGET.chip), ProgramLinks(TARGET.topology, tuple(range(8))))
    return schedule, schedule.run()


GATHER = f"f32[{SENT // 4}] all-gather(%w), channel_id=1, {ROWS}, dimensions={{0}}"
START = f"(f32[{SENT // 8}], f32[{SENT // 4}]) all-gather-start(%w), channel_id=1, {ROWS}, dimensions={{0}}"
ARGUMENTS = f"%a = f32[8]{{0:S(1)}} parameter(0)\n%w = f32[{SENT // 8}] parameter(1)"


def test_a_synchronous_collective_is_exposed():
    schedule, (gather,) = run(f"{ARGUMENTS}\n{work('x', 100)}\nROOT %g = {GATHER}")
    assert gather.once_us == gather.exposed_us == pytest.approx(WIRE)
    assert not gather.is_asynchronous
    assert schedule.totals.compute_us == pytest.approx(100)
    assert schedule.totals.cycles == pytest.approx(100 * CLOCK)


@pytest.mark.parametrize(("between", "exposed"), [(0, WIRE), (100, WIRE - 100), (2000, 0)])
def test_work_between_start_and_end_hides_a_collective(between, exposed):
    inside = work("x", between) if between else ""
    _, (gather,) = run(f"{ARGUMENTS}\n%s = {START}\n{inside}\nROOT %d = f32[{SENT // 4}] all-gather-done(%s)")
    assert (gather.exposed_us, gather.is_asynchronous) == (pytest.approx(exposed), True)


def test_two_collectives_take_turns_on_the_same_links():
    _, runs = run(f"""
        {ARGUMENTS}
        %s = {START}
        %t = {START.replace("channel_id=1", "channel_id=2")}
        %d = f32[{SENT // 4}] all-gather-done(%s)
        ROOT %e = f32[{SENT // 4}] all-gather-done(%t)
    """)
    assert [r.exposed_us for r in runs] == [pytest.approx(WIRE)] * 2


def test_two_collectives_on_different_dimensions_run_in_parallel():
    columns = "replica_groups={{0,2,4,6},{1,3,5,7}}"
    _, runs = run(f"""
        {ARGUMENTS}
        %s = {START}
        %t = {START.replace("channel_id=1", "channel_id=2").replace(ROWS, columns)}
        %e = f32[{SENT // 4}] all-gather-done(%t)
        ROOT %d = f32[{SENT // 4}] all-gather-done(%s)
    """)
    assert runs[0].exposed_us == 0  # it ends before the wait for the other one does
    assert runs[1].exposed_us == pytest.approx(runs[1].once_us)


STATE = f"(s32[], f32[8], f32[{SENT // 8}])"


def five_times(*body, name="body", condition="condition"):
    """A loop of five iterations over a counter, `%a` and `%w`; its body computes `%x` from `%a`."""
    lines = "\n".join(line for text in body for line in text.strip().splitlines())
    computations = loop(
        "%limit = s32[] constant(5)\n%i = s32[] get-tuple-element(%p), index=0\n"
        "ROOT %go = pred[] compare(%i, %limit), direction=LT",
        f"""
        %i2 = s32[] get-tuple-element(%q), index=0
        %one = s32[] constant(1)
        %next = s32[]{{:S(1)}} add(%i2, %one)
        %a = f32[8]{{0:S(1)}} get-tuple-element(%q), index=1
        %w = f32[{SENT // 8}] get-tuple-element(%q), index=2
        {lines}
        ROOT %after = {STATE} tuple(%next, %x, %w)
        """,
        STATE.strip("()"),
    )
    return computations.replace("%body (", f"%{name} (").replace("%condition (", f"%{condition} (")


AROUND = f"""
    {ARGUMENTS}
    %zero = s32[] constant(0)
    %state = {STATE} tuple(%zero, %a, %w)
    ROOT %loop = {STATE} while(%state), condition=%condition, body=%body
"""


def test_a_loop_counts_by_its_trips():
    schedule, (gather,) = run(AROUND, five_times(work("x", 100), f"%g = {GATHER}"))
    assert schedule.totals.compute_us == pytest.approx(500, rel=1e-3)
    assert (gather.trips, gather.exposed_us) == (5, pytest.approx(5 * WIRE))


def test_a_collective_that_ends_in_the_next_iteration_is_hidden_there():
    """In the body, the end comes before the start: it belongs to the previous iteration."""
    marks = "\n".join(
        f"%{name} (p: f32[{SENT // 8}]) -> f32[{SENT // 4}] {{\n  %p = f32[{SENT // 8}] parameter(0)\n  %g = {GATHER}, "
        f'backend_config={{"async_collective_fusion_config":{{}}}}\n  ROOT %m = f32[{SENT // 4}] custom-call(%g), '
        f'custom_call_target="AsyncCollective{mark}"\n}}\n'.replace("%w", "%p")
        for name, mark in (("begin", "Start"), ("finish", "Done"))
    )
    body = f"""
    %d = f32[{SENT // 4}] fusion(%w), kind=kCustom, calls=%finish
    %s = f32[{SENT // 4}] fusion(%w), kind=kCustom, calls=%begin
    {work("x", 300)}
    """
    _, (gather,) = run(AROUND, marks, five_times(body))
    assert gather.trips == 5
    assert gather.exposed_us == pytest.approx(4 * (WIRE - 300))


def test_a_loop_hides_a_collective_that_started_before_it():
    entry = AROUND.replace("%state =", f"%s = {START}\n    %state =").replace("ROOT ", "")
    _, (gather,) = run(f"{entry}\nROOT %d = f32[{SENT // 4}] all-gather-done(%s)", five_times(work("x", 50)))
    assert gather.exposed_us == pytest.approx(WIRE - 250, rel=1e-3)


def test_nested_loops():
    inner = five_times(work("x", 100), f"%g = {GATHER}")
    outer = five_times(
        f"%zero = s32[] constant(0)\n%state = {STATE} tuple(%zero, %a, %w)",
        f"%l = {STATE} while(%state), condition=%condition, body=%body",
        "%x = f32[8]{0:S(1)} get-tuple-element(%l), index=1",
        name="outer_body",
        condition="outer_condition",
    )
    entry = AROUND.replace("condition=%condition, body=%body", "condition=%outer_condition, body=%outer_body")
    schedule, (gather,) = run(entry, inner, outer)
    assert (gather.trips, gather.exposed_us) == (25, pytest.approx(25 * WIRE))
    assert schedule.totals.compute_us == pytest.approx(2500, rel=1e-3)


def test_a_loop_whose_trips_are_unknown_counts_once():
    schedule, (gather,) = run(
        AROUND.replace("%zero = s32[] constant(0)", "%zero = s32[] parameter(2)"),
        five_times(work("x", 100), f"%g = {GATHER}"),
    )
    assert (gather.trips, list(schedule.unknown_loops)) == (1, ["loop"])


def test_the_longest_branch_counts():
    branches = [
        f"%{name} (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0:S(1)}} parameter(0)\n  ROOT {work('x', us, 'p')}\n}}\n"
        for name, us in (("short", 10), ("long", 70))
    ]
    schedule, _ = run(
        f"{ARGUMENTS}\n%n = s32[] constant(0)\n"
        "ROOT %c = f32[8] conditional(%n, %a, %a), branch_computations={%short, %long}",
        *branches,
    )
    assert schedule.totals.compute_us == pytest.approx(70, rel=1e-3)


def test_an_instruction_without_cycles_takes_its_roofline_time():
    size = 8192 * 100
    schedule, _ = run(f"%a = f32[{size}] parameter(0)\nROOT %x = f32[{size}] negate(%a)")
    expected = 2 * 4 * size / (819e9 * 0.8) * 1e6
    assert schedule.totals.compute_us == schedule.totals.roofline_us == pytest.approx(expected)
    assert schedule.totals.cycles == 0


def test_copies_use_the_memory_time_that_compute_leaves():
    size = 819_000 * 8 // 10  # bytes: 0.8 us each way
    lines = f"""
        %a = f32[{size // 4}] parameter(0)
        %b = f32[16,32]{{1,0:S(1)}} parameter(1)
        %s = (f32[{size // 4}]{{0:S(1)}}, f32[{size // 4}], u32[]) copy-start(%a)
        WORK
        ROOT %d = f32[{size // 4}]{{0:S(1)}} copy-done(%s)
    """
    copied = run(lines.replace("WORK", ""))[0].totals.roofline_us
    assert copied == pytest.approx(1.0)
    n = 4096
    flops_us = 2 * n**3 / (197e12 * CHIPS["v5e"].efficiency) * 1e6
    dot = (f"%p = bf16[{n},{n}]{{1,0:S(1)}} constant(0)\n%x = bf16[{n},{n}]{{1,0:S(1)}} dot(%p, %p), "
           "lhs_contracting_dims={1}, rhs_contracting_dims={0}")  # fmt: skip
    assert run(lines.replace("WORK", dot))[0].totals.roofline_us == pytest.approx(flops_us)
