"""Simulate a scheduled program on a device with two clocks: how long it computes, and how long it waits.

`now` is elapsed time. `spare` is the time for which the memory's bandwidth was free. It does not advance while an
instruction uses all of the bandwidth. Instructions run one after the other, in the order of the schedule.
    instruction                  now += its seconds;  spare += its seconds - the seconds of its memory traffic
    synchronous collective       starts when its links are free; now and spare += the time until it ends, all exposed
    asynchronous collective      starts when its links are free; at its end, now and spare += the remaining time, which
                                 is exposed. If no other collective uses its links, that is
                                 max(0, wire time - time of the instructions between its start and its end)
    asynchronous copy or slice   moves in spare time (to and from the host: in elapsed time), one after the other;
                                 at its end now and spare += the remaining time
    while                        its body once, then once more as the steady state of all other trips. A collective may
                                 start in one trip and end in the next. A loop with unknown trips counts once
    conditional                  the longest branch
    call                         its computation
A loop's condition costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

from hlo import Computation, Instruction, Module
from hlo_collectives import Collective, belongs_to_collective, events
from hlo_cost import COLLECTIVES, Cost, async_copy_cost, cost, is_free
from hlo_loops import trips
from links import Wire

Key = tuple[str, str]  # computation, instruction
What = Literal["compute", "wire", "copy", "sent"]  # sent: a collective starts; its seconds are those on the wire
STALLS = ("-start", "-update", "-done")


@dataclass(frozen=True)
class Entry:
    """Time in the log: its kind, the instruction, how often that runs, and the seconds of one run."""

    what: What
    key: Key
    weight: float
    seconds: float


@dataclass(frozen=True)
class Flight:
    """An asynchronous operation in flight: its end by one of the clocks (`spare`, or else `now`), and its kind."""

    end: float
    what: What
    key: Key
    spare: bool = False


@dataclass
class Device:
    """The clocks, the time until which each link is occupied, the operations in flight, and the log."""

    now: float = 0.0
    spare: float = 0.0
    busy_until: dict[Hashable, float] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)

    def copy(self) -> Device:
        """Return a copy with an empty log, to simulate a branch."""
        return replace(self, busy_until=dict(self.busy_until), flights=dict(self.flights), log=[])

    def wait(self, seconds: float) -> None:
        """Advance both clocks without computing."""
        self.now += seconds
        self.spare += seconds


@dataclass
class Schedule:
    """A program, and the functions that price its instructions.

    Attributes:
        module: the program.
        seconds: returns the seconds of an instruction with a cost, and of its memory traffic alone.
        wire: returns the seconds and links of a collective.
        copy: returns the seconds of a copy in the device's memory, and on the link to its host.
        gpu: whether products are priced as on a GPU.
        collectives: filled by `run`: the collectives by computation and instruction.
        costs: filled by `run`: the costs by computation and instruction.
        unknown_loops: filled by `run`: the loops with an unknown trip count.
    """

    module: Module
    seconds: Callable[[Instruction, Cost], tuple[float, float]]
    wire: Callable[[Collective], Wire]
    copy: Callable[[Cost], tuple[float, float]]
    gpu: bool = False
    collectives: dict[Key, list[Collective]] = field(default_factory=dict)
    costs: dict[Key, Cost] = field(default_factory=dict)
    unknown_loops: set[Key] = field(default_factory=set)

    def run(self) -> Device:
        """Return the device after the program."""
        device = Device()
        self._body(device, self.module.entry, 1.0)
        while device.flights:
            self._end(device, tuple(device.flights)[:1], 1.0)
        return device

    def _body(self, device: Device, where: Computation, weight: float) -> None:
        for instruction in where.instructions:
            match instruction.opcode:
                case "while":
                    self._loop(device, where, instruction, weight)
                case "conditional":
                    self._branch(device, instruction, weight)
                case "call":
                    self._body(device, self.module.computations[instruction.called[0]], weight)
                case _:
                    self._step(device, where, instruction, weight)

    def _step(self, device: Device, where: Computation, instruction: Instruction, weight: float) -> None:
        key = (where.name, instruction.name)
        happened = events(self.module, where, instruction)
        for event in happened:
            if event.role == "start" and event.collective:
                self._start(device, key, event.collective, event.keys, weight)
        if instruction.opcode.endswith(STALLS):
            self._asynchronous(device, where, instruction, weight)
        elif instruction.opcode not in COLLECTIVES and not any(event.role == "sync" for event in happened):
            self._compute(device, where, instruction, weight)
        for event in happened:
            if event.role == "sync" and event.collective:
                self._start(device, key, event.collective, ("sync",), weight)
                self._end(device, ("sync",), weight)
            elif event.role == "done":
                self._end(device, event.keys, weight)

    def _compute(self, device: Device, where: Computation, instruction: Instruction, weight: float) -> None:
        key = (where.name, instruction.name)
        if is_free(instruction):
            return
        if key not in self.costs:
            self.costs[key] = cost(self.module, where, instruction, self.gpu)
        seconds, traffic = self.seconds(instruction, self.costs[key])
        device.now += seconds
        device.spare += max(seconds - traffic, 0.0)
        device.log.append(Entry("compute", key, weight, seconds))

    def _start(self, device: Device, key: Key, collective: Collective, names: tuple[str, ...], weight: float) -> None:
        found = self.collectives.setdefault(key, [])
        if collective not in found:
            found.append(collective)
        wire = self.wire(collective)
        begin = max([device.now, *(device.busy_until.get(link, 0.0) for link in wire.links)])
        for link in wire.links:
            device.busy_until[link] = begin + wire.seconds
        device.log.append(Entry("sent", key, weight, wire.seconds))
        for name in names:
            device.flights[name] = Flight(begin + wire.seconds, "wire", key)

    def _end(self, device: Device, names: tuple[str, ...], weight: float) -> None:
        found = [device.flights[name] for name in names if name in device.flights]
        for flight in found[:1]:
            device.flights = {name: other for name, other in device.flights.items() if other != flight}
            left = max(flight.end - (device.spare if flight.spare else device.now), 0.0)
            device.wait(left)
            device.log.append(Entry(flight.what, flight.key, weight, left))

    def _asynchronous(self, device: Device, where: Computation, instruction: Instruction, weight: float) -> None:
        """Start or end an asynchronous copy or fusion."""
        if belongs_to_collective(self.module, where, instruction):
            return
        if instruction.opcode.endswith("-done"):
            self._end(device, instruction.operands[:1], weight)
        elif instruction.opcode.endswith("-start"):
            key = (where.name, instruction.name)
            if key not in self.costs:
                self.costs[key] = async_copy_cost(self.module, where, instruction)
            memory, host = self.copy(self.costs[key])
            spare, clock = (False, device.now) if host else (True, device.spare)
            link = "host" if host else "memory"
            end = max(clock, device.busy_until.get(link, 0.0)) + max(memory, host)
            device.busy_until[link] = end
            device.flights[instruction.name] = Flight(end, "copy", key, spare)

    def _loop(self, device: Device, where: Computation, loop: Instruction, weight: float) -> None:
        count = trips(self.module, where, loop)
        if count is None:
            self.unknown_loops.add((where.name, loop.name))
        body = self.module.computations[loop.attribute("body") or ""]
        count = 1 if count is None else count
        if count > 0:
            self._body(device, body, weight)
        if count > 1:
            before = device.copy()
            self._body(device, body, weight * (count - 1))
            _repeat(device, before, count - 2)

    def _branch(self, device: Device, conditional: Instruction, weight: float) -> None:
        branches = []
        for name in conditional.called:
            branch = device.copy()
            self._body(branch, self.module.computations[name], weight)
            branches.append(branch)
        longest = max(branches, key=lambda branch: branch.now)
        log = device.log + longest.log
        device.__dict__.update(longest.__dict__ | {"log": log})


def _repeat(device: Device, before: Device, times: int) -> None:
    """Add the time since `before` again, `times` times. Operations that started since then end later by that time."""
    now, spare = times * (device.now - before.now), times * (device.spare - before.spare)
    for link, end in device.busy_until.items():
        if before.busy_until.get(link) != end:
            device.busy_until[link] = end + (spare if link == "memory" else now)
    for name, flight in device.flights.items():
        if before.flights.get(name) != flight:
            device.flights[name] = replace(flight, end=flight.end + (spare if flight.spare else now))
    device.now += now
    device.spare += spare
