"""Finds the collectives of a compiled program in whatever form they stand there.

    all-gather(...)                                 as it is: the device waits for it
    all-gather-start, all-gather-done               beside other work; `"is_sync":true` takes that back (GPU)
    async-start, call-start, fusion-start, ...      around a computation that holds the collective
    a fusion with a custom call AsyncCollective...  XLA:TPU's asynchronous fusions: one begins, some carry on, one ends;
                                                    the collective stands in each of them
    a fusion of a computation all-reduce-scatter    a reduce-scatter, although an all-reduce stands in it
    send, recv                                      a permute, begun where it is sent; between the slices of a TPU
                                                    the collective that their attributes name, over all slices

Bytes. `payload`: of an all-gather what it gives, of others what each device puts in (of all arrays where several are
combined). What leaves each device of a group of n:

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
from autoshard.sharding.hlo.parser import HANDS_ON, Computation, Instruction, Program, bits
from autoshard.sharding.hlo.replica_groups import Groups, groups_of

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
SENDS = ("send", "recv")
Role = Literal["whole", "start", "done"]
RENDEZVOUS = "_xla_host_transfer_rendezvous"
TRANSFER = "_xla_megascale_transfer_type"  # between slices: ALL_GATHER, ALL_REDUCE, ...
Place = tuple[Computation, Instruction]
FAR = 4  # how far from a collective a source line is looked for


@shown
@dataclass(frozen=True)
class Collective:
    """A collective as it stands in the program.

    Attributes:
        kind: what moves.
        groups: the partitions that talk to each other; of a permute pairs (from, to).
        payload_bytes: see the module's head.
        line: the user's.
        op_name: where in the traced program it comes from.
        name: of the instruction that runs or begins it.
        widened: whether it sends 16-bit numbers as 32-bit ones.
    """

    kind: str
    groups: Groups = field(repr=False)
    payload_bytes: float
    line: str = ""
    op_name: str = ""
    name: str = ""
    widened: bool = False

    @property
    def pairs(self) -> bool:
        """Whether the groups are pairs (from, to)."""
        return self.kind == "collective-permute"

    @property
    def size(self) -> int:
        """Devices of a group; 1 where nothing leaves its device."""
        if self.pairs:
            return 2 if any(a != b for a, b in self.groups) else 1
        return max(map(len, self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave each device."""
        n = self.size
        if n == 1:
            return 0.0
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload_bytes
        return (2.0 if self.kind == "all-reduce" else 1.0) * (n - 1) / n * self.payload_bytes

    @property
    def local_bytes(self) -> float:
        """What a device has before."""
        return self.payload_bytes / self.size if self.kind == "all-gather" else self.payload_bytes


@dataclass(frozen=True)
class Event:
    """What an instruction does to a collective; `key` joins the end of one with its start."""

    role: Role
    key: str
    collective: Collective | None = None


class Collectives:
    """The collectives of a program.

    `across` are the partitions that stand at one place in all slices, a group each.
    """

    def __init__(self, program: Program, across: Groups = ()):
        self.program, self.across = program, across

    def events(self, where: Computation, i: Instruction) -> list[Event]:
        """What an instruction of the schedule does to collectives."""
        if i.opcode == "recv" or i.opcode.endswith("-update"):
            return []
        if i.opcode.endswith("-done"):
            return self._ended(where, i)
        if i.opcode == "send" or i.opcode.endswith("-start"):
            return list(self._begun(where, i))
        if i.opcode in KINDS:
            return [Event("whole", i.name, self._collective((where, i), (where, i)))]
        return list(self._fused(where, i)) if i.opcode == "fusion" else []

    def holds(self, i: Instruction) -> bool:
        """Whether an instruction is a collective or runs one."""
        if i.base in SENDS:
            return not i.attribute("is_host_transfer") or bool(_quoted(i, TRANSFER))
        return i.base in KINDS or any(inner.base in KINDS for _, inner in self.program.inside(i))

    def _begun(self, where: Computation, i: Instruction) -> Iterator[Event]:
        role: Role = "whole" if '"is_sync":true' in i.attributes else "start"
        if i.base in (*KINDS, "send"):
            if self.holds(i):
                yield Event(role, key(where, i), self._collective((where, i), (where, i)))
            return
        for at, inner in self.program.inside(i):
            if inner.base in KINDS and not inner.opcode.endswith("-done"):
                yield Event(role, key(where, i), self._collective((at, inner), (where, i)))

    def _ended(self, where: Computation, i: Instruction) -> list[Event]:
        begun = i
        while begun.opcode.endswith(("-done", "-update")) or begun.opcode in HANDS_ON:
            taken = where.takes(begun)
            if not taken:
                return [Event("done", key(where, i))] if i.base in (*KINDS, *SENDS) else []
            begun = taken[0]
        if not self.holds(begun) or (begun.opcode == "send" and _quoted(begun, TRANSFER)):
            return []  # between slices it is the other end that is waited for
        return [Event("done", key(where, begun))]

    def _fused(self, where: Computation, i: Instruction) -> Iterator[Event]:
        inner = list(self.program.inside(i))
        marked = {
            name: one.target for _, one in inner if one.target.startswith("AsyncCollective") for name in one.operands
        }
        for at, one in inner:
            if one.base not in KINDS or one.opcode.endswith("-done"):
                continue
            mark = marked.get(one.name, "")
            if mark == "AsyncCollectiveDone":
                yield Event("done", key(at, one))
            elif mark == "AsyncCollectiveStart":
                yield Event("start", key(at, one), self._collective((at, one), (where, i)))
            elif '"async_collective_fusion_config"' not in one.attributes:
                yield Event("whole", i.name, self._collective((at, one), (where, i)))

    def _collective(self, stands: Place, scheduled: Place) -> Collective:
        """The collective of an instruction that stands somewhere, where one of the schedule runs it."""
        where, one = stands
        kind, groups = one.base, groups_of(one.attributes, self.program.partitions)
        if kind == "all-reduce" and "all-reduce-scatter" in where.name:
            kind = "reduce-scatter"
        elif kind == "send":
            kind = "collective-permute"
            if transfer := _quoted(one, TRANSFER):
                kind, groups = transfer.lower().replace("_", "-"), self.across or groups
        payload = _put_in(where, one)
        if kind == "all-gather":
            payload *= max(map(len, groups))
        near = (one, scheduled[1], *_near(*stands), *_near(*scheduled))
        told = next((i for i in near if self.program.line(i)), one)
        op_name = one.op_name or scheduled[1].op_name or told.op_name
        line = self.program.line(told)
        return Collective(kind, groups, payload, line, op_name, scheduled[1].name, self._widened(where, one))

    def _widened(self, where: Computation, one: Instruction) -> bool:
        """Whether what it sends was made 32 bits wide for it: XLA:CPU has no narrower collectives."""
        if "_promoted" in one.attribute("to_apply"):  # what sums is named after it
            return True
        return all(bits(a.dtype) == 32 for i in where.takes(one) for a in i.arrays) and any(
            self._is_narrow(where, i) for i in where.takes(one)
        )

    def _is_narrow(self, where: Computation, value: Instruction) -> bool:
        while value.opcode in HANDS_ON[:-1] and where.takes(value):
            value = where.takes(value)[0]
        if value.opcode == "convert":
            return any(bits(a.dtype) == 16 for i in where.takes(value) for a in i.arrays)
        if value.opcode in ("fusion", "call") and value.called:
            inner = self.program.computations[value.called[0]]
            return self._is_narrow(inner, inner.root)
        return False


def key(where: Computation, i: Instruction) -> str:
    """What the parts of one collective have in common: where they meet, their channel, or where it begins."""
    channel = _quoted(i, RENDEZVOUS) or i.attribute("channel_id")
    return f"channel {channel}" if channel else f"{where.name}/{i.name}"


def _quoted(i: Instruction, name: str) -> str:
    """A frontend attribute; empty where there is none."""
    found = re.search(rf'{name}="([^"]*)"', i.attributes)
    return found[1] if found else ""


def _put_in(where: Computation, i: Instruction) -> float:
    """Bytes that each device puts in."""
    taken = where.takes(i)
    if i.base in ("ragged-all-to-all", *SENDS):
        taken = taken[:1]
    elif i.base == "collective-permute" and i.attribute("slice_sizes"):  # a piece of a buffer, into another
        sizes = re.findall(r"\{([\d,]*)\}", i.attribute("slice_sizes"))
        dtype = taken[0].arrays[0].dtype
        return sum(math.prod(int(n) for n in size.split(",") if n) for size in sizes) * bits(dtype) / 8
    return sum(a.nbytes for value in taken for a in value.arrays)


def _near(where: Computation, i: Instruction) -> Iterator[Instruction]:
    """Those around an instruction that may say where it comes from: what it is made of, and who takes it."""
    made = [i]
    for _ in range(FAR):
        made = [value for one in made for value in where.takes(one)[:FAR]][:FAR]
        yield from made
    yield from where.users.get(i.name, ())
