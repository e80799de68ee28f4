"""From a table of mesh axes over logical axes to the sharding of every value.

A layout gives each mesh axis an ordered list of classes. In one tensor a mesh axis goes to the first class of its list
that the tensor has and that it divides; so the order settles every conflict (`heads` before `seq` is sequence
parallelism). State may be stored on further mesh axes (ZeRO): the axes that its spec leaves free go to its largest
dimension.

A spec here is a tuple with, for each dimension, the mesh axes that shard it, major to minor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.roles import Role, Roles
from autoshard.sharding.program.array_sizes import is_float, nbytes
from autoshard.spmdrules.core.placement import Spec

EARLY_BYTES = 1 << 16  # a message of so few bytes is all latency
FEWEST = 16  # input features of a shard of a kernel: as many 16-bit rows as a tile of a TPU has


@shown
@dataclass(eq=False)
class Layout:
    """The shardings that a table means.

    Attributes:
        axes: the program's logical axes.
        roles: their roles.
        mesh: mesh axis -> size, in order.
        table: mesh axis -> classes, in order of preference.
        storage: role -> mesh axes over which inputs of that role are stored beyond what the table says.
        pins: value -> spec that the user fixed.
    """

    axes: LogicalAxes
    roles: Roles
    mesh: Mapping[str, int]
    table: Mapping[str, tuple[int, ...]]
    storage: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[int, Spec] = field(default_factory=dict)

    def __post_init__(self):
        self._specs: dict[Leaves, Spec] = {}
        self._homes: dict[tuple[Leaves, tuple[int, ...], Role], Spec] = {}
        self._stored: dict[Leaves, Spec] | None = None
        self._transposed: dict[Leaves, Leaves] = {}

    @cached_property
    def held(self) -> Mapping[int, int]:
        """Value inside a loop or after a cast -> the input that it is (a slice of), where inputs are stored apart."""
        apart = any(self.storage.values()) or any(spec != self.spec(v) for v, spec in self.fixed.items())
        return self.axes.parameter_aliases if apart else {}

    def spec(self, value: int) -> Spec:
        """The sharding in which a value is computed and used."""
        return self.spec_of(self.axes.of_value[value])

    def spec_of(self, leaves: Leaves) -> Spec:
        """The sharding of any tensor with these classes."""
        found = self._specs.get(leaves)
        if found is None:
            found = self._specs[leaves] = self._place(leaves)
        return found

    def _place(self, leaves: Leaves) -> Spec:
        given: list[dict[int, tuple[str, ...]]] = [{} for _ in leaves]  # for each dimension: place of a leaf -> axes
        whole = [[self.axes.sizes[c] for c in dim] for dim in leaves]  # what of each leaf is not cut yet
        if any(0 in dim for dim in whole):  # nothing to save; XLA gives pieces of nothing odd shapes
            return ((),) * len(leaves)
        here = {c for dim in leaves for c in dim}
        for axis, size in self.mesh.items():
            for cls in self.table.get(axis, ()):
                spot = self._spot(leaves, whole, cls, size) if cls in here else None
                if spot is not None:
                    dim, part = spot
                    given[dim][part] = (*given[dim].get(part, ()), axis)
                    whole[dim][part] //= size
                    break
        return tuple(tuple(a for part in sorted(parts) for a in parts[part]) for parts in given)

    def _spot(self, leaves: Leaves, whole: list[list[int]], cls: int, size: int) -> tuple[int, int] | None:
        """Where a mesh axis of `size` can go on class `cls`: its size divides and the major parts are fully cut."""
        for d, dim in enumerate(leaves):
            for part, c in enumerate(dim):
                if c == cls and len(dim) == 1 and c in self.axes.stacked:
                    break  # a loop runs over it
                if c == cls and whole[d][part] % size == 0:
                    return d, part
                if whole[d][part] != 1:
                    break  # nothing behind a part that is not cut to single elements can be contiguous
        return None

    def ways(self, axes: Iterable[str]) -> int:
        """The number of shards over these mesh axes."""
        return math.prod(self.mesh[a] for a in axes)

    def cuts(self) -> set[int]:
        """The classes that this layout cuts somewhere."""
        listed = {c for classes in self.table.values() for c in classes}
        return {c for c in listed if self.ways(self.spec_of(((c,),))[0]) > 1}

    def effect(self) -> tuple[Any, ...]:
        """What distinguishes this layout from others: axes that always go together count as one."""
        merged: list[list[Any]] = []
        for axis, size in self.mesh.items():
            if size > 1:
                what = self.table.get(axis, ()), frozenset(r for r, axes in self.storage.items() if axis in axes)
                if merged and merged[-1][1] == what:
                    merged[-1][0] *= size
                else:
                    merged.append([size, what])
        return tuple((size, *what) for size, what in merged)

    def idle(self) -> list[str]:
        """The mesh axes that cut no work: their devices all do the same."""
        used = {a for classes in self.table.values() for c in classes for a in self.spec_of(((c,),))[0]}
        return [a for a, n in self.mesh.items() if n > 1 and a not in used]

    def stored(self, value: int) -> Spec:
        """The sharding in which a program input is held between calls."""
        if value in self.fixed:
            return self.fixed[value]
        role = self.roles.inputs.get(value, "other")
        key = self.axes.of_value[value], self.axes.program.avals[value].shape, role
        found = self._homes.get(key)
        if found is None:
            found = self._homes[key] = self.with_storage(*key)
        return found

    def early(self, value: int) -> bool:
        """Whether a value is a stored stack that is gathered once before a loop, not in every step.

        Such are stacks of small slices, and those that are cut along the loop.
        """
        source = value if value in self.roles.inputs else self.held.get(value)
        if source is None or not self.held:
            return False
        leaves, aval = self.axes.of_value[source], self.axes.program.avals[source]
        if not leaves or not any(c in self.axes.stacked for c in leaves[0]):
            return False
        stored = self.stored(source)
        if stored[0]:  # fixed so: no step of the loop could take its slice from one device alone
            return True
        return nbytes(aval) <= EARLY_BYTES * aval.shape[0] and stored != self.spec(source)

    @cached_property
    def gathered_early(self) -> list[int]:
        """The program inputs that are gathered before the loops over them."""
        return [v for v in dict.fromkeys(self.held.values()) if self.early(v)]

    def with_storage(self, leaves: Leaves, shape: Sequence[int], role: Role) -> Spec:
        """The spec of a tensor of state, with the storage axes of its role on its largest free dimensions.

        Of a kernel of a convolution input features come before output features: its gradient is scattered there, and
        along output features XLA:TPU reduces some shapes whole.
        """
        spec = self.spec_of(leaves)
        free = [a for a in self.storage.get(role, ()) if all(a not in dim for dim in spec)]
        if not free or 0 in shape:
            return spec
        out = [list(dim) for dim in spec]
        able = [d for d in range(len(shape)) if shape[d] > 1 and not any(c in self.axes.stacked for c in leaves[d])]

        def local(d: int) -> int:
            return shape[d] // self.ways(out[d])

        outputs = self.axes.kernels.get(leaves, 0) + len(shape)  # no dimension where it is no kernel

        while free:
            for count in range(len(free), 0, -1):  # as many as possible on one dimension
                fits = [d for d in able if local(d) % self.ways(free[:count]) == 0]
                if fits:
                    if outputs in fits:
                        least = FEWEST * self.ways(free[:count])
                        fits = [d for d in fits if d != outputs and local(d) >= least] or fits
                    best = max(fits, key=lambda d: (local(d), -d))
                    out[best] += free[:count]
                    free = free[count:]
                    break
            else:
                free = free[1:]
        return tuple(map(tuple, out))

    def gradient_spec(self, value: int) -> Spec | None:
        """Where the gradient of a stored tensor becomes whole: in the layout of the state that consumes it."""
        if self._stored is None:
            self._stored = self._gradients()
            self._transposed = {tuple(sorted(leaves)): leaves for leaves in self._stored}
        if value in self.roles.turned:  # not by its axes: another tensor may have them in this order
            becomes, permutation = self.roles.turned[value]
            spec = self.gradient_spec(becomes)
            return None if spec is None else tuple(spec[permutation.index(d)] for d in range(len(permutation)))
        leaves = self.axes.of_value[value]
        if leaves in self._stored:
            return self._stored[leaves]
        found = self._transposed.get(tuple(sorted(leaves)))  # a contraction leaves it transposed
        if found is None or len(set(leaves)) < len(leaves):
            return None
        return tuple(self._stored[found][found.index(dim)] for dim in leaves)

    def _gradients(self) -> dict[Leaves, Spec]:
        roles = {role for role in ("optimizer", "parameter") if self.storage.get(role)}
        found: dict[Leaves, Spec] = {}
        for v, role in self.roles.inputs.items():
            if role not in roles and not (v in self.fixed and is_float(self.axes.program.avals[v])):
                continue
            leaves, spec = self.axes.of_value[v], self.stored(v)
            slices = [(leaves, spec)]
            if leaves and any(c in self.axes.stacked for c in leaves[0]):
                slices.append((leaves[1:], spec[1:]))  # one step's slice of it, or one layer of a group of them
                if len(leaves[0]) > 1:
                    slices.append(((leaves[0][1:], *leaves[1:]), ((), *spec[1:])))
                    slices.append(((leaves[0][:1], leaves[0][1:], *leaves[1:]), ((), (), *spec[1:])))
            for key, where in slices:
                if role == "optimizer":  # the moments consume the gradient; the parameter follows
                    found[key] = where
                else:
                    found.setdefault(key, where)
        return found
