"""The buffers of gathered parameters in the straight code of a compiled program: how many bytes are live at once.

A buffer is the result of an all-gather, synchronous or started, in the device's main memory, or a copy of it. Tuples,
bitcasts, the ends of asynchronous operators, and results that alias an operand are the same buffer. It is live from the
instruction that makes it to the last one that uses it. Loops are not followed. Sizes are without padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hlo import HBM, Computation, Instruction, Module
from hlo_collectives import events

ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{\}")  # an element of the result, and the operand that it aliases
Part = tuple[str, int | None]  # an instruction, and the element of its tuple


@dataclass
class Buffer:
    """A buffer, and the numbers of the first and last instruction that have it."""

    nbytes: float
    first: int
    last: int


@dataclass(frozen=True)
class Peak:
    """The most bytes of buffers that are live at once, and the number of these buffers."""

    nbytes: float
    buffers: int


def gathered_buffers(module: Module) -> list[Buffer]:
    """Return the buffers of gathered parameters in the entry computation."""
    where, found = module.entry, list[Buffer]()
    parts: dict[Part, Buffer] = {}
    for number, i in enumerate(where.instructions):
        if i.opcode not in ("get-tuple-element", "bitcast", "tuple"):
            for operand in i.operands:
                for buffer in _of(parts, operand).values():
                    buffer.last = number
        for part, buffer in _same(parts, i):
            parts[part] = buffer
        if (element := _new(module, where, i, parts)) is not None:
            found.append(Buffer(i.leaves[element].bytes, number, number))
            parts[i.name, element if isinstance(i.shape, tuple) else None] = found[-1]
    return found


def peak(buffers: list[Buffer]) -> Peak:
    """Return the most bytes that are live at once.

    >>> peak([Buffer(4.0, 0, 3), Buffer(2.0, 2, 5), Buffer(3.0, 4, 4)])
    Peak(nbytes=6.0, buffers=2)
    """
    live = [[each for each in buffers if each.first <= n <= each.last] for n in {each.first for each in buffers}]
    return max(
        (Peak(sum(b.nbytes for b in some), len(some)) for some in live), key=lambda p: p.nbytes, default=Peak(0, 0)
    )


def _of(parts: dict[Part, Buffer], name: str) -> dict[int | None, Buffer]:
    return {element: buffer for (owner, element), buffer in parts.items() if owner == name}


def _same(parts: dict[Part, Buffer], i: Instruction) -> Iterator[tuple[Part, Buffer]]:
    """Yield the parts of an instruction's result that are buffers of its operands."""
    if not i.operands:
        return
    first = _of(parts, i.operands[0])
    if i.opcode == "get-tuple-element":
        if (buffer := first.get(int(i.attribute("index") or 0))) is not None:
            yield (i.name, None), buffer
    elif i.opcode in ("bitcast", "opt-barrier"):
        yield from (((i.name, element), buffer) for element, buffer in first.items())
    elif i.opcode == "tuple":
        for element, operand in enumerate(i.operands):
            yield from (((i.name, element), buffer) for buffer in _of(parts, operand).values())
    elif i.opcode.endswith("-done"):
        yield from (((i.name, None), buffer) for buffer in [*first.values()][:1])
    else:
        for element, operand in ALIASED.findall(i.attributes.split("calls=")[0]):
            if (buffer := parts.get((i.operands[int(operand)], None))) is not None:
                yield (i.name, int(element) if element else None), buffer


def _new(module: Module, where: Computation, i: Instruction, parts: dict[Part, Buffer]) -> int | None:
    """Return the element of an instruction's result that is a new buffer; None if none is."""
    if i.opcode in ("copy", "copy-start"):
        return 0 if (i.operands[0], None) in parts and i.leaves[0].space == HBM else None
    starts = [e.collective for e in events(module, where, i) if e.role in ("sync", "start") and e.collective]
    if not any(collective.kind == "all-gather" for collective in starts):
        return None
    whole = [n for n, leaf in enumerate(i.leaves) if leaf.space == HBM]
    return max(whole, key=lambda n: i.leaves[n].bytes, default=None)
