"""Simulates the schedule of a compiled program: its compute time and its exposed communication.

Instructions run in the order of the schedule. `now` is the simulated time. A dimension of the topology carries one
collective at a time, or two permutes in opposite directions.

    an instruction            now += its time: compiler cycles / clock rate, or a roofline if the compiler gives none
    a kernel                  the time by the cost that it states
    a synchronous collective  starts when its links are free; now advances to its end, and all of it is exposed
    start ... done            runs in parallel with the instructions in between; the time left at `done` is exposed
    transfer of host memory   the same, on the two directions of the link to the host (`host_transfers`)
    while                     simulates its body twice. The second iteration counts for all further ones, so that a
                              collective that starts in one iteration and ends in the next is overlapped
    conditional               the branch that takes longest
    asynchronous copies       use the memory bandwidth that compute leaves idle. The time that does not fit is exposed.
                              It is added to the roofline time only, not to the time by compiler cycles
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.sharding.hlo.collectives import SENDS, Collective, Collectives
from autoshard.sharding.hlo.host_transfers import TransferRuns, start_of, transfer_at
from autoshard.sharding.hlo.kernel_costs import Kernels, cycles_of, is_free, kernel_cost, reaches_host
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.parser import Computation, Instruction, Program
from autoshard.sharding.hlo.trip_counts import Loops

ASYNC_SUFFIXES = ("-start", "-update", "-done")
SYNCHRONOUS = "at once"  # the key of a synchronous collective in `Clock.running`

RunKey = tuple[str, str, int]  # computation, instruction, index among its collectives


@shown
@dataclass
class CollectiveRuns:
    """One collective of the program and its runs in one step.

    Attributes:
        collective: the collective.
        once_us: microseconds of one run.
        links: the links that it uses (`ProgramLinks.links`).
        trips: number of runs.
        exposed_us: exposed microseconds of all runs together.
        is_asynchronous: whether compute can run while it runs.
    """

    collective: Collective
    once_us: float
    links: frozenset[tuple[int, int]]
    trips: float = 0.0
    exposed_us: float = 0.0
    is_asynchronous: bool = False


@shown
@dataclass(frozen=True)
class Running:
    """A collective or a transfer that is running, and the time at which it ends."""

    end: float
    runs: CollectiveRuns | TransferRuns


@shown
@dataclass
class Clock:
    """The state of the simulation.

    Attributes:
        now: microseconds since the start of the step.
        worked: microseconds of compute since then.
        busy_until: link -> the time until which it is in use.
        running: key -> the asynchronous collective or transfer that is running.
    """

    now: float = 0.0
    worked: float = 0.0
    busy_until: dict[tuple[int, int], float] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)

    def copy(self) -> Clock:
        """A copy that can advance on its own."""
        return Clock(self.now, self.worked, dict(self.busy_until), dict(self.running))

    def repeat(self, before: Clock, times: float) -> None:
        """Repeats what happened since `before`: advances the clock, and the collectives that started since then.

        Args:
            before: the state at the start of the repeated part.
            times: number of repetitions.
        """
        time = times * (self.now - before.now)
        self.now += time
        self.worked += times * (self.worked - before.worked)
        self.busy_until = {
            link: end + time * (before.busy_until.get(link) != end) for link, end in self.busy_until.items()
        }
        for key, running in self.running.items():
            if before.running.get(key) is not running:
                self.running[key] = Running(running.end + time, running.runs)


@dataclass
class Totals:
    """The totals of one step.

    Attributes:
        compute_us: microseconds by the compiler's cycles, or by the roofline where it gives none.
        roofline_us: microseconds by the roofline alone.
        cycles: the compiler's cycles of all instructions; 0 if it gives none.
        to_host: whether data moves to or from the host's memory in a way that is not priced.
    """

    compute_us: float = 0.0
    roofline_us: float = 0.0
    cycles: float = 0.0
    to_host: bool = False


@dataclass
class IdleMemory:
    """How long one computation leaves the memory idle, and how much of that its asynchronous copies need.

    Attributes:
        left_us: microseconds in which its instructions do not use the memory.
        copies_us: microseconds that its asynchronous copies need.
    """

    left_us: float = 0.0
    copies_us: float = 0.0


class Schedule:
    """The simulation of one program.

    Args:
        program: the program.
        kernels: prices its instructions.
        links: prices its collectives.
    """

    def __init__(self, program: Program, kernels: Kernels, links: ProgramLinks):
        self.program, self.kernels, self.links = program, kernels, links
        self.collectives, self.loops = Collectives(program, links.slices), Loops(program)
        self.runs: dict[RunKey, CollectiveRuns] = {}
        self.transfers: dict[str, TransferRuns] = {}  # key -> the transfer of host memory
        self.totals = Totals()
        self.kernel_runs: dict[str, tuple[float, float]] = {}  # kernel with a known cost -> runs, microseconds
        self.unknown_loops: dict[str, Instruction] = {}
        self._priced: dict[int, tuple[float, float, float, int]] = {}
        self._worked_at: dict[int, float] = {}  # id of a transfer -> `Clock.worked` at its last start
        self._transfer_at: dict[int, TransferRuns | None] = {}  # id of an instruction -> the transfer that it starts

    def run(self) -> list[CollectiveRuns]:
        """Simulates one step and returns its collectives in the order in which they first run."""
        self._body(Clock(), self.program.entry, 1.0)
        return [runs for runs in self.runs.values() if runs.trips]

    def _body(self, clock: Clock, computation: Computation, weight: float) -> None:
        idle_memory = IdleMemory()
        for i in computation.instructions:
            if i.opcode == "while":
                self._loop(clock, computation, i, weight)
            elif i.opcode == "conditional":
                self._branch(clock, i, weight)
            elif i.opcode == "call" and i.called:
                self._body(clock, self.program.computations[i.called[0]], weight)
            else:
                self._step(clock, computation, i, weight, idle_memory)
        self.totals.roofline_us += weight * max(idle_memory.copies_us - idle_memory.left_us, 0.0)

    def _step(
        self, clock: Clock, computation: Computation, i: Instruction, weight: float, idle_memory: IdleMemory
    ) -> None:
        events = self.collectives.events(computation, i)
        for number, event in enumerate(events):
            if event.phase == "start" and event.collective:
                self._start(clock, (computation.name, i.name, number), event.collective, event.key, weight)
        if i.opcode.endswith(ASYNC_SUFFIXES) or i.opcode in SENDS:
            self._copy(computation, i, idle_memory)
            idle_memory.left_us += self._transfer(clock, computation, i, weight)
        elif self._starts_transfer(computation, i):
            idle_memory.left_us += self._transfer(clock, computation, i, weight)
        elif not any(event.phase == "whole" for event in events):
            self._compute(clock, computation, i, weight, idle_memory)
        for number, event in enumerate(events):
            key = event.key
            if event.phase == "whole" and event.collective:
                key = SYNCHRONOUS
                self._start(clock, (computation.name, i.name, number), event.collective, key, weight)
            if event.phase != "start":
                idle_memory.left_us += self._wait(clock, key, weight)

    def _compute(
        self, clock: Clock, computation: Computation, i: Instruction, weight: float, idle_memory: IdleMemory
    ) -> None:
        if is_free(i):
            return
        if id(i) not in self._priced:
            self._priced[id(i)] = self._price(computation, i)
        time, roofline, memory, cycles = self._priced[id(i)]
        clock.now += time
        clock.worked += time
        idle_memory.left_us += roofline - memory
        self.totals.compute_us += weight * time
        self.totals.roofline_us += weight * roofline
        self.totals.cycles += weight * cycles
        if i.opcode == "custom-call" and kernel_cost(computation, i):
            name = re.sub(r"[.\d]+$", "", i.name)
            runs, us = self.kernel_runs.get(name, (0.0, 0.0))
            self.kernel_runs[name] = runs + weight, us + weight * time

    def _price(self, computation: Computation, i: Instruction) -> tuple[float, float, float, int]:
        """The time, the roofline time and the memory time of an instruction in microseconds, and its cycles."""
        roofline, memory = self.kernels.times_us(computation, i)
        cycles, clock_hz = cycles_of(i), self.kernels.chip.clock_hz
        if kernel_cost(computation, i):  # the compiler counts 0 cycles
            return roofline, roofline, memory, round(roofline * clock_hz / 1e6)
        time = roofline if cycles is None or not clock_hz else cycles / clock_hz * 1e6
        return time, roofline, memory, cycles or 0

    def _copy(self, computation: Computation, i: Instruction, idle_memory: IdleMemory) -> None:
        """Counts an asynchronous copy at its start."""
        if i.opcode.endswith("-start") and not self.collectives.contains_collective(i):
            self.totals.to_host |= reaches_host(i) and not self._starts_transfer(computation, i)
            idle_memory.copies_us += self.kernels.times_us(computation, i)[1]

    def _starts_transfer(self, computation: Computation, i: Instruction) -> TransferRuns | None:
        """The transfer of host memory that an instruction starts, or runs as a whole."""
        if id(i) not in self._transfer_at:
            self._transfer_at[id(i)] = transfer_at(self.program, computation, i, self.kernels.chip)
        return self._transfer_at[id(i)]

    def _transfer(self, clock: Clock, computation: Computation, i: Instruction, weight: float) -> float:
        """Starts a transfer of host memory, or waits for its end, and returns the exposed microseconds."""
        runs = self._starts_transfer(computation, i)
        if runs is not None:
            self.totals.to_host |= not runs.once_us
            (link,) = runs.links
            end = max(clock.now, clock.busy_until.get(link, 0.0)) + runs.once_us
            clock.busy_until[link] = end
            clock.running[_transfer_key(computation, i)] = Running(end, runs)
            self.transfers[_transfer_key(computation, i)] = runs
            runs.trips += weight
            self._worked_at[id(runs)] = clock.worked
            return 0.0 if runs.is_asynchronous else self._wait(clock, _transfer_key(computation, i), weight)
        start = start_of(computation, i) if i.opcode.endswith("-done") else None
        if start is None or (ended := self._starts_transfer(computation, start)) is None:
            return 0.0
        ended.compute_us = clock.worked - self._worked_at[id(ended)]
        return self._wait(clock, _transfer_key(computation, start), weight)

    def _start(self, clock: Clock, run_key: RunKey, collective: Collective, key: str, weight: float) -> None:
        if not collective.wire_bytes:
            return
        runs = self.runs.get(run_key)
        if runs is None:
            time, links = self.links.time_us(collective), self.links.links(collective)
            runs = self.runs[run_key] = CollectiveRuns(collective, time, links, is_asynchronous=key != SYNCHRONOUS)
        begin = max([clock.now, *(clock.busy_until.get(link, 0.0) for link in runs.links)])
        clock.busy_until.update(dict.fromkeys(runs.links, begin + runs.once_us))
        clock.running[key] = Running(begin + runs.once_us, runs)
        runs.trips += weight

    def _wait(self, clock: Clock, key: str, weight: float) -> float:
        """Advances the clock to the end of a collective and returns the exposed microseconds."""
        running = clock.running.pop(key, None)
        left = max(running.end - clock.now, 0.0) if running else 0.0
        if running:
            clock.now += left
            running.runs.exposed_us += weight * left
        return left

    def _loop(self, clock: Clock, computation: Computation, loop: Instruction, weight: float) -> None:
        trips = self.loops.trips(computation, loop)
        if trips is None:
            self.unknown_loops[loop.name] = loop
        trips = 1 if trips is None else trips
        body = self.program.computations[loop.attribute("body")]
        if trips:
            self._body(clock, body, weight)
        if trips > 1:
            before = clock.copy()
            self._body(clock, body, weight * (trips - 1))
            clock.repeat(before, trips - 2)

    def _branch(self, clock: Clock, conditional: Instruction, weight: float) -> None:
        branches = [self.program.computations[name] for name in conditional.called]
        clocks = [clock.copy() for _ in branches]
        for branch_clock, branch in zip(clocks, branches, strict=True):
            self._body(branch_clock, branch, 0.0)
        longest = max(range(len(clocks)), key=lambda n: clocks[n].now)
        self._body(clock, branches[longest], weight)


def _transfer_key(computation: Computation, i: Instruction) -> str:
    return f"host {computation.name}/{i.name}"
