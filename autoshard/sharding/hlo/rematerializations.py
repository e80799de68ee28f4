"""Parses involuntary full rematerializations: arrays that XLA's partitioner replicates in order to reshard them.

The partitioner logs one line for each:

    Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...} efficiently for HLO
    operation %add.8 = f32[8,128]{1,0} add(...), sharding={...}, metadata={op_name="..." ...}

The shape is that of one device's shard. A sharding is written in one of two ways:

    {devices=[2,1,4]<=[8] last_tile_dim_replicate}       number of shards of each dimension, then number of replicas
    {mesh['dp'=2,'tp'=4], [{'dp'}, {}]}                  mesh axes of each dimension
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.sharding.hlo.collectives import Collective
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.parser import Program, arrays_of

_REMARK = re.compile(
    r"from sharding (?P<old>\{.*?\}) to (?P<new>\{.*?\}) (?:efficiently|without).*?"
    r"HLO operation:? %?(?P<name>[\w.\-]+) = (?P<shape>\S+) (?P<opcode>[\w\-]+)\("
)


@shown
@dataclass(frozen=True)
class Rematerialization:
    """An array that the partitioner replicates on every device in order to reshard it.

    Attributes:
        array: one device's shard, `f32[8,128]`.
        bytes: bytes of the whole array, which every device holds temporarily.
        wire_bytes: bytes that each device sends for it, in one run.
        us: microseconds of an all-gather of it over the whole mesh, in one run.
        cause: the two shardings between which the partitioner cannot reshard directly.
        op_name: its origin in the traced program.
        line: the user's source line; empty if the compiled program does not have it.
        text: the log line.
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
    lines: Iterable[str], program: Program | None = None, links: ProgramLinks | None = None
) -> tuple[Rematerialization, ...]:
    """Parses the remarks in a compiler's log. Returns each once, in descending order of bytes.

    Args:
        lines: the lines of the log that report a rematerialization.
        program: the compiled program, for source lines.
        links: its links, for times.
    """
    places: dict[str, str] = {}
    for computation in program.computations.values() if program else ():
        for i in computation.instructions:
            if i.op_name and i.op_name not in places and (line := program.line(i) if program else ""):
                places[i.op_name] = line
    found = {remark.text: remark for remark in (_remark(line, places, links) for line in lines)}
    return tuple(sorted(found.values(), key=lambda r: -r.bytes))


def _remark(line: str, places: dict[str, str], links: ProgramLinks | None) -> Rematerialization:
    text = re.sub(r"^.*?\[SPMD\] ", "", line.strip())
    name = re.search(r'op_name="([^"]*)"', text)
    op_name = name[1] if name else ""
    fields = _REMARK.search(text)
    if not fields:
        return Rematerialization(
            "", 0.0, 0.0, 0.0, "the partitioner gives no cause", op_name, places.get(op_name, ""), text
        )
    array, n = arrays_of(fields["shape"])[0], shard_count(fields["old"])
    whole = array.nbytes * n
    gather = Collective("all-gather", (tuple(range(len(links.order))),), whole) if links else None
    time = links.time_us(gather) if links and gather and n > 1 else 0.0
    cause = f"cannot reshard from {fields['old']} to {fields['new']} at {fields['opcode']}"
    return Rematerialization(
        str(array), whole, array.nbytes * (n - 1), time, cause, op_name, places.get(op_name, ""), text
    )


def shard_count(sharding: str) -> int:
    """The number of different shards of a sharding."""
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
