"""The parts of a plan's page: coloured axes, bars, tables, filters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import NO_AXIS, Leaf
from autoshard.sharding.report.summary import AxisNames, compute_axes, mesh_sizes, spec_of

HUES = (212, 28, 142, 335, 268, 182, 52, 0, 92, 300, 238, 160)  # the most distinct hues first
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


class AxisLabels:
    """Logical axes as coloured labels. Each axis has its own colour, the same on the whole page."""

    def __init__(self, plan: ShardingPlan):
        self.plan, self.names, self.sizes = plan, AxisNames(plan), mesh_sizes(plan)
        parts = [part for leaf in plan.activations for dim in leaf.axes for part in dim.split("*")]
        rest = [part for part in parts if part not in NO_AXIS]
        all_names = dict.fromkeys([*self.names.all, *rest])
        ordered = sorted(all_names, key=lambda name: "/" in name)  # axes not named after a path get the best colours
        numbers: dict[str, int] = {}  # axes that are shown as one, such as head sizes, have one colour
        self.number = {name: numbers.setdefault(self.names.short(name), len(numbers)) for name in ordered}

    @property
    def style(self) -> str:
        """The colours as a style sheet; axis number 3 has the class `a3`."""
        return "".join(
            f".a{i}{{--h:{_hue(i)};--s:{70 if i < len(HUES) else 34}%}}" for i in dict.fromkeys(self.number.values())
        )

    def label(self, name: str, kind: str = "axis", number: int | None = None) -> str:
        """The label of a logical axis, with a number after its name."""
        text = f"<b>{escape(self.names.short(name))}</b>{'' if number is None else f' {number}'}"
        return f'<span class="{kind} {self._class(name)}" title="{escape(name)}">{text}</span>'

    def sized(self, name: str) -> str:
        """The label of a logical axis with its size in the program."""
        return self.label(name, number=self.names.sizes.get(name))

    def _class(self, name: str) -> str:
        return f"a{self.number[name]}" if name in self.number else "a-none"

    def button(self, name: str) -> str:
        """A button for a logical axis; a click shows the tensors that have it."""
        over = [a for a, names in self.plan.axis_rules.items() if name in names and self.sizes.get(a, 1) > 1]
        size = self.names.sizes.get(name)
        text = f"<b>{escape(self.names.short(name))}</b>{'' if size is None else f' {size}'}{self.tags(over)}"
        return (f'<button type="button" class="axis {"on " if over else ""}{self._class(name)}" title="{escape(name)}" '
                f'aria-pressed="false">{text}</button>')  # fmt: skip

    def tags(self, over: Sequence[str], stored: Sequence[str] = ()) -> str:
        """Mesh axes as tags; those in `stored` are marked as sharding storage only."""
        return "".join(
            f'<i class="{"stored" if axis in stored else "sharded"}">{escape(axis)} {self.sizes.get(axis, "?")}</i>'
            for axis in over
        )

    def tensor(self, leaf: Leaf) -> str:
        """A tensor's dimensions: filled if a mesh axis shards them, dashed if in storage only."""
        ruled, parts = compute_axes(self.plan, leaf), []
        for d, (size, over) in enumerate(zip(leaf.shape, spec_of(leaf), strict=False)):
            names = (leaf.axes[d] if d < len(leaf.axes) else "?").split("*")
            stored = [a for a in over if a not in ruled]
            kind = "axis on" if len(over) > len(stored) else "axis part" if over else "axis"
            labels = [self.label(name, kind, size if len(names) == 1 else None) for name in names]
            inner = "".join(labels) + (f'<span class="n">{size}</span>' if len(names) > 1 else "")
            if names[0] in NO_AXIS and not over:
                inner = f'<span class="n">{size}</span>'
            parts.append(f'<span class="dim">{inner}{self.tags(over, stored)}</span>')
        return f'<span class="tensor">{"".join(parts) or "scalar"}</span>'


def _hue(number: int) -> int:
    """The hue of an axis: one of `HUES`, then steps of the golden angle."""
    if number < len(HUES):
        return HUES[number]
    return round((number - len(HUES)) * 137.508 + 7) % 360


def share(part: float, whole: float) -> float:
    """`part` of `whole` in percent, clipped to 0 to 100; 0 if it is not finite."""
    percent = 100 * part / whole if whole else 0.0
    return min(max(percent, 0.0), 100.0) if math.isfinite(percent) else 0.0


def kind_class(kind: str) -> str:
    """The CSS class with the colour of a kind of collective."""
    return f"k-{kind}" if kind in KINDS else "k-other"


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
