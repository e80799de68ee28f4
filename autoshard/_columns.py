"""Lines of plain text: aligned columns, wrapped lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 100
INDENT = "  "
LINES_SHOWN = 10  # lines of a list in one message: enough to see the pattern, short enough to read


def wrap(start: str, words: Iterable[str]) -> list[str]:
    """Words with commas between them, wrapped under `start`."""
    words = list(words)
    lines, pad = [start], " " * len(start)
    for i, word in enumerate(words):
        piece = word + ("," if i + 1 < len(words) else "")
        if len(lines[-1]) + len(piece) > WIDTH and lines[-1].strip():
            lines.append(pad)
        lines[-1] += piece + " "
    return [line.rstrip() for line in lines]


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned columns, two spaces apart; the columns in `right` end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def cut(text: str, width: int) -> str:
    """The text, shortened to `width` if it is longer."""
    return text if len(text) <= width else text[: width - 3] + "..."


def cut_middle(text: str, width: int) -> str:
    """The text, shortened to `width` if it is longer; of a path the end says most, so a little more of it stays."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def listing(lines: Sequence[str]) -> str:
    """The first lines of a list, indented, and how many more there are."""
    shown = "\n".join(f"  {line}" for line in lines[:LINES_SHOWN])
    hidden = len(lines) - LINES_SHOWN
    return f"{shown}\n  and {hidden} more" if hidden > 0 else shown
