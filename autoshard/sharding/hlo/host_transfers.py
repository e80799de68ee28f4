"""Transfers between the memory of a device and that of its host, in a compiled program.

    copy-start, slice-start, dynamic-slice-start, dynamic-update-slice-start ... -done      asynchronous
    copy, slice, dynamic-slice, dynamic-update-slice                                        the device waits

are transfers if exactly one of the moved array's two places is in host space, `S(5)`. In loops, a
`dynamic-update-slice` sends one iteration's array into a stack on the host, and a `dynamic-slice` brings one back.

    time = bytes / (HOST_BANDWIDTH_REACHED x the chip's host bandwidth)

On GPUs the device waits for the asynchronous ones, too (`machines.constants.EXPOSED_TRANSFERS`).

`schedule` runs the transfers of each direction one after the other, beside the instructions between start and end.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.sharding.hlo.kernel_costs import is_free
from autoshard.sharding.hlo.parser import FORWARDING, HOST_MEMORY, Array, Computation, Instruction, Program
from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.machines.constants import EXPOSED_TRANSFERS, HOST_BANDWIDTH_REACHED

# Opcode -> the positions of the arrays that are read and written, among the arrays of its asynchronous start.
_ASYNCHRONOUS = {"copy": (1, 0), "slice": (0, 1), "dynamic-slice": (0, 1), "dynamic-update-slice": (1, 0)}
# Both directions of the link. No dimension of a topology has a negative number.
FROM_HOST, TO_HOST = (-1, -1), (-1, 1)


@shown
@dataclass
class TransferRuns:
    """One transfer of the program and its runs in one step.

    Attributes:
        name: the instruction that starts it.
        array: the array that it moves, `bf16[8,128]`.
        to_host: whether it moves the array to the host.
        nbytes: bytes of one run.
        once_us: microseconds of one run; 0 if the bandwidth to the host is unknown.
        line: the user's source line; empty if the text has none.
        is_asynchronous: whether compute can run while it runs.
        distance: number of instructions between its start and its end; None if it ends in another computation, such as
            the next iteration of a loop.
        compute_us: microseconds of compute between its start and its end, in one run.
        trips: number of runs.
        exposed_us: microseconds in which the device waits for it, of all runs together.
    """

    name: str
    array: str
    to_host: bool
    nbytes: float
    once_us: float
    line: str = ""
    is_asynchronous: bool = True
    distance: int | None = None
    compute_us: float = 0.0
    trips: float = 0.0
    exposed_us: float = 0.0

    @property
    def links(self) -> frozenset[tuple[int, int]]:
        """The direction of the host link that it uses."""
        return frozenset([TO_HOST if self.to_host else FROM_HOST])


def moved_array(computation: Computation, i: Instruction) -> tuple[Array, bool] | None:
    """Return the array that an instruction starts to move between the memories, and whether it goes to the host."""
    if i.base not in _ASYNCHRONOUS or i.opcode.endswith(("-done", "-update")):
        return None
    if i.opcode.endswith("-start"):
        arrays = [a for a in i.arrays if a.dims][:2]
        if len(arrays) < 2:
            return None
        source, target = (arrays[n] for n in _ASYNCHRONOUS[i.base])
    else:
        operands = computation.operands_of(i)
        position = 1 if i.base == "dynamic-update-slice" else 0
        if len(operands) <= position or len(operands[position].arrays) != 1 or len(i.arrays) != 1:
            return None
        source, target = operands[position].arrays[0], i.arrays[0]
    if (source.space == HOST_MEMORY) == (target.space == HOST_MEMORY):
        return None
    return min(source, target, key=lambda a: a.nbytes), target.space == HOST_MEMORY


def transfer_at(program: Program, computation: Computation, i: Instruction, chip: Chip) -> TransferRuns | None:
    """Return the transfer that an instruction starts; None if it starts none."""
    found = moved_array(computation, i)
    if found is None:
        return None
    array, to_host = found
    bandwidth = chip.host_bandwidth * HOST_BANDWIDTH_REACHED
    time = array.nbytes / bandwidth * 1e6 if bandwidth else 0.0
    end = _end_of(computation, i) if i.opcode.endswith("-start") else None
    line = next((line for each in (i, end) if each is not None and (line := program.line(each))), "")
    distance = None if end is None else _distance(computation, i, end)
    asynchronous = i.opcode.endswith("-start") and chip.platform not in EXPOSED_TRANSFERS
    return TransferRuns(
        i.name, str(array), to_host, array.nbytes, time, line, asynchronous, distance if asynchronous else 0
    )


def start_of(computation: Computation, i: Instruction) -> Instruction | None:
    """Return the start of the asynchronous operation that ends at an instruction; None if it is elsewhere."""
    while i.opcode.endswith(("-done", "-update")) or i.opcode in FORWARDING:
        operands = computation.operands_of(i)
        if not operands:
            return None
        i = operands[0]
    return i if i.opcode.endswith("-start") else None


def _end_of(computation: Computation, start: Instruction) -> Instruction | None:
    return next((user for user in computation.users.get(start.name, ()) if user.opcode.endswith("-done")), None)


def _distance(computation: Computation, start: Instruction, end: Instruction) -> int:
    """The number of instructions between two that take time; a loop counts as one."""
    first, last = (computation.instructions.index(i) for i in (start, end))
    between = computation.instructions[first + 1 : last]
    return sum(not is_free(i) or i.opcode in ("while", "conditional") for i in between)
