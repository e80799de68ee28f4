"""Derives the sharding of every value from a table of the logical axes that each mesh axis shards.

A layout gives each mesh axis an ordered list of logical axes. In each tensor, a mesh axis shards the first logical axis
of its list that the tensor has and whose size it divides. So the order resolves every conflict (`heads` before `seq` is
sequence parallelism). State may be stored over further mesh axes (ZeRO): those that its spec does not use shard its
largest dimension.

A spec here is a tuple. For each dimension it has the mesh axes that shard it, major to minor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.merged.loop_slices import loop_slices
from autoshard.sharding.axes.merged.merged_axes import rearranged_axes
from autoshard.sharding.axes.roles import Role, Roles
from autoshard.sharding.axes.stored_values import is_small_stack, small_layers, sources_of
from autoshard.sharding.axes.typical_inputs import typical_inputs
from autoshard.sharding.axes.weights.spread_matrices import spread_matrices_of, spread_spec
from autoshard.sharding.axes.weights.storage_dims import stored_dim
from autoshard.sharding.layout.constants import EARLY_GATHER_SLICE_BYTES
from autoshard.sharding.program.array_sizes import is_float, itemsize
from autoshard.spmdrules.core.placement import Spec, exchanged_spec


@shown
@dataclass(eq=False)
class Layout:
    """The shardings that follow from a table.

    Attributes:
        axes: the program's logical axes.
        roles: their roles.
        mesh: mesh axis -> size, in order.
        table: mesh axis -> logical axes (by number), in order of preference.
        storage: role -> mesh axes over which inputs of that role are stored, in addition to the table.
        fixed: value -> spec that the user fixed.
        sequence: mesh axis -> how attention runs over the sequence that it shards: `gather`, `ulysses` or `ring`
            (`sequence_strategy`). Over other mesh axes keys are gathered as the rule of attention says.
        known_specs: the results of `spec_of` so far.
    """

    axes: LogicalAxes
    roles: Roles
    mesh: Mapping[str, int]
    table: Mapping[str, tuple[int, ...]]
    storage: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[int, Spec] = field(default_factory=dict)
    sequence: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.known_specs: dict[Leaves, Spec] = {}
        self._input_specs: dict[tuple[Leaves, tuple[int, ...], Role], Spec] = {}
        self._gradient_specs: dict[Leaves, Spec] | None = None
        self._transposed: dict[Leaves, Leaves] = {}
        self._shards_of_parts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._joined_specs: dict[int, Spec] = {}

    @cached_property
    def _stores_apart(self) -> bool:
        """Whether the sharding of some input differs between storage and use."""
        return any(self.storage.values()) or any(spec != self.spec(v) for v, spec in self.fixed.items())

    @cached_property
    def aliased_inputs(self) -> Mapping[int, int]:
        """Value -> the input whose alias it is; empty if all inputs are stored as they are used."""
        if not self._stores_apart:
            return {}
        aliases = sources_of(self.axes, self.roles)
        if self.roles.gathers_once:
            return aliases
        # The stages gather small weights of all their layers at once.
        small = {v for v in small_layers(self.axes, EARLY_GATHER_SLICE_BYTES) if v in aliases}
        return {v: source for v, source in aliases.items() if v not in small} if small else aliases

    @cached_property
    def small_stacks(self) -> dict[int, int]:
        """Inputs that are stacks of small layers and that `pp` shards along the layers -> bytes of a gathered element.

        The stages gather such a stack once, before all ticks, after it is cast to the type of its layers.
        """
        if not self._stores_apart or self.roles.gathers_once:
            return {}
        avals, aliases = self.axes.program.avals, self.axes.parameter_aliases
        small = small_layers(self.axes, EARLY_GATHER_SLICE_BYTES)
        found = {v: itemsize(avals[v]) for v in small if v in self.roles.inputs}
        for v in self.axes.layer_dims if found else ():
            if (source := aliases.get(v)) in found:
                found[source] = min(found[source], itemsize(avals[v]))
        return found

    def spec(self, value: int) -> Spec:
        """The sharding with which a value is computed and used."""
        return self.spec_of(self.axes.of_value[value])

    def spec_of(self, leaves: Leaves) -> Spec:
        """The sharding of any tensor whose dimensions have these logical axes."""
        spec = self.known_specs.get(leaves)
        if spec is None:
            spec = self.known_specs[leaves] = self._derive_spec(leaves)
        return spec

    def _derive_spec(self, leaves: Leaves) -> Spec:
        if (spread := spread_spec(self.axes, leaves, self.mesh, self.storage)) is not None:
            return spread
        if self._listed.isdisjoint([c for dim in leaves for c in dim]):
            return ((),) * len(leaves)
        assigned, _ = self._assigned(leaves)
        return tuple([tuple([a for part in sorted(parts) for a in parts[part]]) if parts else () for parts in assigned])

    def _assigned(self, leaves: Leaves) -> tuple[list[dict[int, tuple[str, ...]]], list[list[int]]]:
        """For each dimension: part -> the mesh axes that shard it; and the size of each part in a shard."""
        present = {c for dim in leaves for c in dim}
        assigned: list[dict[int, tuple[str, ...]]] = [{} for _ in leaves]
        local = [[self.axes.sizes[c] for c in dim] for dim in leaves]
        empty = any([0 in dim for dim in local])  # some XLA versions give empty shards the whole shape
        for axis, size in self.mesh.items() if not empty else ():
            for cls in self.table.get(axis, ()):
                position = self._shardable_part(leaves, local, cls, size) if cls in present else None
                if position is not None:
                    dim, part = position
                    assigned[dim][part] = (*assigned[dim].get(part, ()), axis)
                    local[dim][part] //= size
                    break
        return assigned, local

    @cached_property
    def _listed(self) -> set[int]:
        """The logical axes in the table."""
        return {c for classes in self.table.values() for c in classes}

    def _shardable_part(self, leaves: Leaves, local: list[list[int]], cls: int, size: int) -> tuple[int, int] | None:
        """The dimension, and the part of it, in which a mesh axis of `size` can shard the logical axis `cls`.

        `size` divides the part, and all parts before it in the dimension are sharded to single elements. Otherwise a
        shard would not be contiguous, which is allowed only where elements may be in any order.
        """
        for d, dim in enumerate(leaves):
            for part, c in enumerate(dim):
                if c == cls and len(dim) == 1 and c in self.axes.stacked:
                    break  # a loop runs over this dimension
                if c == cls and local[d][part] % size == 0:
                    return d, part
                if local[d][part] != 1 and dim not in self.axes.unordered:
                    break
        return None

    def shards_of_parts(self, dim: tuple[int, ...]) -> tuple[int, ...]:
        """The number of shards of each part of a merged dimension in any order. It is the same for all values."""
        known = self._shards_of_parts.get(dim)
        if known is None:
            local = self._assigned((dim,))[1][0]
            sizes = [self.axes.sizes[c] for c in dim]
            known = self._shards_of_parts[dim] = tuple(n // own for n, own in zip(sizes, local, strict=True))
        return known

    def shard_count(self, axes: Iterable[str]) -> int:
        """The number of shards over these mesh axes."""
        return math.prod([self.mesh[a] for a in axes])

    def sharded_classes(self) -> set[int]:
        """The logical axes that this layout shards in some tensor."""
        return {c for c in self._listed if self.shard_count(self.spec_of(((c,),))[0]) > 1}

    def sharding_key(self) -> tuple[Any, ...]:
        """A key that is equal for layouts with the same shardings. Adjacent mesh axes with equal use count as one."""
        merged: list[list[Any]] = []
        for axis, size in self.mesh.items():
            if size > 1:
                stores = frozenset(r for r, axes in self.storage.items() if axis in axes)
                use = self.table.get(axis, ()), stores, self.sequence.get(axis, "")
                if merged and merged[-1][1] == use:
                    merged[-1][0] *= size
                else:
                    merged.append([size, use])
        return tuple((size, *use) for size, use in merged)

    def idle_axes(self) -> list[str]:
        """The mesh axes that shard no work: all their devices do the same."""
        # Axes of one dimension, such as key heads and query groups, can be sharded together further than each alone.
        dims = [*((c,) for c in self._listed), *filter(self._listed.issuperset, self.axes.merged_inputs)]
        used = {a for dim in dims for a in self.spec_of((dim,))[0]}
        return [a for a, n in self.mesh.items() if n > 1 and a not in used]

    def stored_spec(self, value: int) -> Spec:
        """The sharding with which a program input is stored between calls."""
        if value in self.fixed:
            return self.fixed[value]
        key = self.axes.of_value[value], self.axes.program.avals[value].shape, self.roles.inputs.get(value, "other")
        spec = self._input_specs.get(key)
        if spec is None:
            spec = self._input_specs[key] = self.with_storage(*key)
        return spec

    def alias_spec(self, source: int, value: int) -> Spec:
        """The sharding of an alias of a program input, or of a weight computed from it.

        Each dimension is sharded as in the input. If parameters were joined in between, it is sharded as in the result.
        """
        if (joined := self.roles.joined.origin.get(value)) is not None:
            spec, source = self._joined_spec(joined), joined
        else:
            spec = self.stored_spec(source)
        whole, own = self.axes.of_value[source], self.axes.of_value[value]
        if (layer := self.axes.layer_dims.get(value)) is not None:
            stored = ((),) * (len(own) - len(layer)) + spec[len(spec) - len(layer) :]
            return exchanged_spec(stored, self.spec(value))
        moved = rearranged_axes(own, whole, spec, self._leading)
        if moved is None:  # the order of dimensions tells them apart
            return ((),) * (len(own) - len(spec)) + spec[max(len(spec) - len(own), 0) :]
        return moved

    def _joined_spec(self, value: int) -> Spec:
        """The sharding in which a joined weight is computed. Small stacks of parameters are gathered first."""
        if value not in self._joined_specs:
            join, spec = self.roles.joined.joins[value], self.spec(value)
            if not is_small_stack(self.axes, value, EARLY_GATHER_SLICE_BYTES):
                spec = join.spec(lambda v: self.held_spec(v) or self.spec(v), spec)
            self._joined_specs[value] = spec
        return self._joined_specs[value]

    def held_spec(self, value: int) -> Spec | None:
        """The sharding of an input, an alias, or a computed weight before operators use it; None for other values."""
        if value in self.roles.inputs:
            return self.stored_spec(value)
        source = self.aliased_inputs.get(value)
        if source is None or self.is_gathered_before_loop(source):
            return None
        return self.alias_spec(source, value)

    def _leading(self, dim: tuple[int, ...], parts: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The mesh axes that shard the first parts of a dimension: none, or all of `axes`, which shard all of it."""
        size = math.prod(self.axes.sizes[c] for c in dim[:parts])
        return axes if size % self.shard_count(axes) == 0 else ()

    def is_gathered_before_loop(self, value: int) -> bool:
        """Whether a value is a stored stack that is gathered once before a loop, not in every iteration.

        This holds for stacks of small slices, and for stacks that are sharded along the loop.
        """
        source = value if value in self.roles.inputs else self.axes.parameter_aliases.get(value)
        if source is not None and source in self.small_stacks:
            return self.stored_spec(source) != self.spec(source)
        source = value if value in self.roles.inputs else self.aliased_inputs.get(value)
        if source is None or not self.aliased_inputs:
            return False
        leaves, aval = self.axes.of_value[source], self.axes.program.avals[source]
        if not leaves or not any(c in self.axes.stacked for c in leaves[0][:1]) or _compat.is_on_host(aval):
            return False
        stored = self.stored_spec(source)
        if stored[0]:  # the user fixed this; in each iteration, only some devices would have the slice
            return True
        return is_small_stack(self.axes, source, EARLY_GATHER_SLICE_BYTES) and stored != self.spec(source)

    @cached_property
    def inputs_gathered_before_loops(self) -> list[int]:
        """The program inputs that are gathered before the loops over them."""
        stored = dict.fromkeys([*self.aliased_inputs.values(), *self.small_stacks])
        return [*filter(self.is_gathered_before_loop, stored)]

    def with_storage(self, leaves: Leaves, shape: Sequence[int], role: Role) -> Spec:
        """The spec of a tensor of state, in which the storage axes of its role shard its largest dimensions.

        Kernels of convolutions and weights of heads are sharded where XLA:TPU reduce-scatters their gradients
        (`axes.weights.storage_dims`).

        If other mesh axes also shard the batch, dimensions that are not sharded yet take precedence. XLA's partitioner
        then reduce-scatters the gradient over the storage axes, and all-reduces the shards over the others. But if
        `tp` and `fsdp` shard the same dimension under `dp:2 fsdp:2 tp:2`, it all-reduces the whole gradient over `dp`
        and `fsdp` together.

        A table whose rows are only looked up is sharded along its features (`axes.lookup_tables`), and a parameter that
        is concatenated, split or sliced along another dimension (`axes.weights.joined_weights`).
        """
        spec = self.spec_of(leaves)
        free = [a for a in self.storage.get(role, ()) if all(a not in dim for dim in spec)]
        if not free or 0 in shape:
            return spec
        out = [list(dim) for dim in spec]
        local = [n // self.shard_count(dim) for n, dim in zip(shape, spec, strict=True)]
        stacked, apart = self.axes.stacked, self._batch_is_sharded_apart(role)
        shardable = [d for d, n in enumerate(shape) if n > 1 and not any([c in stacked for c in leaves[d]])]
        # The output feature dimension; if this is not a kernel, an index past the last dimension.
        outputs = self.axes.kernels.get(leaves, 0) + len(shape)
        table, joined = self.axes.tables.get(leaves), self.roles.joined.dims.get(leaves, ())
        while free:
            for count in range(len(free), 0, -1):  # as many mesh axes as possible on one dimension
                shards = self.shard_count(free[:count])
                divisible = [d for d in shardable if local[d] % shards == 0]
                if divisible:
                    if apart:
                        divisible = [d for d in divisible if not spec[d]] or divisible
                    if table and table.is_stored_by_features(self._parts_of_batch, self.roles.exchange_weight(shards)):
                        divisible = [d for d in divisible if d - len(shape) not in table.indexed] or divisible
                    divisible = [d for d in divisible if d not in joined] or divisible
                    best = stored_dim(local, out, shardable, divisible, outputs, shards)
                    out[best] += free[:count]
                    local[best] //= shards
                    free = free[count:]
                    break
            else:
                free = free[1:]
        return tuple(map(tuple, out))

    @cached_property
    def _parts_of_batch(self) -> int:
        return math.prod(n for a, n in self.mesh.items() if self.roles.batch in self.table.get(a, ()))

    def _batch_is_sharded_apart(self, role: Role) -> bool:
        """Whether some mesh axis shards the batch, but not the stored inputs of this role."""
        stores = self.storage.get(role, ())
        over = [a for a, n in self.mesh.items() if n > 1 and a not in stores]
        return any(self.roles.batch in self.table.get(a, ()) for a in over)

    def gradient_spec(self, value: int) -> Spec | None:
        """The sharding of a gradient: that of the state which consumes it; None if that is stored as it is used."""
        if self._gradient_specs is None:
            self._gradient_specs = self._derive_gradient_specs()
            self._transposed = {tuple(sorted(leaves)): leaves for leaves in self._gradient_specs}
        if (source := spread_matrices_of(self.axes).sources.get(value)) is not None:
            return self.alias_spec(source, value)
        if value in self.roles.transposed_gradients:  # not by logical axes: another tensor may have these
            becomes, permutation = self.roles.transposed_gradients[value]
            spec = self.gradient_spec(becomes)
            return None if spec is None else tuple(spec[permutation.index(d)] for d in range(len(permutation)))
        leaves = self.axes.of_value[value]
        if (of_stages := self._gradient_spec_of_stages(leaves)) is not None:
            return of_stages
        replicas = self.roles.replicas
        if self.roles.separate_layers and replicas is not None and (replicas,) in leaves:  # summed apart for each
            at = leaves.index((replicas,))
            spec = self._gradient_specs.get((*leaves[:at], *leaves[at + 1 :]))
            of_groups = ((),) * at + self.spec_of(((replicas,),)) + ((),) * (len(leaves) - at - 1)
            return None if spec is None else exchanged_spec((*spec[:at], (), *spec[at:]), of_groups)
        if leaves in self._gradient_specs:
            return self._gradient_specs[leaves]
        state = self._transposed.get(tuple(sorted(leaves)))  # a contraction may return the gradient transposed
        if state is None or len(set(leaves)) < len(leaves):
            return None
        return tuple(self._gradient_specs[state][state.index(dim)] for dim in leaves)

    def _gradient_spec_of_stages(self, leaves: Leaves) -> Spec | None:
        """The sharding of the gradients of the layers of the stages; None for others."""
        stages = self.roles.stages
        at = next((n for n, dim in enumerate(leaves) if stages in dim), None)
        if stages is None or at is None:
            return None
        for first in range(at + 1, len(leaves)):
            spec, layer = None, leaves[first:]
            state = self._of_layers.get(tuple(sorted(layer)))
            if state is None or (state[0] != layer and len({*layer}) < len(layer)):
                continue
            spec = tuple(state[1][state[0].index(dim)] if state[0] != layer else state[1][n]
                         for n, dim in enumerate(layer))  # fmt: skip
            return exchanged_spec((*((),) * first, *spec), self.spec_of(leaves))
        return None

    @cached_property
    def _of_layers(self) -> dict[Leaves, tuple[Leaves, Spec]]:
        """The classes of one layer of the stages, sorted -> those classes in order, and how its state is stored."""
        found: dict[Leaves, tuple[Leaves, Spec]] = {}
        aliases, dims = self.axes.parameter_aliases, self.axes.layer_dims
        layers = {self.axes.of_value[aliases[v]]: layer for v, layer in dims.items() if v in aliases}
        assert self._gradient_specs is not None
        for whole, layer in layers.items():
            spec = self._gradient_specs.get(whole)
            if spec is not None:
                found[tuple(sorted(layer))] = layer, spec[len(spec) - len(layer) :]
        return found

    def _derive_gradient_specs(self) -> dict[Leaves, Spec]:
        """Logical axes of the dimensions of a gradient -> its sharding."""
        roles = {role for role in ("optimizer", "parameter") if self.storage.get(role)}
        specs: dict[Leaves, Spec] = {}
        slices: dict[tuple[Leaves, Spec], list[tuple[Leaves, Spec]]] = {}  # many inputs are alike
        for v in self.roles.inputs if self.fixed else typical_inputs(self.axes, self.roles):
            role = self.roles.inputs[v]
            if role not in roles and not (v in self.fixed and is_float(self.axes.program.avals[v])):
                continue
            stored = self.axes.of_value[v], self.stored_spec(v)
            if stored not in slices:
                slices[stored] = loop_slices(*stored, self.axes.stacked, self._leading)
            for key, slice_spec in slices[stored]:
                if role == "optimizer":  # the moments consume the gradient, and the parameter follows them
                    specs[key] = slice_spec
                else:
                    specs.setdefault(key, slice_spec)
        for v, source in self.roles.computed_weights.items():
            if self.roles.inputs[source] in roles or source in self.fixed:
                specs.setdefault(self.axes.of_value[v], self.alias_spec(source, v))
        return specs
