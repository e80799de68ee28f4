"""Keeps XLA's lines about involuntary full rematerializations off the terminal while a planned program is compiled.

XLA's partitioner writes them to file descriptor 2. While a call of a planned program compiles it (`watched_program`),
and while `measure` compiles candidates, the descriptor is redirected to `stderr_filter.py`, a process that is started
once. All other lines appear as usual. The remarks of a call are counted, priced and reported in one warning. Those that
cost next to nothing are left out.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from autoshard._columns import listing
from autoshard._units import bytes_text, line_text
from autoshard.sharding.hlo.rematerializations import Rematerialization, read_remarks
from autoshard.sharding.lower.constants import FILTER_TIMEOUT_S, LEAST_REMARK_BYTES

FILTER = Path(__file__).with_name("stderr_filter.py")


class _Filter:
    """The process that filters, with the pipes to it. One serves all compilations of this process."""

    def __init__(self) -> None:
        """Start the process.

        Raises:
            OSError: there are no descriptors, no process or no standard error.
        """
        self.owner, self.target = os.getpid(), _identity(2)
        self.marker = f"{uuid.uuid4().hex}\n".encode()
        self.kept = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this object
        self.read_bytes = 0
        source, self.sink = os.pipe()
        self.done, told = os.pipe()
        command = [sys.executable, "-I", "-S", str(FILTER), self.marker.decode(), str(self.kept.fileno()), str(told)]
        try:
            self.process = subprocess.Popen(
                command, stdin=source, stdout=subprocess.DEVNULL, stderr=2, pass_fds=(self.kept.fileno(), told)
            )
        except OSError:
            self._close()
            raise
        finally:
            os.close(source)
            os.close(told)

    def is_usable(self) -> bool:
        """Whether the process runs, belongs to this process, and writes to where descriptor 2 leads now."""
        return self.owner == os.getpid() and self.process.poll() is None and self.target == _identity(2)

    def redirect(self) -> int:
        """Redirect descriptor 2 to the process. Return a copy of the descriptor as it was."""
        saved = os.dup(2)
        _flush()
        os.dup2(self.sink, 2)
        return saved

    def restore(self, saved: int) -> list[str]:
        """Restore descriptor 2 and return the remarks, after all other lines have been written."""
        _flush()
        with contextlib.suppress(OSError):  # the process was killed
            os.write(2, self.marker)
        os.dup2(saved, 2)
        os.close(saved)
        ready, _, _ = select.select([self.done], [], [], FILTER_TIMEOUT_S)
        if not ready or not os.read(self.done, 1):
            return []
        self.kept.seek(self.read_bytes)
        found = self.kept.read()
        self.read_bytes += len(found)
        return found.decode(errors="replace").splitlines()

    def end(self) -> None:
        """End the process, once nobody else holds its input."""
        if self.owner == os.getpid():
            self._close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # another process has inherited the input
                self.process.wait(1.0)

    def _close(self) -> None:
        self.kept.close()
        os.close(self.sink)
        os.close(self.done)


class _Redirection:
    """The redirection of descriptor 2, which threads that compile at the same time share."""

    def __init__(self) -> None:
        self.lock, self.users, self.saved = threading.Lock(), 0, -1
        self.filter: _Filter | None = None

    def enter(self) -> None:
        """Begin the redirection, unless another thread did."""
        with self.lock:
            self.users += 1
            if self.users == 1 and os.name == "posix" and sys.executable:
                with contextlib.suppress(OSError):
                    if self.filter is None or not self.filter.is_usable():
                        self.end()
                        self.filter = _Filter()
                    self.saved = self.filter.redirect()

    def leave(self) -> list[str]:
        """End the redirection if no other thread needs it; return the remarks to the last one that leaves."""
        with self.lock:
            self.users -= 1
            if self.users or self.filter is None or self.saved < 0:
                return []
            saved, self.saved = self.saved, -1
            return self.filter.restore(saved)

    def end(self) -> None:
        """End the process that filters, if there is one."""
        if self.filter is not None:
            self.filter.end()
            self.filter = None


_REDIRECTION = _Redirection()
atexit.register(_REDIRECTION.end)


class Redirected:
    """A redirection of descriptor 2, from its construction to `end`."""

    def __init__(self) -> None:
        _REDIRECTION.enter()

    def end(self) -> list[str]:
        """End the redirection and return the remarks of the compiler."""
        return _REDIRECTION.leave()


@contextlib.contextmanager
def kept_remarks() -> Iterator[list[str]]:
    """Redirect descriptor 2 within the context. At its end, the list contains the remarks of the compiler."""
    found: list[str] = []
    redirected = Redirected()
    try:
        yield found
    finally:
        found += redirected.end()


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
        sys.stderr.flush()


def remarks_text(name: str, remarks: list[str], arguments: tuple[str, ...], lowered: Callable[[], str]) -> str:
    """The warning about the remarks of one compilation; empty if they cost next to nothing.

    Args:
        name: the name of the function.
        remarks: the lines of the compiler's log.
        arguments: the names of the function's parameters.
        lowered: returns the program's MLIR with locations.
    """
    costly = [r for r in read_remarks(remarks) if r.wire_bytes >= LEAST_REMARK_BYTES or not r.array]
    if not costly:
        return ""
    places = _source_lines(lowered()) if any(r.op_name for r in costly) else {}
    count = f"{len(costly)} array{'s' * (len(costly) > 1)}"
    total = bytes_text(sum(r.wire_bytes for r in costly))
    return (
        f"auto_shard({name}): XLA makes {count} whole on every device, because it cannot reshard directly (involuntary "
        f"full rematerialization). Each device sends {total} for this, which the plan's estimate does not include:\n"
        f"{listing([_remark_line(r, arguments, places) for r in costly])}\n"
        "Plan.verify() shows the shardings. If you fixed one of them, try another"
    )


def _remark_line(remark: Rematerialization, arguments: tuple[str, ...], places: Mapping[str, str]) -> str:
    argument = re.fullmatch(r"(\w+)((?:\[[^]]*\]|\.\w+)*)", remark.op_name)
    if argument and argument[1] in arguments:  # `state['up'][0]`, as JAX writes the path `state/up/0`
        where = "/".join([argument[1], *re.findall(r"\w+", argument[2])])
    else:
        where = line_text(places.get(remark.op_name, "")) if remark.op_name in places else remark.op_name
    if not remark.array:
        return remark.text
    return f"{bytes_text(remark.wire_bytes)} for shards {remark.array} at {where or '(no source line)'}"


def _source_lines(text: str) -> dict[str, str]:
    """Name of an operator in the compiled program -> the user's source line, from the locations of MLIR."""
    of_location = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def source(location: str) -> str:
        """The first file that a location leads to, with the function around it: `file.py:7 (loss)`."""
        function = ""
        for _ in range(len(of_location)):
            body = of_location.get(location, location)
            if file := re.match(r'"([^"]+)":(\d+)', body):
                return f"{file[1]}:{file[2]}" + (f" ({function})" if function else "")
            inner = re.match(r'(?:callsite\(|"([^"]*)"\()?(#loc\d*)', body)
            if not inner:
                return ""
            function, location = inner[1] or function, inner[2]
        return ""

    found: dict[str, str] = {}
    for body in of_location.values():
        named = re.match(r'"(jit\([^"]*)"\((#loc\d*)\)', body)
        if named and (line := source(named[2])):
            found.setdefault(named[1], line)
    return found
