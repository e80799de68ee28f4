"""The pieces of a plan's page: coloured axes, bars, tables, filters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.report.summary import AxisNames, mesh_sizes, ruled_axes, spec_of

HUES = (212, 28, 142, 335, 268, 182, 52, 0, 92, 300, 238, 160)  # told apart at a glance, most so the first
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


class Paint:
    """Logical axes as coloured labels: an axis has one colour wherever it stands, and no other has it."""

    def __init__(self, plan: ShardingPlan):
        self.plan, self.names, self.sizes = plan, AxisNames(plan), mesh_sizes(plan)
        rest = [part for leaf in plan.activations for dim in leaf.axes for part in dim.split("*") if part != "1"]
        everything = dict.fromkeys([*self.names.all, *rest])
        named = sorted(everything, key=lambda name: "/" in name)  # the best colours to axes with names of their own
        self.number = {name: i for i, name in enumerate(named)}

    @property
    def style(self) -> str:
        """The colours as a style sheet: `.a3` is the axis numbered 3."""
        return "".join(f".a{i}{{--h:{_hue(i)};--s:{70 if i < len(HUES) else 34}%}}" for i in self.number.values())

    def label(self, name: str, kind: str = "axis", number: int | None = None) -> str:
        """One logical axis, with a number behind its name."""
        text = f"<b>{escape(self.names.short(name))}</b>{'' if number is None else f' {number}'}"
        return f'<span class="{kind} {self._class(name)}" title="{escape(name)}">{text}</span>'

    def sized(self, name: str) -> str:
        """One logical axis with its size in the program."""
        return self.label(name, number=self.names.sizes.get(name))

    def _class(self, name: str) -> str:
        return f"a{self.number[name]}" if name in self.number else "a-none"

    def button(self, name: str) -> str:
        """One logical axis to press, to see what has it."""
        cut = [a for a, names in self.plan.axis_rules.items() if name in names and self.sizes.get(a, 1) > 1]
        size = self.names.sizes.get(name)
        text = f"<b>{escape(self.names.short(name))}</b>{'' if size is None else f' {size}'}{self.tags(cut)}"
        return (f'<button type="button" class="axis {"on " if cut else ""}{self._class(name)}" title="{escape(name)}" '
                f'aria-pressed="false">{text}</button>')  # fmt: skip

    def tags(self, over: Sequence[str], stored: Sequence[str] = ()) -> str:
        """Mesh axes as tags, those in `stored` as of storage alone."""
        return "".join(
            f'<i class="{"kept" if a in stored else "cut"}">{escape(a)} {self.sizes.get(a, "?")}</i>' for a in over
        )

    def tensor(self, leaf: Leaf) -> str:
        """A tensor's dimensions: filled where a mesh axis cuts them, dashed where only in storage."""
        ruled, parts = ruled_axes(self.plan, leaf), []
        for d, (size, over) in enumerate(zip(leaf.shape, spec_of(leaf), strict=False)):
            names = (leaf.axes[d] if d < len(leaf.axes) else "?").split("*")
            stored = [a for a in over if a not in ruled]
            kind = "axis on" if len(over) > len(stored) else "axis part" if over else "axis"
            labels = [self.label(name, kind, size if len(names) == 1 else None) for name in names]
            inner = "".join(labels) + (f'<span class="n">{size}</span>' if len(names) > 1 else "")
            if names == ["1"] and not over:
                inner = f'<span class="n">{size}</span>'  # a dimension that is none
            parts.append(f'<span class="dim">{inner}{self.tags(over, stored)}</span>')
        return f'<span class="tensor">{"".join(parts) or "scalar"}</span>'


def _hue(number: int) -> int:
    """The hue of an axis: those of the list, then those between them, and so on."""
    if number < len(HUES):
        return HUES[number]
    return round((number - len(HUES)) * 137.508 + 7) % 360


def share(part: float, whole: float) -> float:
    """`part` of `whole` in percent, between 0 and 100 whatever they are."""
    found = 100 * part / whole if whole else 0.0
    return min(max(found, 0.0), 100.0) if math.isfinite(found) else 0.0


def kind_class(kind: str) -> str:
    """The class that colours a kind of collective."""
    return f"k-{kind}" if kind in KINDS else "k-other"


def key(cls: str) -> str:
    """A small square in a colour, for a legend."""
    return f'<span class="key {cls}"></span>'


def bar(cls: str, part: float, whole: float, more: str = "") -> str:
    """A thin bar of `part` in `whole`."""
    return f'<span class="bar thin {more}"><span class="{cls}" style="width:{share(part, whole):.3f}%"></span></span>'


def stack(
    parts: Sequence[tuple[str, str, float]], scale: float, label: str, mark: float | None = None, start: float = 0.0
) -> str:
    """A bar of several parts, (class, title, value), `scale` being its full width.

    Args:
        parts: the parts.
        scale: the value of the full width.
        label: the bar in words.
        mark: a limit drawn on it.
        start: where the first part begins.
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
    """A table of HTML cells, of which a narrow window makes a list.

    Args:
        head: the columns' names.
        rows: their cells.
        right: columns of numbers, which end at the same place.
        classes: the class of each row.
        wide: columns that a narrow window leaves out, so that the others can stay a table.
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
    kept = "" if wide is None else ' class="kept"'
    return f'<div class="scroll"><table{kept}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def folded(summary: str, inner: str, is_open: bool = False) -> str:
    """What is shown when its summary is pressed."""
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>{inner}</details>"


def search_box(what: str, place: str) -> str:
    """A field that leaves only those rows of the element `place` that hold what is written, and says how many."""
    return (f'<label class="search"><span>Search {escape(what)}</span>'
            f'<input type="search" data-for="{place}" placeholder="type to search" autocomplete="off"/>'
            '<output></output></label>')  # fmt: skip


def section(name: str, heading: str, inner: str, remark: str = "") -> str:
    """A part of the page under a heading; `name` is what links say."""
    note = f'<p class="remark">{escape(remark)}</p>' if remark else ""
    title = f'<h2 id="{name}-h">{escape(heading)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-h">{title}{note}{inner}</section>'
