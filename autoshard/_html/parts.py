"""The parts of a page: bars, tables, legends, sections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape


def share(part: float, whole: float) -> float:
    """`part` of `whole` in percent, clipped to 0 to 100; 0 if it is not finite."""
    percent = 100 * part / whole if whole else 0.0
    return min(max(percent, 0.0), 100.0) if math.isfinite(percent) else 0.0


def key(cls: str) -> str:
    """A small coloured square for a legend."""
    return f'<span class="key {cls}"></span>'


def bar(cls: str, part: float, whole: float, more: str = "") -> str:
    """A thin bar that shows `part` of `whole`."""
    return f'<span class="bar thin {more}"><span class="{cls}" style="width:{share(part, whole):.3f}%"></span></span>'


def stack(
    parts: Sequence[tuple[str, str, float]], scale: float, label: str, mark: float | None = None, start: float = 0.0
) -> str:
    """A bar of several parts.

    Args:
        parts: Each part as (CSS class, title, value).
        scale: The value of the full width.
        label: The bar in words, for screen readers.
        mark: A limit, drawn as a line.
        start: The value at which the first part begins.
    """
    drawn = "".join(
        f'<span class="{cls}" style="width:{share(value, scale):.3f}%" title="{escape(title)}"></span>'
        for cls, title, value in parts
        if share(value, scale) > 0
    )
    space = f'<span style="width:{share(start, scale):.3f}%"></span>' if start > 0 else ""
    line = f'<span class="mark" style="left:min({share(mark, scale):.3f}%, 100% - 2px)"></span>' if mark else ""
    return f'<span class="bar" role="img" aria-label="{escape(label)}">{space}{drawn}{line}</span>'


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    classes: Sequence[str] = (),
    wide: Sequence[int] | None = None,
) -> str:
    """A table, which a narrow window shows as a list.

    Args:
        head: The names of the columns.
        rows: The cells of each row, as HTML.
        right: Indices of the right-aligned columns.
        classes: The CSS class of each row.
        wide: Indices of the columns that a narrow window hides. If given, the others stay a table there.
    """
    kinds = []
    for i in range(len(head)):
        bars = any(row[i].startswith('<span class="bar') for row in rows)
        kinds.append(" ".join(["r"] * (i in right) + ["b"] * bars + ["wide"] * (i in (wide or ()))))
    columns = [f'{_class(kind)} data-l="{escape(name)}"' for name, kind in zip(head, kinds, strict=True)]
    body = "".join(
        f"<tr{_class(classes[n] if n < len(classes) else '')}>"
        + "".join(f"<td{column}>{cell}</td>" for column, cell in zip(columns, row, strict=True))
        + "</tr>"
        for n, row in enumerate(rows)
    )
    heads = "".join(f'<th scope="col"{_class(kind)}>{name}</th>' for name, kind in zip(head, kinds, strict=True))
    compact = "" if wide is None else ' class="compact"'
    return f'<div class="scroll"><table{compact}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def folded(summary: str, inner: str, is_open: bool = False) -> str:
    """Content that a click on its summary shows."""
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>{inner}</details>"


def search_box(what: str, place: str) -> str:
    """A search field. It hides the rows of the element `place` that lack the typed words, and counts the others."""
    return (f'<label class="search"><span>Search {escape(what)}</span>'
            f'<input type="search" data-for="{place}" placeholder="type to search" autocomplete="off"/>'
            '<output></output></label>')  # fmt: skip


def section(name: str, heading: str, inner: str, remark: str = "") -> str:
    """A section of the page with a heading; `name` is the target of links."""
    note = f'<p class="remark">{escape(remark)}</p>' if remark else ""
    title = f'<h2 id="{name}-h">{escape(heading)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-h">{title}{note}{inner}</section>'


def bar_legend(entries: Sequence[tuple[str, str]], start: str = "") -> str:
    """A line of coloured squares with their meanings.

    Args:
        entries: For each colour its CSS classes and what it means.
        start: Words before the first square.
    """
    words = f"<span>{escape(start)}</span>" if start else ""
    keys = "".join(f'<span><i class="key {classes}"></i>{escape(meaning)}</span>' for classes, meaning in entries)
    return f'<p class="legend">{words}{keys}</p>'
