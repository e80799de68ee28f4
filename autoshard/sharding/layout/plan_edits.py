"""Edit a layout: add a logical axis or a role of state to a mesh axis, or remove it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from autoshard._shown import shown
from autoshard.errors import PlanRequestError
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import STATE, Role
from autoshard.sharding.layout.layout import Layout


@shown
@dataclass(frozen=True)
class Change:
    """A logical axis, or a role of state, that is added to a mesh axis or removed from it: `tp-ffn`, `dp+optimizer`.

    Attributes:
        axis: the mesh axis.
        added: whether it is added, not removed.
        what: the logical axis, which comes after those that the mesh axis has; or the role.
    """

    axis: str
    added: bool
    what: str

    def __str__(self) -> str:
        return f"{self.axis}{'+' if self.added else '-'}{self.what}"


def changed(layout: Layout, change: Change) -> Layout:
    """The layout after a change, without fixed shardings.

    Raises:
        PlanRequestError: the mesh axis or the logical axis does not exist, or the change changes nothing.
    """
    axis, names = change.axis, {name: c for c, name in layout.axes.names.items()}
    table, storage = dict(layout.table), dict(layout.storage)
    if axis not in layout.mesh:
        raise PlanRequestError(f"plan '{change}': the mesh has no axis '{axis}'; it has {', '.join(layout.mesh)}")
    role: Role | None = next((role for role in STATE if role == change.what), None)
    if role is None and change.what not in names:
        near = difflib.get_close_matches(change.what, [*names, *STATE], n=1)
        hint = f" Did you mean '{axis}{'+' if change.added else '-'}{near[0]}'?" if near else ""
        raise PlanRequestError(
            f"plan '{change}': the program has no logical axis '{change.what}'; it has {', '.join(sorted(names))}. "
            f"The kinds of state are {', '.join(STATE)}.{hint}"
        )
    present = storage.get(role, ()) if role else table.get(axis, ())
    what = axis if role else names[change.what]
    if (what in present) == change.added:
        verb = "store" if role else "shard"
        raise PlanRequestError(
            f"plan '{change}': '{axis}' {f'already {verb}s' if change.added else f'does not {verb}'} {change.what}; "
            "leave the word out"
        )
    if role:
        storage[role] = tuple(a for a in layout.mesh if (a in present) != (a == axis))
    else:
        listed = table.get(axis, ())
        table[axis] = (
            (*listed, names[change.what]) if change.added else tuple(c for c in listed if c != names[change.what])
        )
    new = Layout(layout.axes, layout.roles, layout.mesh, table, storage, sequence=layout.sequence)
    # Specs of values without the changed logical axis stay the same. A change of storage changes none of them.
    moved = None if role else names[change.what]
    new.known_specs.update((k, spec) for k, spec in layout.known_specs.items() if all(moved not in dim for dim in k))
    return new


def usable_devices(axes: LogicalAxes, classes: Sequence[int], size: int) -> list[int]:
    """For each logical axis, over how many of `size` devices it can be sharded.

    Devices do not count if they already shard an earlier logical axis that occurs in all values of this one.
    """
    usable: dict[int, int] = {}
    for c in classes:
        left = size // math.prod(usable[d] for d in usable if d in axes.co_occurring.get(c, ()))
        usable[c] = math.gcd(left, axes.sizes[c])
    return list(usable.values())


def axis_parts(size: int, usable: Sequence[int]) -> list[int]:
    """Split a mesh axis of `size` into few factors, so that each number in `usable` is a product of some of them."""
    parts = [size]
    for wanted in usable:
        if any(math.prod(some) == wanted for k in range(len(parts) + 1) for some in combinations(parts, k)):
            continue
        split: list[int] = []
        for part in parts:
            shared = math.gcd(part, wanted)
            wanted //= shared
            split += [shared, part // shared] if 1 < shared < part else [part]
        parts = split
    return parts
