"""Copies its standard input to standard error without XLA's remarks, which it keeps. Runs as a script of its own.

    python stderr_filter.py MARKER KEPT DONE

It is a process, not a thread: the last words of a compiler that aborts still appear, and a compiler that holds Python's
lock does not wait for it. It imports nothing from autoshard.

MARKER is a text that ends the lines of one compilation. KEPT is the descriptor of a file that gets the remarks, DONE
that of a pipe that gets a byte when a MARKER was read and all lines before it were written.
"""

import os
import re
import sys

REMARK = b"Involuntary full rematerialization"
# The start of a line of XLA's log: `W1125 00:35:48.133936 ...`, `2025-11-25 00:35:48.133936: W ...`
LOG_LINE = re.compile(rb"[WIEF]?\d")


def main(marker: bytes, kept: int, done: int) -> None:
    """Filters until the end of the input."""
    pending = b""
    while chunk := os.read(0, 1 << 16):
        pending += chunk
        while marker in pending:
            before, _, pending = pending.partition(marker)
            _copy(before.splitlines(keepends=True), kept)
            os.write(done, b"e")
        lines = pending.splitlines(keepends=True)
        partial = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        _copy(lines, kept)
        if _may_be_remark(partial, marker):
            pending = partial
        else:
            _write(2, partial)
            pending = b""
    _write(2, pending)


def _copy(lines: list[bytes], kept: int) -> None:
    for line in lines:
        _write(kept if REMARK in line else 2, line)


def _may_be_remark(partial: bytes, marker: bytes) -> bool:
    """Whether the beginning of a line may become a remark or contain the beginning of the marker."""
    has_marker = any(partial.endswith(marker[:n]) for n in range(1, len(marker)))
    return has_marker or LOG_LINE.match(partial) is not None or partial in (b"W", b"I", b"E", b"F")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3]))
