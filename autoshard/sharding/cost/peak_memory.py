"""The bytes that one device holds at the peak of a step.

    peak_bytes = bytes of state and data + max over the program's points of the bytes of the live values
               = bytes of state and data + size of the heap of live values, on TPUs (`heap`)

A value is live from the operator that makes it to the last one that takes it. A value from outside of a loop that is
used inside it is live until the loop ends. Values that XLA computes inside their users are never written (`fusion`);
their operands stay live instead. Only one shard of a value counts. A result that will be scattered counts while its
operator runs. A gathered value is kept from the first operator that needs it to the last. Donated state and the carry
of a loop are updated in place, its initial value too if only the loop takes it. On a TPU, slices that a loop copies
from the host are there early (`delays.host_fetches`). Some values share the buffer of another one (`reused_buffers`),
and values that XLA merges with equal ones are kept once (`ir.merged_recomputation`). On GPUs some products run later
than the program says (`delays`), and stacks of parameters have a transposed copy (`gathers.transposed_stacks`). On
TPUs, parameters that are gathered after their update are held until the end (`gathers.gathered_updates`), and gathered
nodes of a graph stay whole (`gathers.whole_rows`). Values in host memory take no memory of the device (`host_bytes`);
there, a loop moves each slice of a stack straight into the stack or out of it. Arrays that the function closes over are
constants, which every device holds whole. On a TPU an activation is stored in tiles of 128 elements along one of its
dimensions, the one with the least padding; an operand of a product, along none of the product's batch; the result of a
declared operator, along its last one (`tiles`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import numpy as np

from autoshard import _compat
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.cost.delays.delayed_gradients import last_operator, points
from autoshard.sharding.cost.delays.host_fetches import fetch_buffers
from autoshard.sharding.cost.equivalence_classes import ValueClasses, distinctly_fixed, value_classes
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.cost.gathers.cast_lookups import cast_lookups
from autoshard.sharding.cost.gathers.gathered_updates import gathered_updates, updates
from autoshard.sharding.cost.gathers.transposed_stacks import stack_uses, transposed_stacks
from autoshard.sharding.cost.gathers.whole_rows import kept_whole, rows_of_gathers
from autoshard.sharding.cost.heap import first_stacks, heap_bytes
from autoshard.sharding.cost.reused_buffers import cast_stacks, overwritten, parts_of_stacks, scattered_into_sums
from autoshard.sharding.cost.tiles import batches_of_products, row_major_values, row_padding, tile_padding
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import spec_function
from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.machines.constants import TPU_LANES
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.core.placement import Spec, axes_of, shard_count
from autoshard.spmdrules.families.weight_gathers import before_loop_p
from autoshard.spmdrules.ir.merged_recomputation import merged_values
from autoshard.spmdrules.ir.program import Block, Op, Program, inlined


class MemoryModel:
    """Estimates the memory of layouts of one program. The live ranges are found once."""

    def __init__(
        self,
        axes: LogicalAxes,
        roles: Roles,
        fusion: Fusion,
        state: Sequence[tuple[int, int]] = (),
        *,
        chip: Chip,
    ):
        self.axes, self.roles = axes, roles
        self.is_tiled, self.on_gpu = chip.platform == "tpu", chip.platform == "cuda"
        program = axes.program
        n = len(program.avals)
        self.written = np.zeros(n, bool)  # whether a value has a buffer of its own
        # The place of each operator in the order in which they run, by its number, and by its `id`.
        self.time = points(program, self._is_delayed if self.on_gpu else None)
        self.point = dict(zip(map(id, program.ops()), self.time.tolist(), strict=True))
        self.points = len(self.time) - 1
        self.constant_bytes = float(sum(x.nbytes for x in program.constants()))
        self.written[list(fusion.written - scattered_into_sums(program, fusion.written))] = True
        self.carried: list[int] = []  # values in a loop that share the buffer of its operand or result
        self.slices: set[int] = set()  # values in a loop that are one iteration's slice of a stack outside of it
        self.merged = merged_values(program)
        birth, death = [-1] * n, [-1] * n  # lists: single elements of arrays are slow
        self._scan(program.block, self.written.tolist(), birth, death)
        # Value -> when it is made, as a place in the order of operators; -1 for inputs.
        self.birth = np.array(birth, int)
        self.death = np.array(death, int)  # value -> when it is taken last
        for v, kept in self.merged.items():
            self.written[kept] |= self.written[v]
        self.written[list(self.merged)] = False
        self.on_host = np.array([_compat.is_on_host(a) for a in program.avals], bool)
        self.narrow = fusion.narrow | cast_lookups(program) if self.is_tiled else fusion.narrow
        self.whole = self._whole()
        self.written[list(parts_of_stacks(program, fuses_operands=self.is_tiled))] = False
        inputs = set(program.inputs)
        for out in set(program.outputs) - inputs:
            self.written[out] = True
            self.death[out] = self.points
        for _, out in state:
            self.written[out] = out in inputs  # donated: written over the input
        self.written_over: dict[int, int] = {}  # value -> the value that is written into its buffer later
        self._hand_over_carries(program)
        stacks, before = first_stacks(program, roles, fusion) if self.is_tiled else ([], None)
        self.birth[stacks] = self.point[id(before)] if before is not None else 0
        self.gathered_inputs = {
            op.results[0]: op.operands[0]
            for op in program.ops() if op.name == before_loop_p.name and op.operands[0] in inputs
        }  # fmt: skip
        self.held_throughout = np.zeros(n, bool)
        self.held_throughout[list(inputs)] = True
        self.written[self.carried] = False
        self.keep = temporaries = np.flatnonzero(self.written & (self.birth >= 0) & ~self.held_throughout)
        self._free_overwritten(program, fusion)
        self.sized = [*program.inputs, *temporaries.tolist()]
        self.of_role = {
            role: np.array([v for v in program.inputs if roles.inputs[v] == role], int)
            for role in ("parameter", "optimizer", "data", "other")
        }
        of_parameters = {v: s for v, s in axes.parameter_aliases.items() if roles.inputs.get(s) == "parameter"}
        self.stack_uses = stack_uses(program, of_parameters) if self.on_gpu else {}
        self.updates = updates(program, dict(state)) if self.is_tiled else {}
        self.rows = rows_of_gathers(program, roles, self.written.__getitem__) if self.is_tiled else {}
        casts = cast_stacks(program, of_parameters) if self.is_tiled else {}
        # Parameter -> fraction of its bytes, and the points between which there is a copy in a narrower type.
        self.casts = {
            v: (ratio, self.point[id(a)], self.point[id(last_operator(b))]) for v, (ratio, a, b) in casts.items()
        }
        # Buffers of slices that loops copy from the host, as (value of that size, first point, last point).
        of_place = self.point, birth, self.written.__getitem__
        self.fetched = fetch_buffers(program, chip, *of_place) if self.is_tiled else []
        # Value -> the dimensions along which it can have tiles. Values without an entry can have tiles along all.
        self.tiled = self._tiled_dims(program, temporaries.tolist()) if self.is_tiled else {}
        self.placed, self.freed = self._shared_places() if self.is_tiled else (self.keep, self.death)
        self._classes: dict[frozenset[int], ValueClasses] = {}
        self._spec_functions: dict[int, Callable[[Layout, int], Spec]] = {}
        self._alike: dict[int, list[tuple[tuple[int, ...], np.ndarray]]] = {}  # by the `id` of the classes

    def _tiled_dims(self, program: Program, values: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the dimensions along which values can have tiles, except for values that can have them along all."""
        row_major, written = row_major_values(program), {*np.flatnonzero(self.written).tolist()}
        batches, found = batches_of_products(program, written), {}
        for v in values:
            dims = range(len(program.avals[v].shape))
            if dims and v in row_major:
                found[v] = (dims[-1],)
            elif v in batches and self.roles.have_rows(self.axes.of_value[v]):
                found[v] = tuple(d for d in dims if d not in batches[v])
        return found

    def _free_overwritten(self, program: Program, fusion: Fusion) -> None:
        """End the lives of values over which a result is written before the operator that writes it."""
        own = set(self.keep.tolist())

        def is_last(value: int, op: Op) -> bool:
            return value in own and self.death[value] == self.point[id(op)] > self.birth[value]

        def is_alike(one: int, other: int) -> bool:
            same = self.whole[one] == self.whole[other] and other in own
            return same and self.axes.of_value[one] == self.axes.of_value[other]

        found, early = overwritten(program, fusion, is_last, is_alike, on_gpu=self.on_gpu, on_tpu=self.is_tiled)
        for v, (op, result) in found.items():
            self.death[v], self.written_over[v] = self.point[id(op)] - 1, result
        for v, op in early.items():
            self.birth[v] = min(self.birth[v], self.point[id(op)])

    def _shared_places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the values that get a place of their own in the heap, and for each value, when its place is free.

        A value that is written over another one with the same tiles has the same place, so nothing comes in between.
        """
        own, freed, inside = {*self.keep.tolist()}, self.death.copy(), set[int]()
        for v, result in sorted(self.written_over.items(), key=lambda pair: -self.birth[pair[0]]):
            alike = v in own and result in own and self.tiled.get(v) == self.tiled.get(result)
            if alike and self.birth[v] < self.birth[result] and result not in inside:
                inside.add(result)
                freed[v] = freed[result]
        return np.array([v for v in self.keep.tolist() if v not in inside], int), freed

    def _hand_over_carries(self, program: Program) -> None:
        """End the life of an initial carry before its loop, if nothing else takes it: the loop writes over it."""
        for op in program.ops():
            if op.name != "scan":
                continue
            start, end = self.point[id(op)], self.point[id(last_operator(op))]
            n_consts, n_carry = _compat.scan_arity(op.eqn.params)
            for v, result in zip(op.operands[n_consts:], op.results[:n_carry], strict=False):
                if v >= 0 and op.operands.count(v) == 1 and 0 <= self.birth[v] < start and self.death[v] == end:
                    self.death[v], self.written_over[v] = start - 1, result

    def resized(self, axes: LogicalAxes) -> MemoryModel:
        """Return this model for the same operators with logical axes of other sizes (`padding.with_axis_size`)."""
        resized = copy(self)
        resized.axes = axes
        resized.whole = resized._whole()
        return resized

    def _whole(self) -> np.ndarray:
        """Return the bytes of each value before sharding."""
        whole = np.array([nbytes(a) for a in self.axes.program.avals], float)
        for v, fraction in self.narrow.items():
            whole[v] *= fraction
        return whole

    def _is_delayed(self, op: Op) -> bool:
        """Whether an operator is a product that sums over the batch, such as the gradient of a parameter."""
        have_rows, of_value = self.roles.have_rows, self.axes.of_value
        if op.name not in CONTRACTIONS or have_rows(of_value[op.results[0]]):
            return False
        return all(v >= 0 and have_rows(of_value[v]) for v in op.operands[:2])

    def _scan(self, block: Block, written: Sequence[bool], birth: list[int], death: list[int]) -> int:
        """Find the live ranges of the values of a block, and set `birth` and `death`.

        Returns when the last operator of the block runs.
        """
        ops, end_of_block = list(inlined(block)), -1
        for op in ops:
            start = end = self.point[id(op)]
            if self.merged and op.results and self.merged.keys() >= {*op.results}:
                continue
            for inner in op.blocks:
                for v in inner.inputs:
                    if birth[v] < 0:
                        birth[v] = end
                end = max(end, self._scan(inner, written, birth, death))
                for v in inner.outputs:
                    death[v] = max(death[v], end)
            if op.edges:
                in_place = {v for tie in op.edges if not tie.stacked for v in (tie.inner, tie.outer)}
                in_place -= {*op.operands, *op.results}
                slices = {tie.inner for tie in op.edges if tie.stacked}
                self.slices |= slices
                if op.name == "scan" and op.eqn.params["length"] == 1:  # not compiled as a loop: the stack is its slice
                    in_place |= slices
                self.carried += [v for v in sorted(in_place) if birth[v] >= start]
            for v in self._taken(op):
                death[v] = max(death[v], end)
            for v in op.results:
                if birth[v] < 0:
                    birth[v] = start
                death[v] = max(death[v], end)
            end_of_block = max(end_of_block, end)
        for op in reversed(ops):  # a value that is computed inside its users keeps its operands alive until then
            if not op.blocks and not any([written[v] for v in op.results]):
                last = max([death[v] for v in op.results], default=-1)
                for v in self._taken(op):
                    death[v] = max(death[v], last)
        return end_of_block

    def _taken(self, op: Op) -> list[int]:
        """Return the values that an operator takes; of merged ones, those that are kept."""
        if not self.merged:
            return [v for v in op.operands if v >= 0]
        return [self.merged.get(v, v) for v in op.operands if v >= 0]

    def __call__(self, layout: Layout, buffers: Sequence[LiveBuffers] = ()) -> tuple[float, dict[str, float]]:
        """Return the peak bytes on one device, in total and by kind.

        The kinds are `parameter`, `optimizer`, `data`, `other`, `temporary`, and `constant` if there are constants.

        Args:
            layout: the layout.
            buffers: the live buffers of collectives and opaque operators.
        """
        local = np.where(self.on_host, 0.0, self._local(layout))
        parts = {role: float(local[values].sum()) for role, values in self.of_role.items()}
        if self.constant_bytes:
            parts["constant"] = self.constant_bytes
        spans = self._spans(local, self._buffers(layout, buffers))
        placed = heap_bytes(*(each.tolist() for each in spans)) if self.is_tiled else self._live(*spans[:3]).max()
        parts["temporary"] = float(placed) + sum(
            float(self.whole[v]) / layout.shard_count(axes_of(layout.spec(v)))
            for v in layout.inputs_gathered_before_loops
        )
        return sum(parts.values()), parts

    def host_bytes(self, layout: Layout) -> float:
        """Return the peak bytes in host memory that belong to one device: its shards of inputs and of live values."""
        if not self.on_host.any():
            return 0.0
        local = np.where(self.on_host, self._local(layout), 0.0)
        local[list(self.slices)] = 0.0
        return float(local[list(self.axes.program.inputs)].sum() + self._live(*self._spans(local)[:3]).max())

    def at_peak(self, layout: Layout, buffers: Sequence[LiveBuffers] = ()) -> list[tuple[int, float]]:
        """Return the temporaries at the peak, the largest first, as (value, bytes on one device)."""
        local = np.where(self.on_host, 0.0, self._local(layout))
        peak = int(self._live(*self._spans(local, self._buffers(layout, buffers))[:3]).argmax())
        live = [v for v in self.keep.tolist() if self.birth[v] <= peak <= self.death[v]]
        return sorted(((v, float(local[v])) for v in live), key=lambda item: -item[1])

    def kinds_at_peak(self, layout: Layout, buffers: Sequence[LiveBuffers] = ()) -> dict[str, float]:
        """Return the bytes of temporaries at the peak on one device, by kind. Their sum is `temporary` of a call.

        Returns:
            `activation`: values with the batch, in use or kept for the backward pass; `gradient`: sums over the batch;
            `temporary`: the rest, such as gathered or cast parameters and sums that are still to be scattered.
        """
        found = {"activation": 0.0, "gradient": 0.0}
        for v, size in self.at_peak(layout, buffers):
            if self.roles.have_rows(self.axes.of_value[v]):
                found["activation"] += size
            elif v in self.roles.gradients:
                found["gradient"] += size
        total = self(layout, buffers)[1]["temporary"]
        return found | {"temporary": max(total - sum(found.values()), 0.0)}

    def _local(self, layout: Layout) -> np.ndarray:
        """Return the bytes of each value on one device."""
        classes = self.classes_of(layout)
        fractions = np.array([self._fraction(layout, v) for v in classes.examples])
        local = np.zeros_like(self.whole)
        local[classes.values] = self.whole[classes.values] * fractions[classes.numbers]
        for dims, values in self._alike_of(classes):
            local[values] = self.whole[values] * self._fraction(layout, int(values[0]), dims)
        for v, source in self.gathered_inputs.items():
            if layout.stored_spec(source) == layout.spec(v):  # nothing is gathered
                local[v] = 0.0
        return local

    def _alike_of(self, classes: ValueClasses) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Group the values of `tiled` that take equal memory in every layout: (dimensions with tiles, values)."""
        found = self._alike.get(id(classes))
        if found is None:
            numbers = dict(zip(classes.values.tolist(), classes.numbers.tolist(), strict=True))
            alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
            for v, dims in self.tiled.items():
                alike.setdefault((numbers[v], dims), []).append(v)
            found = self._alike[id(classes)] = [(dims, np.array(values)) for (_, dims), values in alike.items()]
        return found

    def _spec_function(self, value: int) -> Callable[[Layout, int], Spec]:
        if value not in self._spec_functions:
            self._spec_functions[value] = spec_function(self.axes, self.roles, value)
        return self._spec_functions[value]

    def _fraction(self, layout: Layout, value: int, tiled: Sequence[int] | None = None) -> float:
        """Return the bytes of a value on one device as a fraction of the whole, with padding.

        Args:
            layout: the layout.
            value: the value.
            tiled: the dimensions that can have tiles. Default: all, if the value has the batch.
        """
        spec, shape = self._spec_function(value)(layout, value), self.axes.program.avals[value].shape
        fraction = 1 / shard_count(spec, layout.mesh)
        if not self.is_tiled or (tiled is None and not self.roles.have_rows(self.axes.of_value[value])):
            return fraction  # XLA may merge the dimensions of weights
        if tiled is not None:
            return fraction * tile_padding([shape[d] // layout.shard_count(spec[d]) for d in tiled])
        if any(not axes and n % TPU_LANES == 0 for n, axes in zip(shape, spec, strict=True)):
            return fraction
        local = [n // layout.shard_count(axes) for n, axes in zip(shape, spec, strict=True)]
        return fraction * min((row_padding(n) for n in local if n), default=1.0)

    def classes_of(self, layout: Layout) -> ValueClasses:
        """Return the classes of the values in `sized`."""
        distinct = distinctly_fixed(self.axes, self.roles, layout.fixed)
        if distinct not in self._classes:
            self._classes[distinct] = value_classes(self.axes, self.roles, self.sized, distinct)
        return self._classes[distinct]

    def _buffers(self, layout: Layout, others: Sequence[LiveBuffers]) -> list[LiveBuffers]:
        """Return these buffers, and those that the layout needs outside of operators."""
        stacks = transposed_stacks(layout, self.stack_uses)
        return [*kept_whole(others, self.rows), *stacks, *gathered_updates(layout, self.updates, self.points)]

    def _spans(self, local: np.ndarray, buffers: Sequence[LiveBuffers] = ()) -> tuple[np.ndarray, ...]:
        """Return the first and last points of all temporaries, their bytes, and whether they are divided.

        Of those that begin at the same point, gathered operands come first, then the largest values.
        """
        values = self.placed[np.argsort(-local[self.placed], kind="stable")]
        found = [(self.birth[values], self.freed[values], local[values])]
        if self.fetched:
            some, begins, ends = map(np.array, zip(*self.fetched, strict=True))
            found.append((begins, ends, local[some]))
        if self.casts:
            begins, ends = np.array([points for _, *points in self.casts.values()]).T
            found.append((begins, ends, np.array([local[v] * ratio for v, (ratio, *_) in self.casts.items()])))
        gathered, inside = list[tuple[np.ndarray, ...]](), list[tuple[np.ndarray, ...]]()
        for each in buffers:
            if each.nbytes:
                one, other, size = self.time[each.first], self.time[each.last], np.full(len(each.first), each.nbytes)
                some = inside if each.is_divided else gathered
                some.append((np.minimum(one, other), np.maximum(one, other), size))
        first, last, sizes = map(np.concatenate, zip(*gathered, *found, *inside, strict=True))
        return first, last, sizes, np.arange(len(first)) >= len(first) - sum(len(size) for *_, size in inside)

    def _live(self, first: np.ndarray, last: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the bytes of these temporaries at each point of the program."""
        change = np.zeros(self.points + 2)
        np.add.at(change, first, sizes)
        np.subtract.at(change, last + 1, sizes)
        return np.cumsum(change)
