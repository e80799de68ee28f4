"""The transfers of host memory in a compiled program, and those for which the device waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoshard._columns import INDENT, WIDTH, columns, shorten
from autoshard._shown import shown
from autoshard._units import bytes_text, line_text, time_text
from autoshard.sharding.audit.constants import SHOWN_ENTRIES
from autoshard.sharding.hlo.host_transfers import TransferRuns


@shown
@dataclass(frozen=True)
class CompiledTransfer:
    """A transfer between the memory of a device and that of its host. Times are in microseconds.

    Attributes:
        name: the instruction that starts it.
        array: the array that it moves, `bf16[8,128]`.
        to_host: whether it moves the array to the host.
        bytes: bytes of one run.
        trips: runs in a step.
        us: time of all its runs on the link.
        exposed_us: time in which the device waits for it, of all runs together.
        distance: instructions between its start and its end; None if it ends in another computation.
        compute_us: time of compute between its start and its end, in one run.
        line: the user's source line; empty if unknown.
    """

    name: str
    array: str
    to_host: bool
    bytes: float
    trips: float
    us: float
    exposed_us: float
    distance: int | None
    compute_us: float
    line: str = ""

    @property
    def direction(self) -> str:
        """`to host` or `from host`."""
        return "to host" if self.to_host else "from host"

    @property
    def reason(self) -> str:
        """Why the device waits for it; empty if it does not wait."""
        if self.exposed_us <= 0:
            return ""
        if not self.distance:
            return "it starts where it is needed: the device waits for all of it"
        if not self.compute_us:
            return f"no compute among the {self.distance} instructions between its start and its end"
        once_us = self.us / self.trips
        if self.compute_us >= once_us:
            return "the link is busy with earlier transfers when it starts"
        return f"it takes {time_text(once_us)}, with {time_text(self.compute_us)} of compute beside it"


def compiled_transfers(runs: Iterable[TransferRuns]) -> tuple[CompiledTransfer, ...]:
    """Return the transfers that run, those for which the device waits longest first."""
    found = [
        CompiledTransfer(
            name=each.name,
            array=each.array,
            to_host=each.to_host,
            bytes=each.nbytes,
            trips=each.trips,
            us=each.once_us * each.trips,
            exposed_us=each.exposed_us,
            distance=each.distance,
            compute_us=each.compute_us,
            line=each.line,
        )
        for each in runs
        if each.trips
    ]
    return tuple(sorted(found, key=lambda t: (-t.exposed_us, -t.us)))


def transfer_lines(transfers: Sequence[CompiledTransfer]) -> list[str]:
    """Return the text of an audit about transfers; no lines if there are none."""
    if not transfers:
        return []
    sent = {to: sum(t.bytes * t.trips for t in transfers if t.to_host == to) for to in (True, False)}
    waits = [t for t in transfers if t.exposed_us > 0]
    lines = [
        f"host memory: {sum(t.trips for t in transfers):.0f} transfers per step, {bytes_text(sent[True])} to the host, "
        f"{bytes_text(sent[False])} from it"
    ]
    rows = [(f"{INDENT}direction", "array", "runs", "bytes", "time", "exposed", "distance", "compute", "")]
    rows += [
        (
            INDENT + t.direction,
            t.array,
            f"{t.trips:.0f}",
            bytes_text(t.bytes * t.trips),
            time_text(t.us),
            time_text(t.exposed_us),
            "-" if t.distance is None else str(t.distance),
            "-" if t.distance is None else time_text(t.compute_us),
            line_text(t.line) if t.line else "",
        )
        for t in transfers[:SHOWN_ENTRIES]
    ]
    lines += [shorten(line, WIDTH) for line in columns(rows, right=(2, 3, 4, 5, 6, 7))]
    if rest := transfers[SHOWN_ENTRIES:]:
        lines.append(f"{INDENT}and {len(rest)} more, {bytes_text(sum(t.bytes * t.trips for t in rest))}")
    if not waits:
        return [*lines, f"{INDENT}the device waits for none of them"]
    lines.append(f"{INDENT}the device waits for {len(waits)} of them:")
    lines += [f"{INDENT * 2}{t.name}, {t.array} {t.direction}: {t.reason}" for t in waits[:SHOWN_ENTRIES]]
    return [*lines, *([f"{INDENT * 2}and {len(waits) - SHOWN_ENTRIES} more"] if len(waits) > SHOWN_ENTRIES else [])]
