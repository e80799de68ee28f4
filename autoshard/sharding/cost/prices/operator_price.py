"""The price of one run of an operator: the time of its kernel, and the collectives that it needs.

    time_us = max(flops / (efficiency x peak x tiles), bytes / bandwidth) on one shard

`step_time` explains the terms. Decision points need the collectives of `operator_strategy.choose_strategy`. At other
operators, an activation is gathered over each mesh axis that no longer shards the same logical axis. The collective is
an all-to-all if the mesh axis then shards another logical axis of the same tensor. The same holds for stored operands
of operators that decode or reshape a weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.axes.weights.loop_sums import is_loop_term
from autoshard.sharding.cost.collectives import merged_reductions
from autoshard.sharding.cost.constants import ON_CHIP_SHARE
from autoshard.sharding.cost.equivalence_classes import Facts, OperatorClass, moves_operands
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.cost.gathers.rounded_operands import with_rounded_operands
from autoshard.sharding.cost.opaque_memory import OpaqueMemory, trace_opaque_memory
from autoshard.sharding.cost.prices.matrix_passes import fourier_work, precision_passes
from autoshard.sharding.cost.prices.price import Price
from autoshard.sharding.cost.tiles import filled_tile_fraction, is_depthwise, is_vector_product
from autoshard.sharding.layout.operator_sharding import strategy_for_specs
from autoshard.sharding.layout.operator_strategy import Move, OperatorStrategy, shard_types
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED
from autoshard.sharding.machines.kernel_time import declared_us
from autoshard.sharding.machines.on_chip_memory import array_bytes
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.flops import masked_groups, matmul_flops
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, CONVOLUTION, is_decision_point, is_declared
from autoshard.spmdrules.core.placement import Spec, bytes_sent_per_byte, shard_count
from autoshard.spmdrules.core.rule_builder import GROUPS
from autoshard.spmdrules.custom_ops.kernel_cost import declared_costs
from autoshard.spmdrules.custom_ops.sequence_forms import sequence_forms_of
from autoshard.spmdrules.ir.program import Op

_REDUCTIONS = ("reduce-scatter", "all-reduce")


@shown
class _Known(NamedTuple):
    """The facts about an operator on a machine that do not depend on its sharding.

    Attributes:
        is_decision_point: see `operator_kinds.is_decision_point`.
        is_declared: see `operator_kinds.is_declared`.
        busy_s: seconds that the whole operator keeps the matrix unit busy; 0 if it does not use it.
        tile: the size of the tiles of its product; 1 for other operators.
        masked: see `flops.masked_groups`.
        moves_operands: see `equivalence_classes.moves_operands`.
        fourier_us: microseconds of a whole Fourier transform on a TPU, without reading its operand and writing its
            result; 0 for other operators.
    """

    is_decision_point: bool
    is_declared: bool
    busy_s: float
    tile: int
    masked: tuple[int, int]
    moves_operands: bool
    fourier_us: float


class OperatorPrices:
    """Prices one run of the operators of a program on a machine.

    Args:
        axes: the logical axes of the program.
        roles: the roles of its inputs and axes.
        target: the machine.
        fusion: the program's kernels.
    """

    def __init__(self, axes: LogicalAxes, roles: Roles, target: Target, fusion: Fusion):
        self.axes, self.roles, self.target, self.fusion = axes, roles, target, fusion
        self._known: dict[Op, _Known] = {}

    def __call__(
        self, op_class: OperatorClass, mesh: Mapping[str, int], specs: Sequence[Spec], sequence: Mapping[str, str]
    ) -> Price:
        """Return the price of a class's operator.

        Args:
            op_class: the class, one of the program's.
            mesh: mesh axis -> size.
            specs: the shardings of its operands, of its results, and of what its kernel reads and writes.
            sequence: see `Layout.sequence`.
        """
        op, chip, facts = op_class.op, self.target.chip, op_class.facts(self.axes, self.roles, self.fusion)
        if op.results and all(0 in self.axes.program.avals[v].shape for v in op.results):
            return Price(0.0, ())  # XLA removes it: its results are empty
        known = self._known_of(op)
        count, arrays = len(op.operands), len(op.operands) + len(op.results)
        operands, results, memory = specs[:count], specs[count:arrays], specs[arrays:]
        if not known.is_decision_point:
            return Price(self._memory_us(facts, mesh, memory, {}), self.plain_moves(op, mesh, operands, results))
        strategy = strategy_for_specs(
            op, operands, results, facts.transfer_bytes, mesh, self.target.link_prices, sequence,
            is_loop_term(self.roles.loop_sums, op),
        )  # fmt: skip
        rule = strategy.rule(op)
        moves = strategy.moves if chip.keeps_reduce_scatters else merged_reductions(strategy.moves)
        if facts.rounded:
            moves = with_rounded_operands(moves, facts.rounded)
        if op.name == "gather" and self.target.platform == "tpu":
            moves = lookup_moves(moves, op.eqn.outvars[0].aval.shape, results[0], mesh)
        if strategy.form is not None:
            costs, share = strategy.form.cost.kernels, strategy.form.cost.hidden_share
            time = sum(declared_us(cost, chip) for cost in costs)
            return Price(time, moves, max(cost.held_bytes for cost in costs), share * time)
        if known.is_declared and (costs := declared_costs(op.eqn, shard_types(op, rule, strategy, mesh))):
            time = sum(declared_us(cost, chip) for cost in costs)
            return Price(time, moves, max(cost.held_bytes for cost in costs))
        opaque = self._opaque_memory(op, strategy, mesh) if known.is_declared else None
        if opaque:
            time = opaque.moved_bytes / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
            time += sum(declared_us(cost, chip) for cost in opaque.costs)
        else:
            dims_of = zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True)
            time = self._memory_us(facts, mesh, memory, {v: strategy.spec(dims) for v, dims in dims_of})
        if known.busy_s:
            shards = math.prod([mesh[a] for a, f in strategy.factors.items() if f is not None])
            if known.tile > 1:
                shards *= filled_tile_fraction(rule, strategy, mesh, known.tile, op.name == CONVOLUTION)
            time = max(time, known.busy_s / shards * 1e6)
        if known.fourier_us:
            time += known.fourier_us / math.prod([mesh[a] for a, f in strategy.factors.items() if f is not None])
        if facts.absorbed:
            time += self._reductions_apart_us(facts.absorbed, moves, strategy.spec(rule.results[0]), mesh)
        copied = self._masked_copies(op, known.masked, strategy, mesh)
        time += self._masked_rows_us(op, facts, moves)
        time += 2 * copied / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6  # written and read
        return Price(time, moves, opaque.peak_bytes if opaque else copied, inside=opaque)

    def least_us(self, op_class: OperatorClass, devices: int) -> float:
        """Return the least microseconds of one run of a class's kernel under any layout.

        Its work is divided over all devices. Declared operators state the cost of a shard, so they count as 0. An
        exception is attention that can run over a sharded sequence: sharding does not reduce its total work.
        """
        op = op_class.op
        known, facts = self._known_of(op), op_class.facts(self.axes, self.roles, self.fusion)
        if known.is_declared:
            types = [v.aval for v in op.eqn.invars]
            costs = declared_costs(op.eqn, types) if sequence_forms_of(op.eqn.params, types) is not None else ()
            return sum(declared_us(cost, self.target.chip) for cost in costs) / devices
        shards = [(whole / devices * narrow, on_chip) for _, whole, narrow, on_chip in facts.memory]
        return max(self._transfer_us(shards), known.busy_s / devices * 1e6) + known.fourier_us / devices

    def _known_of(self, op: Op) -> _Known:
        if op not in self._known:
            self._known[op] = self._find_out(op)
        return self._known[op]

    def _find_out(self, op: Op) -> _Known:
        chip, is_product, on_tpu = self.target.chip, op.name in CONTRACTIONS, self.target.platform == "tpu"
        flops_by_type = matmul_flops(op, self.target.platform)
        rule = op.rule if is_product and chip.tile > 1 else None
        # GPUs have no figure for their vector units, so that only the bytes of such a product count there.
        on_vectors = rule is not None and (is_depthwise if op.name == CONVOLUTION else is_vector_product)(rule)
        busy_s = sum(
            flops / ((chip.vector_ops or math.inf) if on_vectors else chip.reached(size, integer=integer))
            for (size, integer), flops in flops_by_type.items()
        )
        fourier_us = 0.0
        if on_tpu and (work := fourier_work(op)) is not None:
            moved_s = work.moved_bytes / (chip.memory_bandwidth * BANDWIDTH_REACHED)
            fourier_us = (work.flops / chip.reached(2) + moved_s) * 1e6
        return _Known(
            is_decision_point(op),
            is_declared(op),
            busy_s * (precision_passes(op) if on_tpu else 1),
            chip.tile if is_product and not on_vectors else 1,
            masked_groups(op, self.target.platform),
            moves_operands(op, self.axes, self.roles),
            fourier_us,
        )

    def _masked_copies(
        self, op: Op, masked: tuple[int, int], strategy: OperatorStrategy, mesh: Mapping[str, int]
    ) -> float:
        """Return the bytes of the masked copies that XLA stores for a grouped product on one shard."""
        groups, operands = masked
        if not operands:
            return 0.0
        own = groups / math.prod(mesh[a] for a, f in strategy.factors.items() if f == GROUPS)
        return own * sum(nbytes(x) for x in shard_types(op, strategy.rule(op), strategy, mesh)[:operands])

    def _masked_rows_us(self, op: Op, facts: Facts, moves: Sequence[Move]) -> float:
        """Return the microseconds in which XLA:TPU zeros the rows that a shard of a table looked up in vain.

        Each device looks up all rows, of which its shard has some. Before the sum over the shards, a kernel of its own
        reads and writes them: on TPU a lookup is not fused with others (libtpu 0.0.42.1, v5e).
        """
        if op.name != "gather" or self.target.platform != "tpu":
            return 0.0
        looked_up = max((m.local_bytes for m in moves if m.array < 0 and m.kind in _REDUCTIONS), default=0.0)
        on_chip = max((share for v, _, _, share in facts.memory if v == op.results[0]), default=0.0)
        return self._transfer_us([(looked_up, on_chip)] * 2)

    def _reductions_apart_us(
        self, absorbed: tuple[float, int, float], moves: Sequence[Move], spec: Spec, mesh: Mapping[str, int]
    ) -> float:
        """Return the microseconds for the memory traffic of reductions that a product's kernel cannot absorb.

        If the product's result is partial, it is summed over devices before it is reduced. So the reductions are
        kernels of their own, which read the sum from memory. If the result is not partial, this is 0.
        """
        size, times, on_chip = absorbed
        sums = [m for m in moves if m.array < 0 and m.kind in _REDUCTIONS]
        if not sums:
            return 0.0
        scattered = [mesh[axis] for m in sums if m.kind == "reduce-scatter" for axis in m.axes]
        return self._transfer_us([(size / shard_count(spec, mesh) / math.prod(scattered), on_chip)] * times)

    def _opaque_memory(self, op: Op, strategy: OperatorStrategy, mesh: Mapping[str, int]) -> OpaqueMemory | None:
        """Return the memory of a declared operator on one shard."""
        shapes = tuple((x.shape, x.dtype) for x in shard_types(op, strategy.rule(op), strategy, mesh))
        return trace_opaque_memory(op.eqn.params["fn"], shapes, self.target.platform)

    def _memory_us(
        self, facts: Facts, mesh: Mapping[str, int], memory: Sequence[Spec], resharded: Mapping[int, Spec]
    ) -> float:
        """Return the microseconds of a kernel's reads and writes.

        Args:
            facts: the facts about the kernel.
            mesh: mesh axis -> size.
            memory: the specs of the values that it reads and writes.
            resharded: value -> its spec at the operator, if that differs from the one in `memory`.
        """
        shards = [
            (whole / shard_count(resharded.get(v, spec), mesh) * narrow, on_chip)
            for (v, whole, narrow, on_chip), spec in zip(facts.memory, memory, strict=True)
        ]
        return self._transfer_us(shards)

    def _transfer_us(self, shards: Sequence[tuple[float, float]]) -> float:
        """Return the microseconds in which these shards, as (bytes, `Fusion.on_chip`), are read or written."""
        on_chip_bytes = array_bytes(self.target.chip) * ON_CHIP_SHARE
        total = sum([size for size, on_chip in shards if size > on_chip_bytes * on_chip])
        return total / (self.target.chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6

    def plain_moves(
        self, op: Op, mesh: Mapping[str, int], specs: Sequence[Spec], result_specs: Sequence[Spec]
    ) -> tuple[Move, ...]:
        """Return the reshards of activations and weights at an operator that is not a decision point.

        Args:
            op: the operator.
            mesh: mesh axis -> size.
            specs: the shardings of its operands.
            result_specs: the wanted shardings of its results.
        """
        if not self._known_of(op).moves_operands:
            return ()
        moves: list[Move] = []
        after = self._classes_of_axis(mesh, op.results[0], result_specs[0])
        for i, (v, spec) in enumerate(zip(op.operands, specs, strict=True)):
            if v < 0 or not spec:
                continue
            local = nbytes(self.axes.program.avals[v]) / shard_count(spec, mesh)
            own = {c for dim in self.axes.of_value[v] for c in dim}
            for axis, classes in self._classes_of_axis(mesh, v, spec).items():
                n, to = mesh[axis], after.get(axis, ())
                if own.issuperset(classes) and {*classes}.isdisjoint(to):
                    kind = "all-to-all" if not own.isdisjoint(to) else "all-gather"
                    moves.append(Move(kind, (axis,), i, local, local * bytes_sent_per_byte(kind, n)))
        return tuple(moves)

    def _classes_of_axis(self, mesh: Mapping[str, int], value: int, spec: Spec) -> dict[str, tuple[int, ...]]:
        """Return the logical axes that each mesh axis of a spec may shard.

        There are several only for a merged dimension whose elements may be in any order: the mesh axis may shard any of
        its parts. A reshape moves nothing if a mesh axis may shard the same logical axis before and after it.
        """
        found: dict[str, tuple[int, ...]] = {}
        for dim, axes in zip(self.axes.of_value[value], spec, strict=True):
            if dim in self.axes.unordered:
                found |= dict.fromkeys(axes, dim)
                continue
            parts = list(dim)
            room = [self.axes.sizes[c] for c in dim]
            for axis in axes:
                while len(parts) > 1 and room[0] == 1:
                    del parts[0], room[0]
                if parts:
                    found[axis] = (parts[0],)
                    room[0] = max(room[0] // mesh[axis], 1)
        return found


def lookup_moves(moves: Sequence[Move], shape: Sequence[int], want: Spec, mesh: Mapping[str, int]) -> tuple[Move, ...]:
    """Return the moves of a lookup in a sharded table as XLA:TPU emits them.

    It reduce-scatters along the first dimension only. A product is computed in the order of dimensions that this needs,
    but rows are looked up in the order of the program. If they are scattered behind a dimension of several tables, they
    are all-reduced (libtpu 0.0.42.1, v5e: `[rows, size]` is reduce-scattered, `[tables, rows, size]` is not).

    Args:
        moves: the moves of the strategy.
        shape: the shape of the result.
        want: its wanted sharding.
        mesh: mesh axis -> size.
    """
    local = [n // shard_count((axes,), mesh) for n, axes in zip(shape, want, strict=True)]
    first = {axis for d, axes in enumerate(want) if all(n == 1 for n in local[:d]) for axis in axes}
    return tuple(
        m._replace(kind="all-reduce", wire_bytes=2 * m.wire_bytes)
        if m.kind == "reduce-scatter" and not first.issuperset(m.axes)
        else m
        for m in moves
    )
