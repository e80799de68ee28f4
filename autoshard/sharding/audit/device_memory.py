"""The size of a device's own memory space, for programs that also keep values in the host's memory.

XLA's peak is the size of the arguments plus the largest heap of all memory spaces. If a program has values in the
host's memory, the largest heap can be the host's. The sum of the temporaries does not help: it can exceed the memory of
a device that the program fits. XLA decides whether a program fits by the size of the device's memory space, which
includes arguments, results and the gaps between buffers. It writes this size to a report when it dumps the program:

    Memory Space: default (color=0)
    Total bytes: 31410728416 (29.25GiB)

If the program copies values within the host's memory, XLA counts the operands of these copies, too. They are buffers of
called computations, `thread-local` in the list of allocations, and are subtracted:

    allocation 394: size 100663296, thread-local:
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from autoshard.sharding.audit.export import CompileJob

HOST = b"pinned_host"  # the name of the host's memory in an exported program
REPORTS = "*memory-usage-report.txt"
ALLOCATIONS = "buffer-assignment.txt"  # of the same program as a report
DEVICE_SPACE = re.compile(r"^Memory Space: default\b.*\nTotal bytes: (\d+)", re.MULTILINE)
CALLED = re.compile(r"^allocation \d+: size (\d+), thread-local", re.MULTILINE)  # with a color: of another space


def uses_host(job: CompileJob) -> bool:
    """Whether a program places values in the host's memory. On a CPU, host and device have the same memory."""
    return job.platform != "cpu" and HOST in job.program


def dump_flags(folder: Path) -> str:
    """The flags in `XLA_FLAGS` with which the compiler dumps the program and its reports to a folder."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text"


def device_bytes(folder: Path) -> int:
    """Return the size of the device's memory space in bytes, from a dump of one program; 0 if no report has it."""
    return max(map(_size, folder.glob(REPORTS)), default=0)


def _size(report: Path) -> int:
    """The size that a report has, without the buffers of called computations."""
    found = DEVICE_SPACE.search(report.read_text())
    listed = report.with_name(report.name.replace("memory-usage-report.txt", ALLOCATIONS))
    called = CALLED.findall(listed.read_text()) if found and listed.exists() else []
    return int(found[1]) - sum(map(int, called)) if found else 0


def add_device_bytes(result: Path, folder: Path) -> None:
    """Add the size of the device's memory space to the figures of a compiled program, as `memory["device"]`.

    Args:
        result: the compiler's result, a JSON file. Results without figures of memory stay as they are.
        folder: the dump.
    """
    contents = json.loads(result.read_text())
    if "memory" in contents:
        contents["memory"]["device"] = device_bytes(folder)
        result.write_text(json.dumps(contents) + "\n")
