"""Change a layout by one word: one logical axis more or less on a mesh axis, or one part of the state."""

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
    """A mesh axis that cuts (stores) one thing more, or less, than its kind of parallelism does: `tp-ffn`.

    Attributes:
        axis: the mesh axis.
        more: whether it is one more.
        what: a logical axis, behind those that the mesh axis has already; or a role of the state.
    """

    axis: str
    more: bool
    what: str

    def __str__(self) -> str:
        return f"{self.axis}{'+' if self.more else '-'}{self.what}"


def changed(layout: Layout, change: Change) -> Layout:
    """A layout with one word more or less, without pins.

    Raises:
        PlanRequestError: there is no such axis, or nothing to take away.
    """
    axis, names = change.axis, {name: c for c, name in layout.axes.names.items()}
    table, storage = dict(layout.table), dict(layout.storage)
    if axis not in layout.mesh:
        raise PlanRequestError(f"plan '{change}': there is no mesh axis '{axis}'; there is {', '.join(layout.mesh)}")
    role: Role | None = next((role for role in STATE if role == change.what), None)
    if role is None and change.what not in names:
        near = difflib.get_close_matches(change.what, [*names, *STATE], n=1)
        hint = f" Did you mean '{axis}{'+' if change.more else '-'}{near[0]}'?" if near else ""
        raise PlanRequestError(
            f"plan '{change}': the program has no logical axis '{change.what}'; it has {', '.join(sorted(names))}; "
            f"and of the state there is {', '.join(STATE)}.{hint}"
        )
    given = storage.get(role, ()) if role else table.get(axis, ())
    what = axis if role else names[change.what]
    if (what in given) == change.more:
        raise PlanRequestError(
            f"plan '{change}': '{axis}' {'has' if change.more else 'does not have'} {change.what} "
            f"{'already' if change.more else 'to begin with'}; leave the word out"
        )
    if role:
        storage[role] = tuple(a for a in layout.mesh if (a in given) != (a == axis))
    else:
        cut = table.get(axis, ())
        table[axis] = (*cut, names[change.what]) if change.more else tuple(c for c in cut if c != names[change.what])
    return Layout(layout.axes, layout.roles, layout.mesh, table, storage)


def uses_of(axes: LogicalAxes, classes: Sequence[int], size: int) -> list[int]:
    """How many of `size` devices each class can use of what is left to it by those before it that are beside it."""
    found: dict[int, int] = {}
    for c in classes:
        left = size // math.prod(found[d] for d in found if d in axes.co_occurring.get(c, ()))
        found[c] = math.gcd(left, axes.sizes[c])
    return list(found.values())


def state_parts(size: int, uses: Sequence[int]) -> list[int]:
    """A mesh axis of `size` in the coarsest factors of which every class can take as many as it uses."""
    parts = [size]
    for most in uses:
        if any(math.prod(some) == most for k in range(len(parts) + 1) for some in combinations(parts, k)):
            continue
        out: list[int] = []
        for part in parts:
            shared = math.gcd(part, most)
            most //= shared
            out += [shared, part // shared] if 1 < shared < part else [part]
        parts = out
    return parts
