"""Copies its standard input to standard error without XLA's remarks, which it keeps. Runs as a script of its own.

    python stderr_filter.py MARKER KEPT DONE

It is a process, not a thread: the last words of a compiler that aborts still appear, and a compiler that holds Python's
lock does not wait for it. It imports nothing from autoshard.

MARKER is a text that ends the filtering. KEPT is the descriptor of a file that gets the remarks, DONE that of a pipe
that gets a byte when filtering begins and another when MARKER was read. From then on everything is copied, because
other processes may have inherited the input.
"""

import os
import re
import sys

REMARK = b"Involuntary full rematerialization"
# The start of a line of XLA's log: `W1125 00:35:48.133936 ...`, `2025-11-25 00:35:48.133936: W ...`
LOG_LINE = re.compile(rb"[WIEF]?\d")


def main(marker: bytes, kept: int, done: int) -> None:
    """Filters until the marker, then copies until the end of the input."""
    os.write(done, b"b")
    pending, is_filtering = b"", True
    while chunk := os.read(0, 1 << 16):
        if not is_filtering:
            _write(2, chunk)
            continue
        pending += chunk
        before, found, after = pending.partition(marker)
        lines = before.splitlines(keepends=True)
        partial = b"" if found or not lines or lines[-1].endswith(b"\n") else lines.pop()
        for line in lines:
            _write(kept if REMARK in line else 2, line)
        if found:
            _write(2, after)
            os.write(done, b"e")
            is_filtering = False
        elif _may_be_remark(partial, marker):
            pending = partial
        else:
            _write(2, partial)
            pending = b""
    _write(2, pending if is_filtering else b"")


def _may_be_remark(partial: bytes, marker: bytes) -> bool:
    """Whether the beginning of a line may become a remark or contain the beginning of the marker."""
    has_marker = any(partial.endswith(marker[:n]) for n in range(1, len(marker)))
    return has_marker or LOG_LINE.match(partial) is not None or partial in (b"W", b"I", b"E", b"F")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3]))
