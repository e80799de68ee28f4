"""What two steps have in common: leaves by their digests, and what was kept with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard._shown import shown
from autoshard.ckpt.describe import Description, Leaf
from autoshard.ckpt.errors import SHOWN
from autoshard.ckpt.manifest import flat


@shown
@dataclass(frozen=True)
class Comparison:
    """Two steps side by side. No value was read: equal digests are equal values, but for one time in 2^32.

    Attributes:
        one: the first, as it names itself.
        other: the second.
        same: how many leaves have the same values.
        values: leaves of the same shape and dtype with other values.
        kinds: leaves of another shape or dtype, as `path: f32[2] | f32[3]`.
        only_one: leaves that only the first has.
        only_other: leaves that only the second has.
        settings: what differs of config, metrics, versions and meshes, as `config.model.width: 8 | 16`.
    """

    one: str
    other: str
    same: int
    values: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    only_one: tuple[str, ...] = ()
    only_other: tuple[str, ...] = ()
    settings: tuple[str, ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Whether all leaves of both are the same."""
        return not (self.values or self.kinds or self.only_one or self.only_other)

    def __str__(self) -> str:
        lines = [f"{self.one} | {self.other}", f"{self.same} leaves are the same"]
        parts = {
            "other values": self.values,
            "another shape or dtype": self.kinds,
            "only in the first": self.only_one,
            "only in the second": self.only_other,
            "kept with them": self.settings,
        }
        for title, found in parts.items():
            if found:
                lines.append(f"{title}: {len(found)}")
                lines += [f"  {line}" for line in found[:SHOWN]]
                lines += [f"  and {len(found) - SHOWN} more"] * (len(found) > SHOWN)
        return "\n".join(lines)


def compare(one: Description, other: Description) -> Comparison:
    """What differs between two steps."""
    have, want = _by_name(one), _by_name(other)
    both = [place for place in have if place in want]
    kinds = [place for place in both if _kind(have[place]) != _kind(want[place])]
    alike = [place for place in both if _kind(have[place]) == _kind(want[place])]
    differ = [place for place in alike if have[place].digest != want[place].digest]
    return Comparison(
        one=f"step {one.step} in {one.path}",
        other=f"step {other.step} in {other.path}",
        same=len(alike) - len(differ),
        values=tuple(name for name, _ in differ),
        kinds=tuple(f"{place[0]}: {_kind(have[place])} | {_kind(want[place])}" for place in kinds),
        only_one=tuple(place[0] for place in have if place not in want),
        only_other=tuple(place[0] for place in want if place not in have),
        settings=tuple(_settings(_kept(one), _kept(other))),
    )


def _by_name(step: Description) -> dict[tuple[str, int], Leaf]:
    """Leaves by name, and by which of that name they are: {"a/b": x} and {"a": {"b": y}} share one."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], Leaf] = {}
    for leaf in step.leaves:
        found[leaf.name, seen[leaf.name]] = leaf
        seen[leaf.name] += 1
    return found


def _kind(leaf: Leaf) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _kept(step: Description) -> dict[str, Any]:
    by = {name: value for name, value in step.written_by.items() if name != "time"}
    return {"config": step.config, "metrics": step.metrics, "written": by, "plan": step.plan and "kept"}


def _settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    have, want = flat(one), flat(other)
    return [
        f"{name}: {have.get(name, 'nothing')!r} | {want.get(name, 'nothing')!r}"
        for name in sorted(have.keys() | want.keys())
        if have.get(name, flat) != want.get(name, flat)
    ]
