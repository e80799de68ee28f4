"""What the reports of a plan share: groups of inputs, short names of axes, texts of figures.

This module reads only the plan's own data, so a plan without a function (from JSON) can be shown too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import numpy as jnp

from autoshard._columns import shorten_middle
from autoshard._shown import shown
from autoshard._units import bytes_text, line_text, spec_text, time_text
from autoshard.sharding.plan.mesh_words import requested_axes
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import NO_AXIS, Leaf
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.report.constants import KEY_BYTES
from autoshard.sharding.report.tensor_labels import labels
from autoshard.spmdrules.core.placement import Spec, axes_of, from_partition_spec
from autoshard.spmdrules.reference.coverage import ON_HOST, runs_on_host

HEAD_DIM = "head_dim"  # as in `axis_names`
NAME_WIDTH = 40
ROLES = ("parameter", "optimizer", "data", "other")


def mesh_sizes(plan: ShardingPlan) -> dict[str, int]:
    """The size of each mesh axis."""
    return dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))


def devices(plan: ShardingPlan) -> int:
    """The number of devices of the plan."""
    return math.prod(mesh_sizes(plan).values())


def mesh_text(plan: ShardingPlan) -> str:
    """The mesh in words, as it was requested: `fsdp 4 x tp 4 = 16 devices (tp is split: tp 2 x tp_1 2)`."""
    count = devices(plan)
    if count == 1:
        return "one device"
    axes = requested_axes(plan.mesh)
    whole = " x ".join(f"{axis} {math.prod(parts.values())}" for axis, parts in axes.items())
    split = [f"{axis} is split: {_product(parts)}" for axis, parts in axes.items() if len(parts) > 1]
    return f"{whole} = {count} devices" + (f" ({'; '.join(split)})" if split else "")


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def title(plan: ShardingPlan) -> str:
    """The function and its target: `train_step on v5e:4x4`."""
    return f"{plan.function or 'a function'} on {plan.target or 'an unknown machine'}"


def spec_of(leaf: Leaf) -> Spec:
    """The mesh axes that shard each dimension of a leaf."""
    return from_partition_spec(leaf.spec, len(leaf.shape))


def compute_axes(plan: ShardingPlan, leaf: Leaf) -> set[str]:
    """The mesh axes that shard a leaf in compute, not only in storage."""
    ruled = set()
    for names, dim in zip(leaf.axes, spec_of(leaf), strict=False):
        ruled |= {a for a in dim if set(names.split("*")) & set(plan.axis_rules.get(a, ()))}
    return ruled


def leaf_bytes(leaf: Leaf) -> float:
    """Bytes of the unsharded array."""
    try:
        item = jnp.dtype(leaf.dtype).itemsize
    except TypeError:
        item = KEY_BYTES
    return math.prod(leaf.shape) * item


def local_bytes(leaf: Leaf, sizes: dict[str, int]) -> float:
    """Bytes of one device's shard of the array."""
    return leaf_bytes(leaf) / math.prod(sizes.get(a, 1) for a in axes_of(spec_of(leaf)))


class AxisNames:
    """Short names of logical axes: an axis named after a path, `0/params/wq:3`, is shown as `wq:3`.

    Attributes:
        sizes: The size of each axis in the program.
        all: The plan's axes.
        unsharded: The axes that no mesh axis shards in compute.
    """

    def __init__(self, plan: ShardingPlan):
        named = (part for leaf in (*plan.inputs, *plan.outputs) for dim in leaf.axes for part in dim.split("*"))
        ruled = [name for names in plan.axis_rules.values() for name in names]
        self.sizes = dict(plan.axis_sizes)
        self.all = tuple(name for name in dict.fromkeys([*ruled, *named, *self.sizes]) if name not in NO_AXIS)
        self.unsharded = tuple(name for name in self.all if name not in ruled)
        self._short: dict[str, str] = {}
        for name in self.all:
            parts = name.split("/")
            count = 2 if parts[-1].partition(":")[0].isdecimal() and len(parts) > 1 else 1
            while count < len(parts) and any(
                other != name and other.split("/")[-count:] == parts[-count:] for other in self.all
            ):
                count += 1
            self._short[name] = "/".join(parts[-count:])
        cut_names = {name: shorten_middle(text, NAME_WIDTH) for name, text in self._short.items()}
        if len(set(cut_names.values())) == len(set(self._short.values())):  # names stay distinct
            self._short = cut_names
        self._short |= self._head_dims(plan, ruled)

    def _head_dims(self, plan: ShardingPlan, ruled: Sequence[str]) -> dict[str, str]:
        """One name for the head sizes of queries, keys and values, if they are equal and no mesh axis shards them."""
        found = [name for name in self.all if _is_head_dim(name)]
        if {*found} & {*ruled} or len({self.sizes.get(name) for name in found}) != 1:
            return {}
        computed = (part for a in plan.activations for dim in a.axes for part in dim.split("*") if _is_head_dim(part))
        return dict.fromkeys([*found, *computed], HEAD_DIM)

    def short(self, name: str) -> str:
        """The short name of an axis, or of a dimension made of several: `heads*groups`, `b/kernel:2.0*2.1`."""
        words, before = [], ""
        for part in name.split("*"):
            text = self._short.get(part, part)
            stem, _, number = text.rpartition(":")
            words.append(number if stem and stem == before else text)
            before = stem
        return "*".join(words)

    def sized(self, name: str) -> str:
        """An axis with its size: `heads 16`."""
        return f"{self.short(name)} {self.sizes[name]}" if name in self.sizes else self.short(name)

    def all_sized(self, names: Iterable[str]) -> list[str]:
        """Several axes with their sizes, each text once."""
        return [*dict.fromkeys(map(self.sized, names))]

    def list(self, names: Iterable[str]) -> str:
        """Several axes: `[batch, seq]`."""
        return f"[{', '.join(map(self.short, names))}]"


def _is_head_dim(name: str) -> bool:
    return re.fullmatch(rf"{HEAD_DIM}(_\d+)?", name) is not None


@shown
@dataclass(frozen=True)
class Group:
    """Leaves with the same axes, spec, role, shape, dtype and memory."""

    leaves: tuple[Leaf, ...]
    sizes: dict[str, int]
    label: str  # a short name for all: `attention/{wk,wq}`

    @property
    def first(self) -> Leaf:
        """The first leaf. What the leaves share can be read from it."""
        return self.leaves[0]

    @property
    def whole_bytes(self) -> float:
        """Unsharded bytes of all leaves."""
        return leaf_bytes(self.first) * len(self.leaves)

    @property
    def local_bytes(self) -> float:
        """Bytes of all leaves on one device."""
        return local_bytes(self.first, self.sizes) * len(self.leaves)


def path_text(plan: ShardingPlan, leaf: Leaf) -> str:
    """The path of an input, with the name of its argument, or that of a result: `state/layers/wq`."""
    return named_path(leaf.path, plan.arguments) if leaf.role else leaf.path


def groups(plan: ShardingPlan, leaves: Iterable[Leaf]) -> list[Group]:
    """Groups the leaves, the largest group first. Groups of one role have labels that differ."""
    leaves_of: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        key = (leaf.role, leaf.axes, spec_text(leaf.spec), leaf.shape, leaf.dtype, leaf.memory_kind)
        leaves_of.setdefault(key, []).append(leaf)
    label_of: dict[Any, str] = {}
    for role in dict.fromkeys(key[0] for key in leaves_of):
        of_role = {key: some for key, some in leaves_of.items() if key[0] == role}
        paths = [[path_text(plan, leaf) for leaf in some] for some in of_role.values()]
        label_of |= zip(of_role, labels(paths), strict=True)
    made = [Group(tuple(some), mesh_sizes(plan), label_of[key]) for key, some in leaves_of.items()]
    return sorted(made, key=lambda g: -g.whole_bytes)  # stable: groups of equal size keep the order of the inputs


def groups_by_role(plan: ShardingPlan) -> list[tuple[str, list[Group]]]:
    """The groups of inputs of each role, the largest group first."""
    of_inputs = groups(plan, plan.inputs)
    roles = dict.fromkeys([*ROLES, *(g.first.role for g in of_inputs)])
    return [(role, some) for role in roles if (some := [g for g in of_inputs if g.first.role == role])]


def totals(some: Sequence[Group]) -> tuple[int, float, float]:
    """The number of arrays in groups, their unsharded bytes, and their bytes on one device."""
    return sum(len(g.leaves) for g in some), sum(g.whole_bytes for g in some), sum(g.local_bytes for g in some)


def memory_rows(plan: ShardingPlan) -> list[tuple[str, float, float | None]]:
    """Memory by kind: (kind, bytes per device, bytes on one device that holds everything), without empty kinds."""
    here = _kinds(plan.estimate.memory_bytes)
    alone = _kinds(plan.alone.memory_bytes) if plan.alone else {}
    names = dict.fromkeys([*here, *alone])
    return [
        (k, here.get(k, 0.0), alone.get(k, 0.0) if plan.alone else None) for k in names if here.get(k) or alone.get(k)
    ]


def _kinds(memory: Any) -> dict[str, float]:
    kinds = dict(memory)
    if "other" in kinds:  # counters and keys are too small for a line of their own
        kinds["data"] = kinds.get("data", 0.0) + kinds.pop("other")
    return kinds


def unknown_text(primitive: str) -> str:
    """What happens to a primitive that has no rule."""
    return ON_HOST if runs_on_host(primitive) else "its operands are gathered, and every device repeats the work"


def padding_texts(plan: ShardingPlan) -> list[str]:
    """What padding would save, a text for each axis."""
    return [padding_text(plan, p.axis) for p in plan.padding]


def padding_text(plan: ShardingPlan, axis: str) -> str:
    """What padding an axis would save.

    `vocab 50257 is not divisible by 8. Padded to 50264, a step would take 270 ms (-10.1 %) and 1.00 GiB less memory`.
    """
    (padding,) = [p for p in plan.padding if p.axis == axis]
    names, here = AxisNames(plan), plan.estimate
    change = padding.step_time_us / here.step_time_us - 1 if here.step_time_us else 0.0
    memory = here.peak_memory_bytes - padding.peak_memory_bytes
    text = (
        f"{names.short(axis)} {padding.size} is not divisible by {padding.ways}. Padded to {padding.padded}, a step "
        f"would take {time_text(padding.step_time_us)} ({100 * change:+.1f} %) and {bytes_text(abs(memory))} "
        f"{'less' if memory >= 0 else 'more'} memory"
    )
    fits = "" if plan.fits else f", which fits {bytes_text(plan.limit_bytes)}"
    return text + fits + (f", with plan '{padding.words}'" if padding.words != plan.chosen else "")


def exposed_us(plan: ShardingPlan) -> float:
    """Communication time that compute does not hide, in microseconds."""
    estimate = plan.estimate
    return max(estimate.step_time_us - estimate.compute_us - estimate.host_exposed_us, 0.0)


def collectives(plan: ShardingPlan) -> list[tuple[str, str, float, str]]:
    """The plan's collectives, the largest first: (kind, mesh axes, bytes, short source line), summed per line."""
    sizes: dict[tuple[str, str, str], float] = {}
    for kind, axis, size, line in plan.traffic:
        key = (kind, axis, line_text(line))
        sizes[key] = sizes.get(key, 0.0) + size
    return sorted(((k, a, size, line) for (k, a, line), size in sizes.items()), key=lambda t: -t[2])


def axis_traffic(plan: ShardingPlan) -> dict[str, float]:
    """Bytes that each device sends per step over each mesh axis; a collective over several axes counts for each."""
    sizes: dict[str, float] = {}
    for _, axes, size, _ in plan.traffic:
        for axis in axes.split():
            sizes[axis] = sizes.get(axis, 0.0) + size
    return sizes


def storage_roles(plan: ShardingPlan, axis: str) -> list[str]:
    """The roles whose state a mesh axis also shards in storage."""
    return [role for role, axes in plan.storage.items() if axis in axes]
