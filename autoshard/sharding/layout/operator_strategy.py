"""The strategy of one operator: the factor that each mesh axis shards.

It depends on the shardings of the operands and on the wanted shardings of the results. Each mesh axis shards one of the
operator's factors or none; with none, all devices along it repeat the work. A choice costs

    cost  = price of all collectives from the operands' shardings to those that the choice needs
          + price of all collectives from the shardings of the choice's results to the wanted ones
          + repeated FLOPs / flops_per_byte        if the mesh axis shards no factor

The price of a collective is its bytes, those of `spmdrules.core.placement`, times the weight of its kind on the machine
(`machines.link_prices`); taking a shard of a replicated array costs nothing. `flops_per_byte` is the number of FLOPs
that the machine computes while one byte crosses a link. The first factor wins ties, so that every process makes the
same choice. If several mesh axes shard one factor, `axis_order` puts them in the order that needs the fewest permutes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import jax

from autoshard._shown import shown
from autoshard.sharding.layout.axis_order import order_axes
from autoshard.sharding.layout.constants import STRATEGY_TIE
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.spmdrules.core.factor_projection import project
from autoshard.spmdrules.core.placement import Spec, axes_of, bytes_sent_per_byte, shard_count
from autoshard.spmdrules.core.reshard_path import all_to_alls, minor_to
from autoshard.spmdrules.core.rule import POSITIONS, Dims, Rule
from autoshard.spmdrules.custom_ops.sequence_forms import SequenceCost, SequenceForm
from autoshard.spmdrules.ir.program import Op

MoveKind = Literal["all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute"]


@shown
class Move(NamedTuple):
    """One collective that an operator needs. A search makes many; a named tuple is made faster than a dataclass.

    Attributes:
        kind: the kind of collective.
        axes: the mesh axes that it runs over.
        array: what it moves: operand 0, 1, ... or, as -1, -2, ..., result 0, 1, ...
        local_bytes: bytes of the array on each device before.
        wire_bytes: bytes that each device sends.
        hops: on a ring, the number of transfers of `local_bytes` to the next device, beside the operator's own compute;
            0 for any other collective.
    """

    kind: MoveKind
    axes: tuple[str, ...]
    array: int
    local_bytes: float
    wire_bytes: float
    hops: int = 0


@shown
@dataclass(frozen=True)
class SequencePlan:
    """Attention over a sharded sequence, in a form that it declares.

    Attributes:
        form: what a shard runs, and its cost.
        rule: the rule of the form. On a ring, keys are sharded as queries are.
        axes: the mesh axes of the sequence, major to minor.
        cost: the cost of one run on one device.
    """

    form: SequenceForm
    rule: Rule
    axes: tuple[str, ...]
    cost: SequenceCost


@shown
@dataclass(frozen=True)
class OperatorStrategy:
    """How an operator is sharded.

    Attributes:
        factors: the factor that each mesh axis shards, or None. Of several axes that shard one factor, the first one
            is the major one.
        moves: the collectives that this needs.
        form: the form of attention over a sharded sequence: on a ring, or with balanced work; None for the rule's own.
    """

    factors: Mapping[str, str | None]
    moves: tuple[Move, ...]
    form: SequencePlan | None = None

    def rule(self, op: Op) -> Rule:
        """The rule by which the operator is sharded."""
        assert op.rule is not None
        return op.rule if self.form is None else self.form.rule

    def spec(self, dims: Dims) -> Spec:
        """The sharding under this strategy of an operand or result with these factors per dimension."""
        sharding = self.factors.items()
        return tuple([tuple([a for f in dim for a, g in sharding if g == f]) if dim else () for dim in dims])


@shown
@dataclass(frozen=True)
class OperandSpecs:
    """The operands of an operator, or its results: their factors, unsharded bytes and specs."""

    dims: Sequence[Dims]
    nbytes: Sequence[float]
    specs: Sequence[Spec]
    rule: Rule
    mesh: Mapping[str, int]

    @cached_property
    def factors_of_axes(self) -> list[dict[str, str]]:
        """For each array: mesh axis -> the factor that it shards, "" if it shards no factor evenly."""
        return [
            dict.fromkeys(axes_of(spec), "") | project(self.rule, dims, spec, self.mesh)
            for dims, spec in zip(self.dims, self.specs, strict=True)
        ]

    @cached_property
    def arrays(self) -> list[tuple[int, frozenset[str], float, tuple[str, ...], dict[str, str]]]:
        """All arrays, as (number, factors, bytes, mesh axes of the spec, `factors_of_axes`)."""
        return [
            (i, frozenset(f for dim in dims for f in dim), size, tuple(axes_of(spec)), of_axes)
            for i, (dims, size, spec, of_axes) in enumerate(
                zip(self.dims, self.nbytes, self.specs, self.factors_of_axes, strict=True)
            )
        ]

    @cached_property
    def sharded(self) -> list[tuple[int, frozenset[str], float, dict[str, str]]]:
        """The arrays that are sharded, as (number, factors, bytes of one device's shard, `factors_of_axes`)."""
        return [
            (i, own, size / math.prod([self.mesh[a] for a in axes]), of_axes)
            for i, own, size, axes, of_axes in self.arrays
            if axes
        ]


def shard_types(op: Op, rule: Rule, strategy: OperatorStrategy, mesh: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
    """Shape and dtype of each operand on one shard, by a rule of the operator."""
    return [
        jax.ShapeDtypeStruct(
            tuple(n // shard_count((axes,), mesh) for n, axes in zip(v.aval.shape, strategy.spec(dims), strict=True)),
            v.aval.dtype,
        )
        for v, dims in zip(op.eqn.invars, rule.operands, strict=True)
    ]


def choose_strategy(
    rule: Rule,
    operands: OperandSpecs,
    results: OperandSpecs,
    mesh: Mapping[str, int],
    flops: float,
    prices: LinkPrices,
    forced: Mapping[str, Sequence[str | None]] | None = None,
) -> OperatorStrategy:
    """Choose the cheapest factor for each mesh axis, one mesh axis at a time, in mesh order.

    Args:
        rule: the operator's rule.
        operands: its operands, with their shardings.
        results: its results, with their wanted shardings.
        mesh: mesh axis -> size.
        flops: FLOPs of the unsharded operator.
        prices: what bytes cost on the links of the machine.
        forced: mesh axis -> the only factors that it may shard, if it shards any array here and one of them divides;
            None for no factor. These mesh axes come last, minor ones first, so they shard what others leave.
    """
    forced = forced or {}
    factors_of_axes = [*operands.factors_of_axes, *results.factors_of_axes]
    chosen: dict[str, str | None] = {}
    shards: dict[str, int] = {}
    moves: list[Move] | None = None  # those of the last choice
    order = [*mesh]
    if forced:
        order = [*(a for a in order if a not in forced), *(a for a in reversed(order) if a in forced)]
    for axis in order:
        n = mesh[axis]
        options = dict.fromkeys([p[axis] for p in factors_of_axes if p.get(axis)])
        choices: list[str | None] = [f for f in options if rule.by_name[f].shardable_into(shards.get(f, 1) * n)]
        choices.append(None)
        if axis in forced and any(axis in p for p in factors_of_axes):
            choices = [
                f for f in forced[axis] if f is None or rule.by_name[f].shardable_into(shards.get(f, 1) * n)
            ] or choices
        best, moves = (math.inf, choices[0]), None
        for factor in choices if len(choices) > 1 else ():
            needed = _moves(rule, operands, results, mesh, {**chosen, axis: factor})
            cost = _cost(needed, mesh, prices)
            if factor is None and options:
                cost += flops * (n - 1) / n / math.prod(shards.values() or [1]) / prices.flops_per_byte
            if cost < best[0] * (1 - STRATEGY_TIE):
                best, moves = (cost, factor), needed
        chosen[axis] = best[1]
        if best[1] is not None:
            shards[best[1]] = shards.get(best[1], 1) * n
    for axis in _non_contiguous(rule, chosen, shards):
        chosen[axis], moves = None, None
    moves = _moves(rule, operands, results, mesh, chosen) if moves is None else moves
    if len(mesh) > 1:
        free = {a: {p[a] for p in factors_of_axes if p.get(a)} for a in order if a not in forced}
        moves = _joined(rule, operands, results, mesh, prices, free, chosen, moves)
    moves = _in_steps(_in_order(moves, operands.specs, mesh), operands, results, chosen, mesh)
    if len(mesh) < 2:  # one mesh axis has one order
        return OperatorStrategy(chosen, tuple(moves))
    arrays = [
        *((i, *array) for i, array in enumerate(zip(operands.dims, operands.nbytes, operands.specs, strict=True))),
        *((-1 - i, *array) for i, array in enumerate(zip(results.dims, results.nbytes, results.specs, strict=True))),
    ]
    ordered, permutes = order_axes(chosen, arrays, mesh)
    moves = [*moves, *(Move("collective-permute", axes, array, local, local) for array, axes, local in permutes)]
    return OperatorStrategy(ordered, tuple(moves))


def _joined(
    rule: Rule,
    operands: OperandSpecs,
    results: OperandSpecs,
    mesh: Mapping[str, int],
    prices: LinkPrices,
    free: Mapping[str, Collection[str]],
    chosen: dict[str, str | None],
    moves: list[Move],
) -> list[Move]:
    """Assign factors of later mesh axes to mesh axes that shard no factor, where that is cheaper.

    One reduction over two mesh axes costs little more than one over the larger axis. The factor of the first axis was
    chosen before that of the second one was known.

    Args:
        rule: the operator's rule.
        operands: its operands.
        results: its results.
        mesh: mesh axis -> size.
        prices: what bytes cost on the links of the machine.
        free: mesh axis -> the factors that it shards in an array, in the order of the choices.
        chosen: mesh axis -> the chosen factor. This is updated.
        moves: the moves of this choice.

    Returns:
        The moves of the updated choice.
    """
    order = [*free]
    for number, axis in enumerate(order):
        if chosen[axis] is not None:
            continue
        for factor in dict.fromkeys(chosen[a] for a in order[number + 1 :]):
            ways = math.prod([mesh[a] for a, f in chosen.items() if f == factor]) * mesh[axis]
            if factor is None or factor not in free[axis] or not rule.by_name[factor].shardable_into(ways):
                continue
            needed = _moves(rule, operands, results, mesh, {**chosen, axis: factor})
            if _cost(needed, mesh, prices) < _cost(moves, mesh, prices) * (1 - STRATEGY_TIE):
                chosen[axis], moves = factor, needed
                break
    return moves


def _cost(moves: Sequence[Move], mesh: Mapping[str, int], prices: LinkPrices) -> float:
    return sum([_price_of(move, mesh, prices) for move in moves])


def _price_of(move: Move, mesh: Mapping[str, int], prices: LinkPrices) -> float:
    if move.kind != "all-to-all":  # the only kind with another weight than 1
        return move.wire_bytes
    return move.wire_bytes * prices.weight(move.kind, math.prod([mesh[a] for a in move.axes]))


def _in_order(moves: Sequence[Move], specs: Sequence[Spec], mesh: Mapping[str, int]) -> list[Move]:
    """The same moves, with the gathers first that have to come before an all-to-all of the same operand.

    Only the minor mesh axis of a dimension can be moved to another one (`reshard_path`). Strategies are compared
    without this, because operators that take the same operand share such a gather.
    """
    ordered: list[Move] = []
    for move in moves:
        last = ordered[-1] if ordered else move
        both = last.kind == "all-to-all" and move.kind == "all-gather" and last.array == move.array >= 0
        first = minor_to(specs[move.array], last.axes, move.axes) if both else []
        if not first:
            ordered.append(move)
            continue
        larger = last.local_bytes * math.prod([mesh[a] for a in first])
        ordered[-1:] = [
            _move("all-gather", first, move.array, last.local_bytes, mesh),
            _move("all-to-all", last.axes, move.array, larger, mesh),
        ]
        if rest := [a for a in move.axes if a not in first]:
            ordered.append(_move("all-gather", rest, move.array, larger, mesh))
    return ordered


def _in_steps(
    moves: Sequence[Move],
    operands: OperandSpecs,
    results: OperandSpecs,
    chosen: Mapping[str, str | None],
    mesh: Mapping[str, int],
) -> list[Move]:
    """Splits each all-to-all into one for each pair of dimensions, as the lowered program does."""
    found: list[Move] = []
    for move in moves:
        groups: Sequence[tuple[str, ...]] = ()
        if move.kind == "all-to-all" and len(move.axes) > 1:
            of, i = (operands, move.array) if move.array >= 0 else (results, -1 - move.array)
            groups = all_to_alls(of.specs[i], OperatorStrategy(chosen, ()).spec(of.dims[i]), move.axes)
        steps = [_move(move.kind, axes, move.array, move.local_bytes, mesh) for axes in groups]
        found += steps if len(steps) > 1 else [move]
    return found


def _move(kind: MoveKind, axes: Sequence[str], array: int, local: float, mesh: Mapping[str, int]) -> Move:
    wire = bytes_sent_per_byte(kind, math.prod([mesh[a] for a in axes])) * local
    return Move(kind, tuple(axes), array, local, wire)


def _non_contiguous(rule: Rule, chosen: Mapping[str, str | None], shards: Mapping[str, int]) -> list[str]:
    """The mesh axes under which shards are not contiguous.

    They shard a factor, but an earlier factor of the same dimension is not sharded to single elements.
    """
    found: set[str] = set()
    for dim in rule.compound_dims:
        single = True  # whether all earlier factors are sharded to single elements
        for f in dim:
            found |= {f} if f in shards and not single else set()
            single = single and f not in found and shards.get(f, 1) == rule.factor(f).size
    return [axis for axis, factor in chosen.items() if factor in found]


def _moves(
    rule: Rule,
    operands: OperandSpecs,
    results: OperandSpecs,
    mesh: Mapping[str, int],
    factors: Mapping[str, str | None],
) -> list[Move]:
    """The collectives if mesh axes shard these factors; mesh axes that `factors` lacks need none.

    An array moves over several mesh axes at once. It is reduced first, and gathered last. Positions
    (argmax, argmin) are gathered with the values there, because they cannot be compared alone.
    """
    moves: list[Move] = []
    for i, own, local, factor_of_axis in operands.sharded:
        differing = [a for a, f in factors.items() if factor_of_axis.get(a, f) != f]
        if differing:
            moved = [a for a in differing if (f := factors[a]) is not None and f in own]  # to another dimension
            _add(moves, "all-to-all", moved, i, local, mesh)
            _add(moves, "all-gather", [a for a in differing if a not in moved], i, local, mesh)
    sharding = [(a, f) for a, f in factors.items() if f is not None]
    for i, own, size, axes, factor_of_axis in results.arrays if sharding else ():
        differing = {a: f for a, f in sharding if factor_of_axis.get(a) != f}
        if not differing:
            continue
        computed = [a for a, f in sharding if f in own]  # axes that shard the result
        local = size / math.prod([mesh[a] for a in {*computed, *(a for a in axes if a not in factors)}])
        partial = [a for a, f in differing.items() if a not in computed and rule.partial(f, i) is not None]
        if partial and rule.partial(differing[partial[0]], i) in POSITIONS:
            # Each device compares the best elements of all shards, so their values are gathered beside their positions.
            summed = {f for dim in rule.operands[0] for f in dim if f not in own}
            value_bytes = operands.nbytes[0] / max(math.prod([rule.by_name[f].size or 1 for f in summed]), 1)
            _add(moves, "all-gather", partial, -1 - i, local + local * value_bytes / size if size else 0.0, mesh)
        elif partial:
            local = _add(moves, "reduce-scatter", [a for a in partial if a in factor_of_axis], -1 - i, local, mesh)
            _add(moves, "all-reduce", [a for a in partial if a not in factor_of_axis], -1 - i, local, mesh)
        if moved := [a for a in differing if a in computed]:
            _add(moves, "all-to-all", [a for a in moved if a in factor_of_axis], -1 - i, local, mesh)
            _add(moves, "all-gather", [a for a in moved if a not in factor_of_axis], -1 - i, local, mesh)
    return moves


def _add(
    moves: list[Move], kind: MoveKind, axes: Sequence[str], array: int, local: float, mesh: Mapping[str, int]
) -> float:
    """Add a collective of an array with `local` bytes on each device. Return the bytes that it has afterwards."""
    if not axes:
        return local
    n = math.prod([mesh[a] for a in axes])
    if wire := bytes_sent_per_byte(kind, n) * local:
        moves.append(Move(kind, tuple(axes), array, local, wire))
    return local / n if kind == "reduce-scatter" else local
