"""Involuntary full rematerializations: tensors that the partitioner made whole, knowing no other way to cut them anew.

It says so in its log, a line each:

    Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...} efficiently for HLO
    operation %add.8 = f32[8,128]{1,0} add(...), sharding={...}, metadata={op_name="..." ...}

with the shape of one device's piece, and shardings in one of two spellings:

    {devices=[2,1,4]<=[8] last_tile_dim_replicate}       pieces of each dimension, and copies
    {mesh['dp'=2,'tp'=4], [{'dp'}, {}]}                  mesh axes of each dimension
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.sharding.hlo.collectives import Collective
from autoshard.sharding.hlo.link_times import Wires
from autoshard.sharding.hlo.parser import Program, arrays_of

_REMARK = re.compile(
    r"from sharding (?P<old>\{.*?\}) to (?P<new>\{.*?\}) (?:efficiently|without).*?"
    r"HLO operation:? %?(?P<name>[\w.\-]+) = (?P<shape>\S+) (?P<opcode>[\w\-]+)\("
)


@shown
@dataclass(frozen=True)
class Rematerialization:
    """A tensor that the partitioner makes whole on every device, to cut it anew.

    Attributes:
        array: one device's piece of it, `f32[8,128]`.
        bytes: the whole of it, which every device holds for a while.
        wire_bytes: what leaves each device for that, once.
        us: how long that takes on the links of the whole mesh, once.
        cause: the layouts between which the partitioner knows no other way.
        op_name: where in the traced program it comes from.
        line: the user's, where the compiled program still has it.
        text: the partitioner's words.
    """

    array: str
    bytes: float
    wire_bytes: float
    us: float
    cause: str
    op_name: str = ""
    line: str = ""
    text: str = field(default="", repr=False)


def read_remarks(
    lines: Iterable[str], program: Program | None = None, wires: Wires | None = None
) -> tuple[Rematerialization, ...]:
    """The remarks in a compiler's log, each once, the largest first.

    Args:
        lines: those of the log that speak of it.
        program: what was compiled, for source lines.
        wires: what is under it, for times.
    """
    places: dict[str, str] = {}
    for computation in program.computations.values() if program else ():
        for i in computation.instructions:
            if i.op_name and i.op_name not in places and (line := program.line(i) if program else ""):
                places[i.op_name] = line
    found = {remark.text: remark for remark in (_remark(line, places, wires) for line in lines)}
    return tuple(sorted(found.values(), key=lambda r: -r.bytes))


def _remark(line: str, places: dict[str, str], wires: Wires | None) -> Rematerialization:
    text = re.sub(r"^.*?\[SPMD\] ", "", line.strip())
    name = re.search(r'op_name="([^"]*)"', text)
    op_name = name[1] if name else ""
    said = _REMARK.search(text)
    if not said:
        return Rematerialization(
            "", 0.0, 0.0, 0.0, "the partitioner does not say", op_name, places.get(op_name, ""), text
        )
    array, n = arrays_of(said["shape"])[0], pieces(said["old"])
    whole = array.nbytes * n
    everyone = Collective("all-gather", (tuple(range(len(wires.order))),), whole) if wires else None
    time = wires.time_us(everyone) if wires and everyone and n > 1 else 0.0
    cause = f"no way from {said['old']} to {said['new']} at {said['opcode']}"
    return Rematerialization(
        str(array), whole, array.nbytes * (n - 1), time, cause, op_name, places.get(op_name, ""), text
    )


def pieces(sharding: str) -> int:
    """Into how many pieces a sharding cuts."""
    if tiles := re.match(r"\{devices=\[([\d,]+)\]", sharding):
        sizes = [int(n) for n in tiles[1].split(",")]
        copies = re.search(r"last_tile_dims=\{([^}]*)\}", sharding)
        extra = 1 if "last_tile_dim_replicate" in sharding else len(copies[1].split(",")) if copies else 0
        return math.prod(sizes[: len(sizes) - extra])
    if mesh := re.match(r"\{mesh\[([^\]]*)\][^\[]*(\[.*\])", sharding):
        axes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2].partition("replicated=")[0])
        return math.prod(int(part or axes.get(name, 1)) for name, part in parts)
    return 1
