"""Transfers of host memory in compiled programs: which instructions they are, and for which the device waits."""

import dataclasses

import pytest

from autoshard.sharding.hlo.host_transfers import moved_array
from autoshard.sharding.hlo.kernel_costs import Kernels
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.hlo.schedule import Schedule
from autoshard.sharding.machines.constants import HOST_BANDWIDTH_REACHED
from autoshard.sharding.machines.targets import find_target
from tests.sharding.hlo.test_schedule import AROUND, five_times, work
from tests.sharding.hlo.texts import text_of

TARGET = find_target("v5e:2x4")
N = 3_600_000  # 14.4 MB: 1 ms on the link of 16 GB/s
ONCE = 4 * N / (TARGET.chip.host_bandwidth * HOST_BANDWIDTH_REACHED) * 1e6
HOST, DEVICE, STACK = f"f32[{N}]{{0:S(5)}}", f"f32[{N}]{{0}}", f"f32[5,{N}]{{1,0:S(5)}}"
SLICE = f"f32[1,{N}]{{1,0}}"
ARGUMENTS = f"%a = f32[8]{{0:S(1)}} parameter(0)\n%v = {DEVICE} parameter(1)\n%h = {HOST} parameter(2)"
OUT = f"({HOST}, {DEVICE}, u32[]) copy-start(%v)"
BACK = f"({DEVICE}, {HOST}, u32[]) copy-start(%h)"


def transfers(entry, *computations, chip=TARGET.chip):
    program = parse_program(text_of(entry, *computations))
    schedule = Schedule(program, Kernels(program, chip), ProgramLinks(TARGET.topology, tuple(range(8))))
    schedule.run()
    return schedule, list(schedule.transfers.values())


def test_a_chip_of_this_bandwidth_takes_a_millisecond():
    assert pytest.approx(1000) == ONCE


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%s = {OUT}", (N, True)),
        (f"%s = {BACK}", (N, False)),
        (f"%s = ({DEVICE}, {DEVICE}, u32[]) copy-start(%v)", None),
        (f"%s = ({HOST}, {HOST}, u32[]) copy-start(%h)", None),
        (f"%s = {HOST} copy(%v)", (N, True)),
        (f"%s = {DEVICE} copy(%h)", (N, False)),
        ("%s = f32[10]{0} slice(%h), slice={[0:10]}", (10, False)),
        (f"%s = {HOST} custom-call()", None),
        (f"%s = (({STACK}, s32[], s32[]), {SLICE}, u32[]) dynamic-slice-start(%h, %a, %a)", (N, False)),
        (
            f"%s = (({STACK}, {SLICE}, s32[], s32[]), {STACK}, u32[]) dynamic-update-slice-start(%h, %v, %a, %a)",
            (N, True),
        ),
    ],
)
def test_what_is_a_transfer(line, expected):
    program = parse_program(text_of(f"{ARGUMENTS}\nROOT {line}"))
    found = moved_array(program.entry, program.entry.by_name["s"])
    assert (found and (found[0].elements, found[1])) == expected


@pytest.mark.parametrize(("between", "exposed"), [(0, ONCE), (300, ONCE - 300), (2000, 0)])
def test_compute_between_start_and_end_hides_a_transfer(between, exposed):
    inside = work("x", between) if between else ""
    schedule, (out,) = transfers(f"{ARGUMENTS}\n%s = {OUT}\n{inside}\nROOT %d = {HOST} copy-done(%s)")
    assert (out.to_host, out.nbytes, out.trips) == (True, 4 * N, 1)
    assert out.exposed_us == pytest.approx(exposed, abs=1e-3)
    assert (out.distance, out.compute_us) == (bool(between), pytest.approx(between))
    assert not schedule.totals.to_host


def test_transfers_of_one_direction_take_turns_and_directions_do_not():
    end = f"%d = {HOST} copy-done(%s)"
    _, (first, second) = transfers(f"{ARGUMENTS}\n%s = {OUT}\n%t = {OUT}\n{end}\nROOT %e = {HOST} copy-done(%t)")
    assert (first.exposed_us, second.exposed_us) == (pytest.approx(ONCE), pytest.approx(ONCE))
    _, (first, second) = transfers(f"{ARGUMENTS}\n%s = {OUT}\n%t = {BACK}\n{end}\nROOT %e = {DEVICE} copy-done(%t)")
    assert (first.exposed_us, second.exposed_us) == (pytest.approx(ONCE), 0)


def test_the_device_waits_for_a_synchronous_copy():
    _, (out,) = transfers(f"{ARGUMENTS}\n{work('x', 2000)}\nROOT %d = {HOST} copy(%v)")
    assert (out.is_asynchronous, out.exposed_us, out.distance) == (False, pytest.approx(ONCE), 0)


def test_on_a_gpu_the_device_waits_for_asynchronous_copies_and_directions_take_turns():
    program = f"{ARGUMENTS}\n%s = {OUT}\n%t = {BACK}\n{work('x', 2000)}\n%d = {HOST} copy-done(%s)"
    gpu = dataclasses.replace(TARGET.chip, platform="cuda")
    _, both = transfers(f"{program}\nROOT %e = {DEVICE} copy-done(%t)", chip=gpu)
    assert [(each.is_asynchronous, each.exposed_us) for each in both] == [(False, pytest.approx(ONCE))] * 2


def test_a_loop_transfers_in_each_iteration():
    start = f"%s = {OUT.replace('%v', '%w')}"
    _, (out,) = transfers(AROUND, five_times(start, work("x", 300), f"%d = {HOST} copy-done(%s)"))
    assert (out.trips, out.compute_us) == (5, pytest.approx(300))
    assert out.exposed_us == pytest.approx(5 * (ONCE - 300), rel=1e-3)


def test_a_transfer_that_ends_in_another_iteration_has_no_distance():
    schedule, (out,) = transfers(AROUND, five_times(f"%s = {OUT.replace('%v', '%w')}", work("x", 300)))
    assert (out.distance, out.exposed_us, out.trips) == (None, 0, 5)


def test_a_chip_without_a_known_bandwidth_is_not_priced():
    chip = dataclasses.replace(TARGET.chip, host_bandwidth=0.0)
    schedule, (out,) = transfers(f"{ARGUMENTS}\n%s = {OUT}\nROOT %d = {HOST} copy-done(%s)", chip=chip)
    assert out.once_us == out.exposed_us == 0 and schedule.totals.to_host
