"""What `overlap=` changes at one operator: which of its collectives are written out, and how.

alone      no product runs beside the collective (`gather` or `reduce` is "off")
explicit   the collective is written out, which keeps the partitioner from making a collective matmul of it and the
           product (`matmul` is "off")
ring       the product runs in parts, beside the permutes that replace the collective (`matmul` is "on")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.sharding.axes.stored_values import sources_of
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec, result_spec
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.overlap.constants import MOST_RING_DEVICES
from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.sharding.plan.overlap_words import GATHER, OFF, ON, REDUCE
from autoshard.sharding.program.operator_kinds import is_declared
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Op


@shown
@dataclass(frozen=True)
class Ring:
    """A product in parts.

    Attributes:
        axis: the mesh axis of the ring.
        array: the operand that is gathered; -1 if the result is summed.
        dim: the dimension of that array that the mesh axis shards.
    """

    axis: str
    array: int
    dim: int


@shown
@dataclass(frozen=True)
class Marks:
    """What changes at one operator.

    Attributes:
        gathers: operand that is gathered by an explicit collective -> whether it runs alone.
        reduces: whether the results are reduced by explicit collectives.
        alone: whether these run alone.
        ring: the product in parts, if there is one.
    """

    gathers: Mapping[int, bool] = field(default_factory=dict)
    reduces: bool = False
    alone: bool = False
    ring: Ring | None = None

    @property
    def ring_array(self) -> int:
        """The operand that a ring gathers; -1 if there is no ring, or if it sums the result."""
        return -1 if self.ring is None else self.ring.array


def marks_of(overlap: ModuleOverlap, layout: Layout, op: Op, strategy: OperatorStrategy) -> Marks:
    """Return what changes at a decision point with this strategy."""
    assert op.rule is not None
    on = op.name == "dot_general" and bool(overlap.products(op, ON))
    ring = ring_of(layout, op, strategy) if on else None
    apart = op.name == "dot_general" and bool(overlap.products(op, OFF))
    alone = overlap.operands(op, GATHER, OFF)
    gathers = {}
    for move in strategy.moves:
        i = move.array
        if i < 0 or move.kind != "all-gather" or (ring is not None and i == ring.array):
            continue
        stored, wanted = operand_spec(layout, op.operands[i]), strategy.spec(op.rule.operands[i])
        if (i in alone or apart) and gathered_axes(stored, wanted):
            gathers[i] = i in alone
    reduced = {-1 - move.array for move in strategy.moves if move.array < 0}
    reduce_alone = bool(reduced & {*overlap.results(op, REDUCE, OFF)})
    reduces = bool(reduced) and (reduce_alone or apart) and not is_declared(op) and (ring is None or ring.array >= 0)
    return Marks(gathers, reduces, reduces and reduce_alone, None if reduces else ring)


def gathered_axes(stored: Spec, wanted: Spec) -> list[tuple[int, tuple[str, ...]]]:
    """Return the dimensions to gather, each with the mesh axes to gather over; empty if that does not give `wanted`.

    >>> gathered_axes((("tp", "fsdp"), ()), (("tp",), ()))
    [(0, ('fsdp',))]
    >>> gathered_axes((("fsdp",), ()), ((), ("fsdp",)))
    []
    """
    if len(stored) != len(wanted) or any(s[: len(w)] != w for s, w in zip(stored, wanted, strict=True)):
        return []
    pairs = enumerate(zip(stored, wanted, strict=True))
    return [(d, tuple(s[len(w) :])) for d, (s, w) in pairs if len(s) > len(w)]


def ring_of(layout: Layout, op: Op, strategy: OperatorStrategy) -> Ring | None:
    """Return the product in parts that replaces a collective of a product; None if there is none.

    It replaces a sum over one mesh axis that shards the result, or else the gather of one operand over one mesh axis.
    The gather of a computed operand is preferred to that of a parameter.
    """
    rule = op.rule
    assert rule is not None
    aliases = {*sources_of(layout.axes, layout.roles), *layout.axes.program.inputs}
    computed, wanted = strategy.spec(rule.results[0]), result_spec(layout, op, op.results[0])
    is_partial = any(move.array < 0 for move in strategy.moves)
    if is_partial:
        scattered = gathered_axes(wanted, computed)
        over = {a for move in strategy.moves if move.array < 0 for a in move.axes}
        if len(scattered) == 1 and scattered[0][1] == tuple(over) and _fits(layout, rule.results[0], *scattered[0]):
            return Ring(scattered[0][1][0], -1, scattered[0][0])
        return None
    found: list[tuple[bool, Ring]] = []
    for move in strategy.moves:
        value = op.operands[move.array]
        stored = operand_spec(layout, value)
        dims = gathered_axes(stored, strategy.spec(rule.operands[move.array]))
        if len(dims) == 1 and _fits(layout, rule.operands[move.array], *dims[0]):
            found.append((value in aliases, Ring(dims[0][1][0], move.array, dims[0][0])))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _fits(layout: Layout, dims: Sequence[Sequence[str]], dim: int, axes: tuple[str, ...]) -> bool:
    """Whether a ring can run over one dimension: it has one mesh axis, of a size that is not too large."""
    return len(axes) == 1 and len(dims[dim]) == 1 and 1 < layout.mesh[axes[0]] <= MOST_RING_DEVICES
