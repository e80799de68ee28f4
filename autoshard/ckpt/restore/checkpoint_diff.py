"""The differences between two steps: leaves by their digests, config, metrics and versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard._columns import LINES_SHOWN
from autoshard._shown import shown
from autoshard.ckpt.restore.checkpoint_info import Description, Leaf
from autoshard.ckpt.state.named_leaves import Key
from autoshard.ckpt.store.manifest import differences


@shown
@dataclass(frozen=True)
class Comparison:
    """The differences between two steps. Values are compared by digest; a false match has probability 2^-32.

    Attributes:
        one: the number and path of the first step.
        other: the number and path of the second step.
        same: how many leaves have the same values.
        values: leaves of the same shape and dtype with different values.
        kinds: leaves of different shape or dtype, as `path: f32[2] | f32[3]`.
        only_one: leaves that only the first step has.
        only_other: leaves that only the second step has.
        settings: differences in config, metrics, versions and meshes, as `config.model.width: 8 | 16`.
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
        """Whether both steps have the same leaves with the same values."""
        return not (self.values or self.kinds or self.only_one or self.only_other)

    def __str__(self) -> str:
        lines = [f"{self.one} | {self.other}", f"{self.same} leaves are the same"]
        parts = {
            "different values": self.values,
            "different shape or dtype": self.kinds,
            "only in the first": self.only_one,
            "only in the second": self.only_other,
            "different settings": self.settings,
        }
        for title, entries in parts.items():
            if entries:
                lines.append(f"{title}: {len(entries)}")
                lines += [f"  {line}" for line in entries[:LINES_SHOWN]]
                lines += [f"  and {len(entries) - LINES_SHOWN} more"] * (len(entries) > LINES_SHOWN)
        return "\n".join(lines)


def compare(one: Description, other: Description) -> Comparison:
    """Return the differences between two steps."""
    have, want = ({leaf.key: leaf for leaf in step.leaves} for step in (one, other))
    both = [key for key in have if key in want]
    kinds = [key for key in both if _kind(have[key]) != _kind(want[key])]
    same_kind = [key for key in both if _kind(have[key]) == _kind(want[key])]
    differ = [key for key in same_kind if have[key].digest != want[key].digest]
    return Comparison(
        one=f"step {one.step} in {one.path}",
        other=f"step {other.step} in {other.path}",
        same=len(same_kind) - len(differ),
        values=tuple(map(_path, differ)),
        kinds=tuple(f"{_path(key)}: {_kind(have[key])} | {_kind(want[key])}" for key in kinds),
        only_one=tuple(_path(key) for key in have if key not in want),
        only_other=tuple(_path(key) for key in want if key not in have),
        settings=tuple(differences(_settings(one), _settings(other), "{name}: {one} | {other}".format)),
    )


def _path(key: Key) -> str:
    """Return a unique text for a path: {"a/b": x} has 'a/b', {"a": {"b": x}} has a/b."""
    return "/".join(repr(level) if "/" in level else level for level in key)


def _kind(leaf: Leaf) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _settings(step: Description) -> dict[str, Any]:
    by = {name: value for name, value in step.written_by.items() if name != "time"}
    return {"config": step.config, "metrics": step.metrics, "written": by, "plan": step.plan and "saved"}
