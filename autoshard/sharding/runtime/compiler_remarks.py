"""Keeps XLA's lines about involuntary full rematerializations off the terminal while a planned program is compiled.

XLA's partitioner writes them to file descriptor 2. It is redirected to `stderr_filter.py` during the first call of a
planned program, which compiles it, and restored afterwards. All other lines appear as ever. The remarks are counted,
priced and reported in one warning. Those that cost next to nothing are left out.
"""

from __future__ import annotations

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
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.runtime.constants import FILTER_TIMEOUT_S, LEAST_REMARK_BYTES

FILTER = Path(__file__).with_name("stderr_filter.py")


class _Redirection:
    """The redirection of file descriptor 2, which threads that compile at the same time share."""

    def __init__(self) -> None:
        self.lock, self.users, self.stop = threading.Lock(), 0, None

    def enter(self) -> None:
        """Begin the redirection, unless another thread did."""
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.stop = _redirect()

    def leave(self) -> list[str]:
        """End the redirection if no other thread needs it; return the remarks to the last one that leaves."""
        with self.lock:
            self.users -= 1
            if self.users or self.stop is None:
                return []
            stop, self.stop = self.stop, None
            return stop()


_REDIRECTION = _Redirection()


@contextlib.contextmanager
def kept_remarks() -> Iterator[list[str]]:
    """Redirect descriptor 2 within the context. At its end, the list contains the remarks of the compiler."""
    found: list[str] = []
    _REDIRECTION.enter()
    try:
        yield found
    finally:
        found += _REDIRECTION.leave()


def _redirect() -> Callable[[], list[str]] | None:
    """Redirect descriptor 2 to the filter. Returns what restores it and returns the remarks; None if it cannot."""
    if os.name != "posix" or not sys.executable:
        return None
    marker = f"{uuid.uuid4().hex}\n"
    with contextlib.ExitStack() as started:
        try:
            saved = os.dup(2)
            started.callback(os.close, saved)
            source, sink = os.pipe()
            started.callback(os.close, sink)
            done, told = os.pipe()
            started.callback(os.close, done)
            kept = started.enter_context(tempfile.TemporaryFile())
            command = [sys.executable, "-I", "-S", str(FILTER), marker, str(kept.fileno()), str(told)]
            try:
                process = subprocess.Popen(
                    command, stdin=source, stdout=subprocess.DEVNULL, stderr=saved, pass_fds=(kept.fileno(), told)
                )
            finally:
                os.close(source)
                os.close(told)
        except OSError:  # no descriptors, no process or no standard error
            return None
        if not _reports(done):
            process.kill()
            process.wait()
            return None
        _flush()
        os.dup2(sink, 2)
        os.close(sink)
        started.pop_all()

    def stop() -> list[str]:
        _flush()
        os.write(2, marker.encode())
        os.dup2(saved, 2)
        os.close(saved)
        _reports(done)
        os.close(done)
        with contextlib.suppress(subprocess.TimeoutExpired):  # another process may have inherited the pipe
            process.wait(1.0)
        with kept:
            kept.seek(0)
            return kept.read().decode(errors="replace").splitlines()

    return stop


def _reports(pipe: int) -> bool:
    """Whether the filter reports within the time limit that it has begun or ended."""
    ready, _, _ = select.select([pipe], [], [], FILTER_TIMEOUT_S)
    return bool(ready and os.read(pipe, 1))


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
        f"full rematerialization). Each device sends {total} for this, which the plan's estimate lacks:\n"
        f"{listing([_remark_line(r, arguments, places) for r in costly])}\n"
        "Plan.verify() shows the shardings. If you fixed one of them, try another"
    )


def _remark_line(remark: Rematerialization, arguments: tuple[str, ...], places: Mapping[str, str]) -> str:
    argument = re.fullmatch(r"args\[(\d+)\](.*)", remark.op_name)
    if argument:
        path = "/".join(re.findall(r"\w+", argument[2]))
        where = named_path(f"{argument[1]}/{path}".rstrip("/"), arguments)
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
