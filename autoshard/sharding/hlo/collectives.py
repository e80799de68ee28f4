"""Finds the collectives of a compiled program in all forms in which XLA prints them.

    all-gather(...)                                 synchronous
    all-gather-start, all-gather-done               asynchronous; on GPU, `"is_sync":true` makes it synchronous
    async-start, call-start, fusion-start, ...      asynchronous; the collective is in the called computation
    a fusion with a custom call AsyncCollective...  an asynchronous fusion of XLA:TPU. One fusion starts the collective,
                                                    others continue it, one ends it; each contains the instruction
    a fusion of a computation all-reduce-scatter    a reduce-scatter, although it contains an all-reduce
    send, recv                                      a permute that starts at the send. Between slices of a TPU: the
                                                    collective that the attributes name (`slice_groups`)

The payload of an all-gather is its result. That of any other collective is the operands of one device. A combined
collective counts all its arrays. In a group of n devices, each device sends:

    all-gather, reduce-scatter, all-to-all          (n - 1) / n payload
    all-reduce                                      2 (n - 1) / n payload
    collective-permute, send, broadcast             payload
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from autoshard._shown import shown
from autoshard.sharding.hlo.constants import SOURCE_SEARCH_DEPTH
from autoshard.sharding.hlo.parser import FORWARDING, Computation, Instruction, Program, bits
from autoshard.sharding.hlo.replica_groups import Groups, groups_of
from autoshard.sharding.hlo.slice_groups import Slices

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
SENDS = ("send", "recv")
Phase = Literal["whole", "start", "done"]
RENDEZVOUS = "_xla_host_transfer_rendezvous"
TRANSFER = "_xla_megascale_transfer_type"  # of a send between slices: ALL_GATHER, ALL_REDUCE, ...
BETWEEN_SLICES = {"ONE_TO_ONE": "collective-permute"}  # the types that do not have the name of their kind
Place = tuple[Computation, Instruction]


@shown
@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        kind: one of `KINDS`.
        groups: groups of partitions; of a permute, pairs (from, to).
        payload_bytes: bytes of the payload, as the module's docstring defines it.
        line: the user's source line, empty if unknown.
        op_name: its origin in the traced program.
        name: name of the instruction that runs or starts it.
        widened: whether it sends 16-bit numbers as 32-bit numbers.
    """

    kind: str
    groups: Groups = field(repr=False)
    payload_bytes: float
    line: str = ""
    op_name: str = ""
    name: str = ""
    widened: bool = False

    @property
    def is_permute(self) -> bool:
        """Whether the groups are pairs (from, to)."""
        return self.kind == "collective-permute"

    @property
    def size(self) -> int:
        """Number of devices in a group; 1 if no data leaves its device."""
        if self.is_permute:
            return 2 if any(a != b for a, b in self.groups) else 1
        return max(map(len, self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends."""
        n = self.size
        if n == 1:
            return 0.0
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload_bytes
        return (2.0 if self.kind == "all-reduce" else 1.0) * (n - 1) / n * self.payload_bytes

    @property
    def local_bytes(self) -> float:
        """Bytes of each device's operands."""
        return self.payload_bytes / self.size if self.kind == "all-gather" else self.payload_bytes


@shown
@dataclass(frozen=True)
class Event:
    """The start, the end, or the whole run of a collective at one instruction.

    Attributes:
        phase: `start` or `done` of an asynchronous collective, or `whole` for a synchronous one.
        key: identifies the collective; its start and its end have the same key.
        collective: the collective; None at its end.
    """

    phase: Phase
    key: str
    collective: Collective | None = None


class Collectives:
    """The collectives of a program.

    Args:
        program: the program.
        slices: the slices of the machine, if it has several. The program is then the module of one slice.
    """

    def __init__(self, program: Program, slices: Slices | None = None):
        self.program, self.slices = program, slices

    def events(self, computation: Computation, i: Instruction) -> list[Event]:
        """The starts, ends and whole runs of collectives at a scheduled instruction."""
        if i.opcode == "recv" or i.opcode.endswith("-update"):
            return []
        if i.opcode.endswith("-done"):
            return self._ends(computation, i)
        if i.opcode == "send" or i.opcode.endswith("-start"):
            return list(self._starts(computation, i))
        if i.opcode in KINDS:
            return [Event("whole", i.name, self._collective((computation, i), (computation, i)))]
        return list(self._fused(computation, i)) if i.opcode == "fusion" else []

    def contains_collective(self, i: Instruction) -> bool:
        """Whether an instruction is a collective or contains one."""
        if i.base in SENDS:
            return not i.attribute("is_host_transfer") or bool(_frontend_attribute(i, TRANSFER))
        return i.base in KINDS or any(inner.base in KINDS for _, inner in self.program.inside(i))

    def _starts(self, computation: Computation, i: Instruction) -> Iterator[Event]:
        role: Phase = "whole" if '"is_sync":true' in i.attributes else "start"
        if i.base in (*KINDS, "send"):
            if self.contains_collective(i):
                yield Event(role, key(computation, i), self._collective((computation, i), (computation, i)))
            return
        for at, inner in self.program.inside(i):
            if inner.base in KINDS and not inner.opcode.endswith("-done"):
                yield Event(role, key(computation, i), self._collective((at, inner), (computation, i)))

    def _ends(self, computation: Computation, i: Instruction) -> list[Event]:
        start = i
        while start.opcode.endswith(("-done", "-update")) or start.opcode in FORWARDING:
            operands = computation.operands_of(start)
            if not operands:
                return [Event("done", key(computation, i))] if i.base in (*KINDS, *SENDS) else []
            start = operands[0]
        if not self.contains_collective(start) or (start.opcode == "send" and _frontend_attribute(start, TRANSFER)):
            return []  # a collective between slices ends at its recv
        return [Event("done", key(computation, start))]

    def _fused(self, computation: Computation, i: Instruction) -> Iterator[Event]:
        instructions = list(self.program.inside(i))
        markers = [inner for _, inner in instructions if inner.target.startswith("AsyncCollective")]
        marked = {name: marker.target for marker in markers for name in marker.operands}
        for at, inner in instructions:
            if inner.base not in KINDS or inner.opcode.endswith("-done"):
                continue
            mark = marked.get(inner.name, "")
            if mark == "AsyncCollectiveDone":
                yield Event("done", key(at, inner))
            elif mark == "AsyncCollectiveStart":
                yield Event("start", key(at, inner), self._collective((at, inner), (computation, i)))
            elif '"async_collective_fusion_config"' not in inner.attributes:
                yield Event("whole", i.name, self._collective((at, inner), (computation, i)))

    def _collective(self, place: Place, scheduled: Place) -> Collective:
        """The collective of the instruction at `place`, which the instruction at `scheduled` runs."""
        computation, collective = place
        kind, groups = collective.base, groups_of(collective.attributes, self.program.partitions)
        if self.slices and self.program.partitions == self.slices.size:
            groups = self.slices.in_all_slices(groups)
        if kind == "all-reduce" and "all-reduce-scatter" in computation.name:
            kind = "reduce-scatter"
        elif kind == "send":
            kind = "collective-permute"
            if transfer := _frontend_attribute(collective, TRANSFER):
                kind = BETWEEN_SLICES.get(transfer, transfer.lower().replace("_", "-"))
                groups = self.slices.between_slices(collective.attributes) if self.slices else groups
        payload = _operand_bytes(computation, collective)
        if kind == "all-gather":
            payload *= max(map(len, groups))
        related = (collective, scheduled[1], *_related(*place), *_related(*scheduled))
        source = next((i for i in related if self.program.line(i)), collective)
        op_name = collective.op_name or scheduled[1].op_name or source.op_name
        line = self.program.line(source)
        return Collective(
            kind, groups, payload, line, op_name, scheduled[1].name, self._widened(computation, collective)
        )

    def _widened(self, computation: Computation, collective: Instruction) -> bool:
        """Whether its operands were converted to 32 bits for it, as XLA:CPU does, which has no narrower collectives."""
        if "_promoted" in collective.attribute("to_apply"):  # the suffix of the reduction's name says so
            return True
        return all(bits(a.dtype) == 32 for i in computation.operands_of(collective) for a in i.arrays) and any(
            self._is_narrow(computation, i) for i in computation.operands_of(collective)
        )

    def _is_narrow(self, computation: Computation, value: Instruction) -> bool:
        while value.opcode in FORWARDING[:-1] and computation.operands_of(value):
            value = computation.operands_of(value)[0]
        if value.opcode == "convert":
            return any(bits(a.dtype) == 16 for i in computation.operands_of(value) for a in i.arrays)
        if value.opcode in ("fusion", "call") and value.called:
            inner = self.program.computations[value.called[0]]
            return self._is_narrow(inner, inner.root)
        return False


def key(computation: Computation, i: Instruction) -> str:
    """The key that the parts of one collective share: its rendezvous, its channel, or the name of its start."""
    channel = _frontend_attribute(i, RENDEZVOUS) or i.attribute("channel_id")
    return f"channel {channel}" if channel else f"{computation.name}/{i.name}"


def _frontend_attribute(i: Instruction, name: str) -> str:
    """The value of a frontend attribute; empty if there is none."""
    found = re.search(rf'{name}="([^"]*)"', i.attributes)
    return found[1] if found else ""


def _operand_bytes(computation: Computation, i: Instruction) -> float:
    """Bytes of the operands, or parts of operands, that each device sends."""
    operands = computation.operands_of(i)
    if i.base in ("ragged-all-to-all", *SENDS):
        operands = operands[:1]
    elif i.base == "collective-permute" and i.attribute("slice_sizes"):  # sends slices of a buffer into another one
        sizes = re.findall(r"\{([\d,]*)\}", i.attribute("slice_sizes"))
        dtype = operands[0].arrays[0].dtype
        return sum(math.prod(int(n) for n in size.split(",") if n) for size in sizes) * bits(dtype) / 8
    return sum(a.nbytes for value in operands for a in value.arrays)


def _related(computation: Computation, i: Instruction) -> Iterator[Instruction]:
    """Yields instructions whose source line can stand for a missing one: operands, their operands, and users."""
    operands = [i]
    for _ in range(SOURCE_SEARCH_DEPTH):
        operands = [o for value in operands for o in computation.operands_of(value)[:SOURCE_SEARCH_DEPTH]][
            :SOURCE_SEARCH_DEPTH
        ]
        yield from operands
    yield from computation.users.get(i.name, ())
