"""Layout of plain text: aligned columns, wrapped lists, shortened lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 100  # characters in a line; chosen
INDENT = "  "
LINES_SHOWN = 10  # lines of a list in one message; chosen: shows a pattern and stays readable


def wrap(start: str, words: Iterable[str]) -> list[str]:
    """Joins words with commas and wraps them in lines; the first line begins with `start`, the others are indented."""
    words = list(words)
    lines, pad = [start], " " * len(start)
    for i, word in enumerate(words):
        piece = word + ("," if i + 1 < len(words) else "")
        if len(lines[-1]) + len(piece) > WIDTH and lines[-1].strip():
            lines.append(pad)
        lines[-1] += piece + " "
    return [line.rstrip() for line in lines]


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Aligns rows in columns, two spaces apart. The columns whose indices are in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def shorten(text: str, width: int) -> str:
    """Shortens a text to `width` characters at its end."""
    return text if len(text) <= width else text[: width - 3] + "..."


def shorten_middle(text: str, width: int) -> str:
    """Shortens a text to `width` characters in its middle. The end keeps at least half: it matters most in a path."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def listing(lines: Sequence[str]) -> str:
    """Indents the first `LINES_SHOWN` lines of a list and says how many more there are."""
    shown = "\n".join(f"  {line}" for line in lines[:LINES_SHOWN])
    hidden = len(lines) - LINES_SHOWN
    return f"{shown}\n  and {hidden} more" if hidden > 0 else shown
