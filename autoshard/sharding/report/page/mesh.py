"""The mesh on a plan's page: the machine's devices for each mesh axis, in groups along the axis."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from autoshard._html.parts import bar_legend, folded
from autoshard._shown import shown
from autoshard._units import bytes_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.page.parts import AxisLabels
from autoshard.sharding.report.summary import axis_traffic, mesh_sizes, storage_roles

DEVICES_SHOWN = 1024
FOLD = 16  # largest number of devices in a row of the drawing
NUMBERED = 8  # a drawing with at most this many devices in a row has large devices with numbers
MARGIN = 9  # around a plane, in pixels
AXES_SHOWN = 32  # unsharded logical axes that are shown at first


@shown
@dataclass(frozen=True)
class Grid:
    """The machine's devices as planes. The last dimension runs from left to right, the one before it down.

    There is one plane for each index of the other dimensions.
    """

    dims: tuple[tuple[str, int], ...]
    links: dict[str, str]

    @property
    def across(self) -> tuple[str, int]:
        """The last dimension."""
        return self.dims[-1]

    @property
    def down(self) -> tuple[str, int]:
        """The dimension before the last."""
        return self.dims[-2] if len(self.dims) > 1 else ("", 1)

    @property
    def plane(self) -> int:
        """The number of devices in a plane."""
        return self.across[1] * self.down[1]

    def coordinates(self, device: int) -> dict[str, int]:
        """The coordinates of a device."""
        at = {}
        for name, size in reversed(self.dims):
            device, at[name] = divmod(device, size)
        return {name: at[name] for name, _ in self.dims}


def mesh_section(plan: ShardingPlan, paint: AxisLabels) -> str:
    """The machine in words, and a drawing for each mesh axis."""
    grid, places = _grid(plan), _places(plan)
    panels = "".join(_panel(plan, paint, grid, places, axis) for axis in paint.sizes) or "<p>One device.</p>"
    count = plan.mesh.size
    more = f"The first {DEVICES_SHOWN} of {count} devices are drawn. " if count > DEVICES_SHOWN else ""
    words = f'<p class="remark">{more}{escape(_machine(plan, grid))}</p>'
    if not paint.sizes:
        return f'{words}<div class="panels">{panels}</div>'
    tip = ('<p class="tip" id="device" aria-live="polite">Hover over a device to see its number, its coordinates, its '
           "position on the mesh and its groups.</p>")  # fmt: skip
    return f'{words}<div class="panels">{panels}</div>{_key(plan, grid, places)}{tip}'


def _key(plan: ShardingPlan, grid: Grid, places: dict[int, dict[str, int]]) -> str:
    """What the boxes, their numbers and their colours mean, with the last device that is drawn as an example."""
    blue = "the group of device 0, or of the device under the pointer"
    colours = bar_legend([("k-on", blue), ("k-device", "other groups")])
    words = ["The number in a box is the device's position along the mesh axis."] if _is_numbered(grid) else []
    directions = f"{grid.across[0]} runs from left to right"
    directions += f", {grid.down[0]} from top to bottom" if grid.down[1] > 1 else ""
    words.append(f"Devices are numbered row by row{f': {directions}' if grid.across[0] else ''}.")
    last = max(places)
    at = ", ".join(f"{name} {n}" for name, n in grid.coordinates(last).items() if name and plan.topology)
    on_mesh = ", ".join(f"{axis} {places[last][axis]}" for axis in plan.mesh.axis_names)
    words.append(f"The last box is device {last}: {f'coordinates {at}; ' if at else ''}mesh position {on_mesh}.")
    return f'{colours}<p class="remark">{escape(" ".join(words))}</p>'


def _is_numbered(grid: Grid) -> bool:
    return grid.across[1] <= NUMBERED


def legend(paint: AxisLabels) -> str:
    """Every logical axis as a button in its colour; a click shows the tensors that have it."""
    once = {number: name for name, number in reversed(paint.number.items())}.values()
    first = [name for name in paint.number if name in once]
    sharded = [name for name in first if name not in paint.names.unsharded and name in paint.names.all]
    rest = [name for name in first if name not in sharded]
    shown, more = rest[:AXES_SHOWN], rest[AXES_SHOWN:]
    rows = [("sharded in compute", sharded), ("not sharded", shown)]
    lines = "".join(
        f'<p class="axes"><span>{what}</span>{"".join(map(paint.button, names))}</p>' for what, names in rows if names
    )
    tail = f'<p class="axes">{"".join(map(paint.button, more))}</p>'
    return f'<div id="axes-list">{lines}{folded(f"{len(more)} more", tail) if more else ""}</div>'


def _grid(plan: ShardingPlan) -> Grid:
    """The target's topology, or the mesh if the topology is unknown."""
    dims = tuple(plan.topology)
    if not dims or math.prod(size for _, size in dims) != plan.mesh.size:
        return Grid(tuple(mesh_sizes(plan).items()) or (("", 1),), {})
    return Grid(dims, {name: kind for name, (kind, _) in plan.links.items()})


def _places(plan: ShardingPlan) -> dict[int, dict[str, int]]:
    """The coordinates on the mesh of each device that is drawn."""
    sizes = mesh_sizes(plan)
    places = {}
    for place, device in enumerate(plan.device_order):
        if device >= DEVICES_SHOWN:
            continue
        where, rest = {}, place
        for axis, size in reversed(list(sizes.items())):
            rest, where[axis] = divmod(rest, size)
        places[device] = where
    return places


def _machine(plan: ShardingPlan, grid: Grid) -> str:
    """The machine in words: `v5e:4x4: y 4: ring, 45 GB/s per link; x 4: ring, 45 GB/s per link.`."""
    parts = [
        f"{name} {size}: {kind}, {speed / 1e9:.3g} GB/s per {'device' if kind == 'switch' else 'link'}"
        for name, size in grid.dims
        if name in plan.links
        for kind, speed in [plan.links[name]]
    ]
    return f"{plan.target or 'the machine'}: {'; '.join(parts)}." if parts else ""


def _panel(plan: ShardingPlan, paint: AxisLabels, grid: Grid, places: dict[int, dict[str, int]], axis: str) -> str:
    size = paint.sizes[axis]
    others = [a for a in paint.sizes if a != axis]
    group = {d: _number([where[a] for a in others], [paint.sizes[a] for a in others]) for d, where in places.items()}
    drawn = "".join(_plane(grid, first, axis, places, group) for first in _planes(grid, len(places)))
    span = _span(plan, grid, axis)
    dims = escape(json.dumps(grid.dims if plan.topology else []))
    label = f"mesh axis {axis}: {plan.mesh.size // size} groups of {size} devices{f', {span}' if span else ''}"
    ruled = '<span class="then">then</span>'.join(map(paint.sized, plan.axis_rules.get(axis, ()))) or "nothing"
    stored = ", ".join(storage_roles(plan, axis)) or "nothing"
    moved = bytes_text(axis_traffic(plan).get(axis, 0.0))
    facts = [
        ("shards", ruled),
        ("shards state of", escape(stored)),
        ("spans", escape(span) or "devices in order"),
        ("traffic", f"{moved} per step"),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts)
    return (
        f'<figure class="panel"><figcaption>{paint.tags([axis])}</figcaption>'
        f'<div class="planes" role="img" aria-label="{escape(label)}" data-axis="{escape(axis)}" '
        f'data-dims="{dims}">{drawn}</div>'
        f"<dl>{listed}</dl></figure>"
    )


def _number(where: Sequence[int], sizes: Sequence[int]) -> int:
    """The index of coordinates in row-major order."""
    number = 0
    for place, size in zip(where, sizes, strict=True):
        number = number * size + place
    return number


def _planes(grid: Grid, devices: int) -> Iterator[int]:
    """Yield the first device of each plane that is drawn."""
    yield from range(0, min(devices, DEVICES_SHOWN), max(grid.plane, 1))


def _span(plan: ShardingPlan, grid: Grid, axis: str) -> str:
    """The machine's dimensions along a mesh axis: `all 4 of z; 2 of the 4 of y, stride 2`."""
    sizes, words = dict(grid.dims), []
    for name, count, stride in plan.placing.get(axis, ()):
        whole = count == sizes.get(name)
        words.append(f"all {count} of {name}" if whole else f"{count} of the {sizes.get(name, count)} of {name}")
        words[-1] += f", stride {stride}" if stride > 1 else ""
    return "; ".join(words)


def _plane(grid: Grid, first: int, axis: str, places: dict[int, dict[str, int]], group: dict[int, int]) -> str:
    """Draw one plane."""
    across = grid.across[1]
    side, gap = (14, 5) if not _is_numbered(grid) else (24, 6) if len(grid.dims) > 2 else (32, 9)
    step, columns, folds = side + gap, min(across, FOLD), -(-across // FOLD)
    count = min(grid.plane, DEVICES_SHOWN - first)
    rows = -(-count // across)
    width, height = columns * step - gap + 2 * MARGIN, rows * folds * step - gap + 2 * MARGIN
    shapes = [*_wires(grid, columns, rows * folds, step, side)] if folds == 1 else []
    for i in range(count):
        device = first + i
        row, column = divmod(i, across)
        x, y = MARGIN + column % FOLD * step, MARGIN + (row * folds + column // FOLD) * step
        chosen = ' class="on"' if group[device] == group.get(0) else ""
        data = f'data-d="{device}" data-g="{group[device]}" data-p="{places[device][axis]}"'
        shapes.append(f'<rect{chosen} {data} x="{x}" y="{y}" width="{side}" height="{side}" rx="4"/>')
        if side > 20:
            shapes.append(f'<text x="{x + side / 2:g}" y="{y + side / 2 + 4:g}">{places[device][axis]}</text>')
    where = grid.coordinates(first)
    name = ", ".join(f"{d} {where[d]}" for d, _ in grid.dims[:-2])
    caption = f"<span>{escape(name)}</span>" if name else ""
    return (f'<div class="plane"><svg aria-hidden="true" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">{"".join(shapes)}</svg>{caption}</div>')  # fmt: skip


def _wires(grid: Grid, columns: int, rows: int, step: int, side: int) -> Iterator[str]:
    """Yield the links between devices: lines, which leave both ends of a closed ring, and bands for switches."""
    half = MARGIN + side / 2
    for (name, size), lines, runs in ((grid.across, rows, columns), (grid.down, columns, rows)):
        kind = grid.links.get(name)
        if kind is None or size < 2:
            continue
        is_across = name == grid.across[0]
        out = MARGIN - 1 if kind == "ring" else -side / 2
        start, end = MARGIN - out, MARGIN + (runs - 1) * step + side + out
        for n in range(lines):
            at = half + n * step
            if kind == "switch":
                box = (MARGIN - 4, at - 4, (runs - 1) * step + side + 8, 8)
                x, y, w, h = box if is_across else (box[1], box[0], box[3], box[2])
                yield f'<rect class="bus" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4"/>'
            elif is_across:
                yield f'<path d="M{start:g} {at:g}H{end:g}"/>'
            else:
                yield f'<path d="M{at:g} {start:g}V{end:g}"/>'
