"""Find the collectives of an HLO program, in all their forms.

    all-gather(...), all-gather-start/-done          `"is_sync":true` makes a pair synchronous (GPU)
    async-, call-, fusion-start/-update/-done        around a computation that contains the collective; it starts at the
                                                     start or the update, whichever gets the operands
    a fusion with AsyncCollectiveStart or -Done      XLA:TPU's asynchronous collective fusion. Later fusions repeat the
                                                     collective to continue it; it counts once
    a fusion of a computation `all-reduce-scatter`   a reduce-scatter, although its text has an all-reduce
    send, send-done                                  a permute; recv and recv-done wait for it
    send between slices of a TPU                     the collective that `_xla_megascale_transfer_type` names, up to the
                                                     recv-done. Its groups are numbers of devices: 200003 is number 3 of
                                                     the second slice. Other groups are partitions of one slice

Payload, in bytes of one device: the result of an all-gather, the operands of the others.
Wire bytes, which one device of a group of n sends:
    all-gather, reduce-scatter, all-to-all           (n - 1) / n x payload
    all-reduce                                       2 (n - 1) / n x payload
    collective-permute, collective-broadcast, send   payload
A ragged all-to-all counts as if it sent its whole operand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal

from hlo import Computation, Instruction, Module
from hlo_cost import COLLECTIVES

Groups = tuple[tuple[int, ...], ...]
Role = Literal["sync", "start", "done"]
WIRE = {"all-reduce": 2.0, "collective-permute": 0.0, "collective-broadcast": 0.0}
BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
SLICE = 100_000  # JAX's numbers of devices: those of slice s, counted from 1, begin at s times this
NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Collective:
    """One collective of the program text.

    Attributes:
        kind: the kind; `reduce-scatter` also where the text has an all-reduce.
        name: the name of the instruction in the schedule.
        groups: the partitions of each group; of a permute, pairs (from, to).
        payload_bytes, wire_bytes: see the module.
        op_name, source: its origin in the traced program, and its source line.
        emitter: the compiler's name for its implementation, if there is one.
        channel: the channel, which its start and end share.
    """

    kind: str
    name: str
    groups: Groups = field(repr=False)
    payload_bytes: float
    op_name: str = ""
    source: str = ""
    emitter: str = ""
    channel: str | None = None

    @property
    def size(self) -> int:
        """The number of devices in a group; 2 for a permute."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends."""
        rounds = WIRE.get(self.kind, 1.0)
        return self.payload_bytes * (rounds * (self.size - 1) / self.size if rounds else 1.0)


@dataclass(frozen=True)
class Event:
    """What an instruction does to a collective: runs it synchronously, starts it, or waits for it by any of `keys`."""

    role: Role
    keys: tuple[str, ...]
    collective: Collective | None = None


def events(module: Module, where: Computation, instruction: Instruction) -> list[Event]:
    """Return what an instruction of the schedule does to collectives, in order."""
    opcode = instruction.opcode
    base, _, phase = opcode.rpartition("-") if opcode.endswith(("-start", "-update", "-done")) else (opcode, "", "")
    if phase == "done":
        start = _start(where, instruction)
        if start.opcode == "send" and BETWEEN_SLICES.search(start.attributes):
            return []  # the recv-done waits for the data
        return [Event("done", _keys(start, start.channel or instruction.channel))] if _holds(module, start) else []
    if phase == "update":
        start = _start(where, instruction)
        return [] if start.operands else _begin(module, where, start)
    if phase == "start":
        return _begin(module, where, instruction) if instruction.operands or base in COLLECTIVES else []
    if opcode == "send":
        return _begin(module, where, instruction)
    if opcode in COLLECTIVES and opcode != "recv":
        return [Event("sync", (), _collective(module, where, instruction, instruction))]
    return list(_fused(module, instruction)) if opcode == "fusion" else []


def _begin(module: Module, where: Computation, start: Instruction) -> list[Event]:
    found = [_collective(module, inside, one, start) for inside, one in _inner(module, where, start)]
    role: Role = "sync" if '"is_sync":true' in start.attributes else "start"
    return [Event(role, _keys(start, each.channel), each) for each in found]


def _inner(module: Module, where: Computation, start: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    if start.opcode.removesuffix("-start") in COLLECTIVES:
        yield where, start
    yield from ((at, one) for at, one in module.within(start) if one.opcode in COLLECTIVES)


def belongs_to_collective(module: Module, where: Computation, instruction: Instruction) -> bool:
    """Whether a `-start`, `-update` or `-done` belongs to a collective and not to a copy."""
    return _holds(module, _start(where, instruction))


def _holds(module: Module, start: Instruction) -> bool:
    base = re.sub("-(start|update|done)$", "", start.opcode)
    return base in COLLECTIVES or any(one.opcode in COLLECTIVES for _, one in module.within(start))


def _start(where: Computation, instruction: Instruction) -> Instruction:
    """Return the start of an update or an end, or the end itself if its start is in another computation."""
    value = instruction
    while value.opcode.endswith(("-update", "-done")) or value.opcode in ("get-tuple-element", "tuple", "bitcast"):
        inputs = where.inputs(value)
        if not inputs:
            return instruction
        value = inputs[0]
    return value if value.opcode.endswith("-start") or value.opcode in ("send", "recv") else instruction


def _keys(start: Instruction, channel: str | None) -> tuple[str, ...]:
    if BETWEEN_SLICES.search(start.attributes) and (found := RENDEZVOUS.search(start.attributes)):
        return (f"between slices {found[1]}",)
    return (start.name, *([f"channel {channel}"] if channel else []))


def _fused(module: Module, fusion: Instruction) -> Iterator[Event]:
    """Yield what a fusion does to the collectives in it, XLA:TPU's asynchronous ones included."""
    inner = list(module.within(fusion))
    begun = _marked(inner, "AsyncCollectiveStart")
    ended = _marked(inner, "AsyncCollectiveDone")
    for where, one in inner:
        if one.opcode not in COLLECTIVES:
            continue
        found = _collective(module, where, one, fusion)
        if one.name in ended:
            yield Event("done", _keys(fusion, one.channel))
        elif one.name in begun:
            yield Event("start", _keys(fusion, one.channel), found)
        elif '"async_collective_fusion_config"' not in one.attributes:
            yield Event("sync", (), found)


def _marked(inner: list[tuple[Computation, Instruction]], target: str) -> set[str]:
    """Return the names of the collectives that are operands of a marker call."""
    calls = (one for _, one in inner if one.attribute("custom_call_target") == f'"{target}"')
    return {name for call in calls for name in call.operands}


def _collective(module: Module, where: Computation, one: Instruction, scheduled: Instruction) -> Collective:
    kind = one.opcode.removesuffix("-start")
    if kind == "all-reduce" and "all-reduce-scatter" in where.name:
        kind = "reduce-scatter"
    kind = "collective-permute" if kind == "send" else kind
    groups = groups_of(one.attributes, module.partitions)
    if transfer := BETWEEN_SLICES.search(one.attributes):
        kind = transfer[1].lower().replace("_", "-").replace("one-to-one", "collective-permute")
        groups = _between_slices(one.attributes)
    taken = where.inputs(one)[:1] if kind == "ragged-all-to-all" else where.inputs(one)
    payload = sum(leaf.bytes for operand in taken for leaf in operand.leaves)
    if kind == "all-gather":
        payload *= max(len(group) for group in groups)
    named = one if one.op_name else scheduled
    emitter = " ".join(
        dict.fromkeys(re.findall(r'"(?:emitter|strategy)":"(\w+)', scheduled.attributes + one.attributes))
    )
    return Collective(kind, scheduled.name, groups, payload, named.op_name, module.source(named), emitter, one.channel)


@lru_cache(maxsize=4096)
def _between_slices(attributes: str) -> Groups:
    """Parse the numbers of the devices of a send between slices."""
    if of_all := re.search(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"', attributes):
        slices, first, last = _ints(of_all[1]), int(of_all[2]), int(of_all[3])
        return tuple(tuple(SLICE * n + device for n in slices) for device in range(first, last + 1))
    listed = re.search(r"_xla_megascale_target=\{((?:\{[^}]*\},?)*)\}", attributes)
    if not listed:
        raise ValueError(f"a send between slices names no devices that can be read: {attributes[:300]}")
    return tuple(tuple(_ints(group)) for group in re.findall(r"\{([^}]*)\}", listed[1]))


@lru_cache(maxsize=4096)
def groups_of(attributes: str, partitions: int) -> Groups:
    """Parse a collective's groups of partitions, or a permute's pairs (from, to), from its attributes."""
    pairs = re.search(r"source_target_pairs=\{(.*?\})\}", attributes)
    pairs = pairs or re.search(r'_xla_send_recv_source_target_pairs="\{(.*?\})\}"', attributes)
    if pairs or (listed := re.search(r"replica_groups=\{(\{.*?\})\}", attributes)):
        text = pairs[1] if pairs else listed[1]
        return tuple(tuple(map(int, NUMBERS.findall(group))) for group in re.findall(r"\{([^}]*)\}", text))
    if iota := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        shape, order = _ints(iota[1]), _ordered(iota[2])
        return tuple(tuple(order[at : at + shape[-1]]) for at in range(0, len(order), shape[-1]))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", attributes)
    return _mesh_groups(mesh[1], mesh[2], mesh[3]) if mesh else (tuple(range(partitions)),)


def _mesh_groups(axes: str, devices: str | None, grouped: str) -> Groups:
    """Return the groups along some axes of a mesh.

    Args:
        axes: the mesh, `'a'=4,'b'=2`.
        devices: its devices, if not 0, 1, ...
        grouped: the axes of a group, or parts of axes, `'a','b':(1)2`.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    order = _ordered(devices) if devices else list(range(prod(sizes.values())))
    parts = [(name, before, size) for name, before, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", grouped)]
    dims: list[tuple[str, int, int]] = []  # (axis, size of the axis's parts before it, size), outermost first
    for name, size in sizes.items():
        splits = sorted((int(before), int(part)) for axis, before, part in parts if axis == name and part)
        at = 1
        for before, part in splits:
            dims += [(name, at, before // at)] * (before > at) + [(name, before, part)]
            at = before * part
        dims += [(name, at, size // at)] if size > at or not splits else []
    whole = {name for name, _, part in parts if not part}
    split = {(name, int(before)) for name, before, part in parts if part}
    chosen = [axis in whole or (axis, before) in split for axis, before, _ in dims]
    found: dict[tuple[int, ...], list[int]] = {}
    for device, place in zip(order, product(*(range(size) for _, _, size in dims)), strict=True):
        found.setdefault(tuple(p for p, inside in zip(place, chosen, strict=True) if not inside), []).append(device)
    return tuple(map(tuple, found.values()))


def _ordered(text: str) -> list[int]:
    """Return the numbers of a text. `[4,2]T(1,0)` is 0 to 7 in 4 rows of 2, transposed."""
    shape = re.match(r"(\[[\d,]+\])(?:T\(([\d,]+)\))?$", text)
    if not shape:
        return _ints(text)
    dims = _ints(shape[1])
    permutation = _ints(shape[2]) if shape[2] else list(range(len(dims)))
    strides = [prod(dims[dim + 1 :]) for dim in range(len(dims))]
    places = product(*(range(dims[dim]) for dim in permutation))
    return [sum(p * strides[dim] for p, dim in zip(place, permutation, strict=True)) for place in places]


def _ints(text: str) -> list[int]:
    return [int(number) for number in NUMBERS.findall(text)]
