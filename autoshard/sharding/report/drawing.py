"""The pieces of a plan's page: coloured axes, the mesh, bars, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from autoshard.sharding.report.summary import AxisNames, mesh_sizes, ruled_axes, spec_of

if TYPE_CHECKING:
    from autoshard.sharding.plan import Leaf, Plan

HUES = (212, 28, 142, 335, 268, 182, 52, 0, 92, 300, 238, 160)  # told apart at a glance, most so the first
MESH_SHOWN = 16  # devices along one side of the drawing


class Paint:
    """Logical axes as coloured labels: the same colour for an axis wherever it stands."""

    def __init__(self, plan: Plan):
        self.plan, self.names, self.sizes = plan, AxisNames(plan), mesh_sizes(plan)
        named = sorted(self.names.all, key=lambda name: "/" in name)  # the best colours to axes with names of their own
        self.hues = {name: HUES[i] if i < len(HUES) else round(i * 137.5) % 360 for i, name in enumerate(named)}

    def axis(self, name: str, over: Sequence[str] = (), stored: Sequence[str] = (), size: int | None = None) -> str:
        """A logical axis, or several that make up one dimension, with the mesh axes that cut it."""
        hue, strength = self.hues.get(name.split("*")[0], 0), "35%" if "/" in name.split("*")[0] else "75%"
        text = f"<b>{escape(self.names.short(name))}</b>"
        number = size if size is not None else self.names.sizes.get(name)
        text += f" {number}" if number is not None else ""
        text += "".join(
            f'<i class="{"kept" if a in stored else "cut"}">{escape(a)} {self.sizes.get(a, "?")}</i>' for a in over
        )
        kind = "axis on" if any(a not in stored for a in over) else "axis part" if over else "axis"
        return f'<span class="{kind}" style="--h:{hue};--s:{strength}" title="{escape(name)}">{text}</span>'

    def tensor(self, leaf: Leaf) -> str:
        """A tensor's dimensions."""
        ruled, parts = ruled_axes(self.plan, leaf), []
        for d, (size, over) in enumerate(zip(leaf.shape, spec_of(leaf), strict=False)):
            name = leaf.axes[d] if d < len(leaf.axes) else "?"
            parts.append(self.axis(name, over, [a for a in over if a not in ruled], size))
        return f'<span class="tensor">{"".join(parts) or "scalar"}</span>'


def grid(sizes: dict[str, int]) -> str:
    """The mesh as a drawing: its last axis from left to right, the others downwards."""
    names = list(sizes) or [""]
    across, down = sizes.get(names[-1], 1), math.prod(sizes[a] for a in names[:-1])
    columns, rows = min(across, MESH_SHOWN), min(down, MESH_SHOWN)
    inner = sizes[names[-2]] if len(names) > 2 else down  # rows of one block, where there are three axes or more
    side, gap, left, top = 30, 5, 28, 28
    shapes = []
    y = float(top)
    for r in range(rows):
        y += 8 if r and r % inner == 0 else 0
        for c in range(columns):
            x, middle = left + c * (side + gap), side / 2
            number = f'<text class="dev" x="{x + middle:g}" y="{y + middle + 4:g}">{r * across + c}</text>'
            shapes.append(f'<rect x="{x}" y="{y:g}" width="{side}" height="{side}" rx="5"/>{number}')
        y += side + gap
    width, height = left + columns * (side + gap) + 4, y + 4
    if len(sizes) > 0:
        more = f" (first {columns} drawn)" if columns < across else ""
        shapes.append(f'<text class="name" x="{left}" y="18">{escape(names[-1])} {across}{more} \u2192</text>')
    if len(names) > 1:
        more = f" (first {rows} drawn)" if rows < down else ""
        words = " x ".join(f"{escape(a)} {sizes[a]}" for a in names[:-1])
        shapes.append(f'<text class="name" transform="translate(8 {top}) rotate(90)">{words}{more} \u2192</text>')
        height = max(height, top + 8 * len(words + more) + 10)
    label = escape(" by ".join(f"{a} {n}" for a, n in sizes.items()))
    width = max(width, left + 9 * len(names[-1]) + 70)
    return (
        f'<svg class="grid" role="img" aria-label="mesh: {label}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">{"".join(shapes)}</svg>'
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table of HTML cells; the columns in `right` are aligned to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=r' if i in right else ''}>{cell}</{tag}>" for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def stack(parts: Sequence[tuple[str, str, float]], scale: float, mark: float | None = None, mark_text: str = "") -> str:
    """A bar of several parts, (class, title, value), `scale` being its full width; `mark` is a limit drawn on it."""
    drawn = "".join(
        f'<span class="{cls}" style="width:{100 * value / scale:.3f}%" title="{escape(title)}"></span>'
        for cls, title, value in parts
        if value > 0 and scale > 0
    )
    line = ""
    if mark is not None and scale > 0:
        at = 100 * mark / scale
        line = f'<span class="mark" style="left:min({at:.3f}%, 100% - 2px)" title="{escape(mark_text)}"></span>'
    return f'<span class="bar">{drawn}{line}</span>'
