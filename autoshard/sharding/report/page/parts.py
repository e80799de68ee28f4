"""The parts that only a plan's page has: coloured logical axes and kinds of collectives."""

from __future__ import annotations

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


def kind_class(kind: str) -> str:
    """The CSS class with the colour of a kind of collective."""
    return f"k-{kind}" if kind in KINDS else "k-other"
