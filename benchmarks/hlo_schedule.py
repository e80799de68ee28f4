"""Runs a scheduled program on a device of two clocks: how long it computes, and how long it waits.

`now` is wall time. `spare` is the time for which the memory's bandwidth was free: it stands still while an instruction
uses all of it. Instructions run one after the other, in the order of the schedule.
    instruction                  now += its seconds;  spare += its seconds - what its own traffic takes of the memory
    collective, synchronous      begins when its links are free; now and spare += the wait until it ends: all exposed
    collective, asynchronous     begins when its links are free, from its start on; at its end, now and spare += what is
                                 still to come: its exposed time. If it has its links to itself that is
                                 max(0, wire time - time of what is scheduled between its start and its end)
    copy, slice beside the rest  moves in spare time, one after the other; at its end now and spare += what is missing
                                 (to and from the host: in wall time, one after the other)
    while                        its body once, then once more as the steady state, which counts for the rest of its
                                 trips; a collective may start in one trip and end in the next. Unknown trips count once
    conditional                  the branch that takes longest
    call                         its computation
A loop's condition costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

from hlo import Computation, Instruction, Module
from hlo_collectives import Collective, carries, events
from hlo_cost import COLLECTIVES, Cost, copied, cost, is_free
from hlo_loops import trips
from links import Wire

Key = tuple[str, str]  # computation, instruction
What = Literal["compute", "wire", "copy", "sent"]  # sent: a collective begins; its seconds are the wire's
STALLS = ("-start", "-update", "-done")


@dataclass(frozen=True)
class Entry:
    """Time in the log: of what, of which instruction, how often it runs, and how long each time."""

    what: What
    key: Key
    weight: float
    seconds: float


@dataclass(frozen=True)
class Flight:
    """What runs beside the rest: when it ends by its clock (`spare`, or else `now`), and what it is."""

    end: float
    what: What
    key: Key
    spare: bool = False


@dataclass
class Device:
    """The clocks, until when each link is taken, what is in flight, and the log."""

    now: float = 0.0
    spare: float = 0.0
    taken: dict[Hashable, float] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)

    def copy(self) -> Device:
        """One that can go another way."""
        return replace(self, taken=dict(self.taken), flights=dict(self.flights), log=[])

    def wait(self, seconds: float) -> None:
        """Lets time pass in which nothing is computed."""
        self.now += seconds
        self.spare += seconds


@dataclass
class Schedule:
    """A program with what its parts take.

    Attributes:
        module: the program.
        seconds: of a computation's instruction that costs something: how long it takes, and how long its traffic alone.
        wire: of a collective: how long it takes on which links.
        copy: of what a copy moves: seconds of the device's memory, and of the link to its host.
        gpu: whether to count operations as a GPU does them.
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
        """The device after the program."""
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
            self._beside(device, where, instruction, weight)
        elif instruction.opcode not in COLLECTIVES and not any(event.role == "whole" for event in happened):
            self._compute(device, where, instruction, weight)
        for event in happened:
            if event.role == "whole" and event.collective:
                self._start(device, key, event.collective, ("whole",), weight)
                self._end(device, ("whole",), weight)
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
        begin = max([device.now, *(device.taken.get(link, 0.0) for link in wire.links)])
        for link in wire.links:
            device.taken[link] = begin + wire.seconds
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

    def _beside(self, device: Device, where: Computation, instruction: Instruction, weight: float) -> None:
        """A copy (or a fusion) that runs beside the rest starts or ends."""
        if carries(self.module, where, instruction):
            return
        if instruction.opcode.endswith("-done"):
            self._end(device, instruction.operands[:1], weight)
        elif instruction.opcode.endswith("-start"):
            key = (where.name, instruction.name)
            if key not in self.costs:
                self.costs[key] = copied(self.module, where, instruction)
            memory, host = self.copy(self.costs[key])
            spare, clock = (False, device.now) if host else (True, device.spare)
            link = "host" if host else "memory"
            end = max(clock, device.taken.get(link, 0.0)) + max(memory, host)
            device.taken[link] = end
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
        ways = []
        for name in conditional.called:
            way = device.copy()
            self._body(way, self.module.computations[name], weight)
            ways.append(way)
        longest = max(ways, key=lambda way: way.now)
        log = device.log + longest.log
        device.__dict__.update(longest.__dict__ | {"log": log})


def _repeat(device: Device, before: Device, times: int) -> None:
    """Lets pass again, some times, what passed since `before`; what began in it begins so much later."""
    now, spare = times * (device.now - before.now), times * (device.spare - before.spare)
    for link, end in device.taken.items():
        if before.taken.get(link) != end:
            device.taken[link] = end + (spare if link == "memory" else now)
    for name, flight in device.flights.items():
        if before.flights.get(name) != flight:
            device.flights[name] = replace(flight, end=flight.end + (spare if flight.spare else now))
    device.now += now
    device.spare += spare
