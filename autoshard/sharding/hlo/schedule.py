"""Runs a compiled program on a clock: how long it computes, and how long it waits for what is on the wire.

Instructions run in the order of the schedule. `now` is the time. A dimension of the topology is taken by one collective
at a time, or by two permutes in opposite directions.

    an instruction             now += its time: cycles over the clock, a roofline where the compiler gives none
    a collective               begins when its links are free; at once waited for: all of what is left is exposed
    start ... done             runs beside what stands between; exposed is what is left at its end
    while                      its body once, then once more: that trip counts for all others, so that what begins in
                               one and ends in the next is seen
    conditional                the branch that takes longest
    copies beside other work   take the memory's time that computing leaves; what does not fit in is waited for, in the
                               roofline only
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.sharding.hlo.collectives import SENDS, Collective, Collectives
from autoshard.sharding.hlo.kernel_costs import Kernels, cycles_of, is_free, reaches_host
from autoshard.sharding.hlo.link_times import Wires
from autoshard.sharding.hlo.parser import Computation, Instruction, Program
from autoshard.sharding.hlo.trip_counts import Loops

ASIDE = ("-start", "-update", "-done")
AT_ONCE = "at once"  # the key of a collective that is waited for where it begins

Place = tuple[str, str, int]  # computation, instruction, which of its collectives


@dataclass
class Runs:
    """One collective of the program, and how it ran in a step.

    Attributes:
        collective: which.
        once_us: how long one run is on the wire.
        links: what it takes, see `Wires.links`.
        trips: how often it ran.
        exposed_us: how long it was waited for, all runs together.
        beside: whether it ran beside other work.
    """

    collective: Collective
    once_us: float
    links: frozenset[tuple[int, int]]
    trips: float = 0.0
    exposed_us: float = 0.0
    beside: bool = False


@dataclass(frozen=True)
class Flight:
    """A collective on the wire, and when it ends."""

    end: float
    runs: Runs


@dataclass
class Clock:
    """The time, until when links are taken, and what is on the wire."""

    now: float = 0.0
    taken: dict[tuple[int, int], float] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)

    def copy(self) -> Clock:
        """One that can go another way."""
        return Clock(self.now, dict(self.taken), dict(self.flights))

    def skip(self, before: Clock, times: float) -> None:
        """Lets pass again, some times, what passed since `before`; what began in it begins so much later."""
        time = times * (self.now - before.now)
        self.now += time
        self.taken = {link: end + time * (before.taken.get(link) != end) for link, end in self.taken.items()}
        for key, f in self.flights.items():
            if before.flights.get(key) is not f:
                self.flights[key] = Flight(f.end + time, f.runs)


@dataclass
class Totals:
    """What a step takes, in microseconds and cycles.

    Attributes:
        compute_us: by cycles where the compiler gives them, by the roofline elsewhere.
        roofline_us: by the roofline alone.
        cycles: the compiler's, of all that runs; 0 if it gives none.
        to_host: whether something moves to or from the host's memory, which is not priced.
    """

    compute_us: float = 0.0
    roofline_us: float = 0.0
    cycles: float = 0.0
    to_host: bool = False


@dataclass
class Spare:
    """What a computation's instructions leave of the memory's time, and what its copies take of that."""

    left_us: float = 0.0
    copies_us: float = 0.0


class Schedule:
    """A program with the clock that it runs on."""

    def __init__(self, program: Program, kernels: Kernels, wires: Wires):
        self.program, self.kernels, self.wires = program, kernels, wires
        self.collectives, self.loops = Collectives(program, wires.across), Loops(program)
        self.runs: dict[Place, Runs] = {}
        self.totals = Totals()
        self.unknown_loops: dict[str, Instruction] = {}
        self._priced: dict[int, tuple[float, float, float, int]] = {}

    def run(self) -> list[Runs]:
        """The collectives of one step, in the order in which they first run."""
        self._body(Clock(), self.program.entry, 1.0)
        return [runs for runs in self.runs.values() if runs.trips]

    def _body(self, clock: Clock, where: Computation, weight: float) -> None:
        spare = Spare()
        for i in where.instructions:
            if i.opcode == "while":
                self._loop(clock, where, i, weight)
            elif i.opcode == "conditional":
                self._branch(clock, i, weight)
            elif i.opcode == "call" and i.called:
                self._body(clock, self.program.computations[i.called[0]], weight)
            else:
                self._step(clock, where, i, weight, spare)
        self.totals.roofline_us += weight * max(spare.copies_us - spare.left_us, 0.0)

    def _step(self, clock: Clock, where: Computation, i: Instruction, weight: float, spare: Spare) -> None:
        events = self.collectives.events(where, i)
        for number, event in enumerate(events):
            if event.role == "start" and event.collective:
                self._start(clock, (where.name, i.name, number), event.collective, event.key, weight)
        if i.opcode.endswith(ASIDE) or i.opcode in SENDS:
            self._aside(where, i, spare)
        elif not any(event.role == "whole" for event in events):
            self._compute(clock, where, i, weight, spare)
        for number, event in enumerate(events):
            key = event.key
            if event.role == "whole" and event.collective:
                key = AT_ONCE
                self._start(clock, (where.name, i.name, number), event.collective, key, weight)
            if event.role != "start":
                spare.left_us += self._wait(clock, key, weight)

    def _compute(self, clock: Clock, where: Computation, i: Instruction, weight: float, spare: Spare) -> None:
        if is_free(i):
            return
        if id(i) not in self._priced:
            self._priced[id(i)] = self._price(where, i)
        time, roofline, memory, cycles = self._priced[id(i)]
        clock.now += time
        spare.left_us += roofline - memory
        self.totals.compute_us += weight * time
        self.totals.roofline_us += weight * roofline
        self.totals.cycles += weight * cycles

    def _price(self, where: Computation, i: Instruction) -> tuple[float, float, float, int]:
        """How long an instruction takes; the same by the roofline, and by its memory's time alone; its cycles."""
        roofline, memory = self.kernels.times_us(where, i)
        cycles, clock_hz = cycles_of(i), self.kernels.chip.clock_hz
        time = roofline if cycles is None or not clock_hz else cycles / clock_hz * 1e6
        return time, roofline, memory, cycles or 0

    def _aside(self, where: Computation, i: Instruction, spare: Spare) -> None:
        """A copy beside other work begins."""
        if i.opcode.endswith("-start") and not self.collectives.holds(i):
            self.totals.to_host |= reaches_host(i)
            spare.copies_us += self.kernels.times_us(where, i)[1]

    def _start(self, clock: Clock, place: Place, collective: Collective, key: str, weight: float) -> None:
        if not collective.wire_bytes:
            return
        runs = self.runs.get(place)
        if runs is None:
            time, links = self.wires.time_us(collective), self.wires.links(collective)
            runs = self.runs[place] = Runs(collective, time, links, beside=key != AT_ONCE)
        begin = max([clock.now, *(clock.taken.get(link, 0.0) for link in runs.links)])
        clock.taken.update(dict.fromkeys(runs.links, begin + runs.once_us))
        clock.flights[key] = Flight(begin + runs.once_us, runs)
        runs.trips += weight

    def _wait(self, clock: Clock, key: str, weight: float) -> float:
        """Waits for a collective's end, and says how long."""
        flight = clock.flights.pop(key, None)
        left = max(flight.end - clock.now, 0.0) if flight else 0.0
        if flight:
            clock.now += left
            flight.runs.exposed_us += weight * left
        return left

    def _loop(self, clock: Clock, where: Computation, loop: Instruction, weight: float) -> None:
        trips = self.loops.trips(where, loop)
        if trips is None:
            self.unknown_loops[loop.name] = loop
        trips = 1 if trips is None else trips
        body = self.program.computations[loop.attribute("body")]
        if trips:
            self._body(clock, body, weight)
        if trips > 1:
            before = clock.copy()
            self._body(clock, body, weight * (trips - 1))
            clock.skip(before, trips - 2)

    def _branch(self, clock: Clock, conditional: Instruction, weight: float) -> None:
        branches = [self.program.computations[name] for name in conditional.called]
        tried = [clock.copy() for _ in branches]
        for way, branch in zip(tried, branches, strict=True):
            self._body(way, branch, 0.0)
        longest = max(range(len(tried)), key=lambda n: tried[n].now)
        self._body(clock, branches[longest], weight)
