"""What padding would win: a logical axis whose size mesh axes do not divide, priced as if it were a little longer.

    padded  = the least multiple of `ways` that holds the axis; ways: the devices that would cut it
    gain    = 1 - step_us(layout of the padded program) / step_us(the plan)

The padded program is the same program with that axis longer in every value and every rule (`lengthened`); its layouts
cut it by the same table, and `cost` and `memory` price them like any other. What is told is what wins; nothing is
chosen by it, since only the user can pad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.plan.tensors import Padding
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.search.candidate import Candidate, best_assigned, price
from autoshard.spmdrules.core.placement import axes_of
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.ir.program import Block, Op, Program

RIVALS_PRICED = 2  # for each number of ways in which they would cut a class
PROGRAMS_PRICED = 4  # axes and sizes to which they are padded
LITTLE = 1.125  # of its size: the longest to which an axis is padded for a plan that was not chosen
WORTH = 0.005  # of the step's time, below which a gain is noise
LARGE_BYTES = 2**20  # what a smaller array takes that is not stored in parts is no matter


@shown
@dataclass(frozen=True)
class Undivided:
    """A class that mesh axes list, or should store, and do not divide: in how many parts it is and would be cut."""

    cls: int
    over: tuple[str, ...]
    cut: int
    ways: int


def undivided(layout: Layout) -> list[Undivided]:
    """The classes of a layout's table that the mesh axes which list them do not divide.

    Not what those leave to a class which are cut before it and beside it in every value: nothing would be cut more.
    """
    found: list[Undivided] = []
    cuts: dict[int, tuple[str, ...]] = {}
    for c in dict.fromkeys(c for classes in layout.table.values() for c in classes):
        over = tuple(a for a, classes in layout.table.items() if c in classes)
        before = {a for d, axes in cuts.items() if d in layout.axes.co_occurring.get(c, ()) for a in axes}
        cuts[c] = tuple(layout.spec_of(((c,),))[0])
        cut, ways = layout.ways(cuts[c]), layout.ways([a for a in over if a not in before])
        if layout.axes.sizes[c] % ways and cut < ways:
            found.append(Undivided(c, over, cut, ways))
    return found


def unstored(layout: Layout) -> list[Undivided]:
    """The largest class of each large array of state that mesh axes should store in parts, but divide no dimension of.

    No class twice: of several such arrays the first.
    """
    found: dict[int, Undivided] = {}
    for v, role in layout.roles.inputs.items():
        leaves, spec, aval = layout.axes.of_value[v], layout.stored(v), layout.axes.program.avals[v]
        free = [a for a in layout.storage.get(role, ()) if a not in axes_of(spec)]
        able = [d for d, dim in enumerate(leaves) if len(dim) == 1 and dim[0] not in layout.axes.stacked]
        if free and able and v not in layout.fixed and nbytes(aval) >= LARGE_BYTES:
            d = max(able, key=lambda d: (aval.shape[d] / layout.ways(spec[d]), -d))
            (c,), cut = leaves[d], layout.ways(spec[d])
            if aval.shape[d] % (cut * layout.ways(free)):
                found.setdefault(c, Undivided(c, tuple(free), cut, cut * layout.ways(free)))
    return list(found.values())


def multiple(size: int, n: int) -> int:
    """The least multiple of `n` that holds `size`."""
    return -(-size // n) * n


def what_padding_wins(
    cost: CostModel,
    memory: MemoryModel,
    chosen: Candidate,
    others: Sequence[Candidate],
    limit: float,
    idle: Iterable[tuple[str, Layout]] = (),
) -> tuple[Padding, ...]:
    """For each class that could be padded the best that would come of it, if that beats the plan.

    Args:
        cost: prices time.
        memory: prices memory.
        chosen: the plan.
        others: the other candidates, the fastest first.
        limit: bytes of one device.
        idle: layouts that were not even candidates, as they leave devices without work, with their words.
    """
    axes = chosen.layout.axes
    rivals = [(c.name, c.layout, c.cost.step_time_us) for c in others if c.name != chosen.name]
    rivals += [(name, layout, 0.0) for name, layout in idle if all(name != c.name for c in others)]
    found: dict[int, list[Padding]] = {}
    for (cls, size), some in _cases(chosen, rivals).items():
        longer = lengthened(axes, cls, size)
        longer_cost, longer_memory = cost.resized(longer), memory.resized(longer)
        for words, layout, ways in some:
            made = best_assigned(price(words, _on(longer, layout), longer_cost, longer_memory), longer_cost)
            if _wins(made, chosen, limit):
                step = made.cost.step_time_us
                won = Padding(axes.name(cls), axes.sizes[cls], ways, size, words, step, made.peak_bytes)
                found.setdefault(cls, []).append(won)
    return tuple(min(won, key=lambda p: p.step_time_us) for won in found.values())


def _cases(
    chosen: Candidate, rivals: Sequence[tuple[str, Layout, float]]
) -> dict[tuple[int, int], list[tuple[str, Layout, int]]]:
    """(class, padded size) -> what to price with it: (words, layout, ways).

    Of the plan all of its classes; of rivals the fastest two for each number of ways, and one size for all of them.
    """
    sizes = chosen.layout.axes.sizes
    cases: dict[tuple[int, int], list[tuple[str, Layout, int]]] = {}
    for one in [*undivided(chosen.layout), *unstored(chosen.layout)]:
        size = multiple(sizes[one.cls], one.ways)
        cases.setdefault((one.cls, size), []).append((chosen.name, chosen.layout, one.ways))
    by_ways: dict[int, dict[int, list[tuple[str, Layout, int]]]] = {}
    for words, layout, time in sorted(rivals, key=lambda rival: rival[2]):
        for one in undivided(layout):
            could_win = time * one.cut / one.ways < chosen.cost.step_time_us
            little = multiple(sizes[one.cls], one.ways) <= LITTLE * sizes[one.cls]
            some = by_ways.setdefault(one.cls, {}).setdefault(one.ways, [])
            if could_win and little and len(some) < RIVALS_PRICED:
                some.append((words, layout, one.ways))
    for cls, ways in by_ways.items():
        if some := [each for found in ways.values() for each in found]:
            size = multiple(sizes[cls], math.lcm(*(each[2] for each in some)))
            cases.setdefault((cls, size), []).extend(some)
    return dict(list(cases.items())[:PROGRAMS_PRICED])


def _on(axes: LogicalAxes, layout: Layout) -> Layout:
    """The same table on a program with other axes."""
    return Layout(axes, layout.roles, layout.mesh, layout.table, layout.storage, layout.fixed)


def _wins(made: Candidate, chosen: Candidate, limit: float) -> bool:
    if not chosen.fits(limit):
        return made.fits(limit)
    return made.fits(limit) and made.cost.step_time_us < chosen.cost.step_time_us * (1 - WORTH)


def lengthened(axes: LogicalAxes, cls: int, size: int) -> LogicalAxes:
    """The axes of the same program with one class of another size."""
    before = axes.sizes[cls]
    sizes = [size if c == cls else n for c, n in enumerate(axes.sizes)]

    def grown(n: int, classes: Sequence[int]) -> int:
        return n * size ** (k := classes.count(cls)) // before**k

    def aval(leaves: Leaves, old: Any) -> Any:
        if not any(cls in dim for dim in leaves):
            return old
        return jax.ShapeDtypeStruct(tuple(map(grown, old.shape, leaves)), old.dtype)

    avals = list(map(aval, axes.of_value, axes.program.avals))
    copy = _Lengthened(cls, grown, avals, iter(axes.of_op))
    program = Program(copy.block(axes.program.block), avals, axes.program.unknown)
    return replace(axes, program=program, sizes=sizes)


class _Lengthened:
    """A copy of a program's blocks; operators that lack the class are shared with the original."""

    def __init__(self, cls: int, grown: Callable[..., int], avals: Sequence[Any], of_op: Iterator[Mapping[str, Any]]):
        self.cls, self.grown, self.avals, self.of_op = cls, grown, avals, of_op
        self.rules: dict[Any, Rule] = {}

    def block(self, block: Block) -> Block:
        return replace(block, ops=[self.op(op, next(self.of_op)) for op in block.ops])

    def op(self, op: Op, factors: Mapping[str, tuple[int, ...]]) -> Op:
        blocks = tuple(map(self.block, op.blocks))
        having = tuple(name for name, classes in factors.items() if self.cls in classes)
        if op.rule is None or not having:
            return replace(op, blocks=blocks) if blocks else op
        key = id(op.rule), tuple((name, factors[name].count(self.cls)) for name in having)
        if key not in self.rules:
            longer = (
                replace(f, size=self.grown(f.size, factors[f.name])) if f.name in having and f.size else f
                for f in op.rule.factors
            )
            self.rules[key] = op.rule.where(factors=tuple(longer))
        return replace(op, rule=self.rules[key], eqn=self.eqn(op), blocks=blocks)

    def eqn(self, op: Op) -> Any:
        """The equation of an operator as the models read it: its values' types are those of the longer program."""

        def variables(known: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
            return [v if n < 0 else SimpleNamespace(aval=self.avals[n]) for v, n in zip(known, numbers, strict=True)]

        return SimpleNamespace(
            primitive=op.eqn.primitive,
            params=op.eqn.params,
            source_info=op.eqn.source_info,
            invars=variables(op.eqn.invars, op.operands),
            outvars=variables(op.eqn.outvars, op.results),
        )
