"""How much padding would save, for logical axes whose sizes mesh axes do not divide.

    padded  = the least multiple of the number of shards that is at least the size
    gain    = 1 - step_us(layout of the padded program) / step_us(the plan)

The padded program is the same program with a larger axis in every value and every rule (`with_axis_size`). Its layouts
have the same table, and the same models price them. Only gains are reported. No plan is chosen by them, because only
the user can pad. Sizes are reported in elements, not in the blocks of a kernel (`layout.divisibility`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax

from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.divisibility import Undivided, block_elements, multiple, undivided, undivided_in_storage
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.plan.tensors import Padding
from autoshard.sharding.search.candidate import Candidate, best_assigned, price
from autoshard.sharding.search.constants import (
    LEAST_PADDING_GAIN,
    MOST_RIVAL_PADDING,
    PADDED_PROGRAMS,
    PADDED_RIVALS,
)
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.ir.program import Block, Op, Program

Case = tuple[str, Layout, int]  # a layout to price with padding: strategy, layout, number of shards of the padded axis


def padding_gains(
    cost: CostModel,
    memory: MemoryModel,
    chosen: Candidate,
    others: Sequence[Candidate],
    limit: float,
    idle: Iterable[tuple[str, Layout]] = (),
) -> tuple[Padding, ...]:
    """The best padding of each logical axis for which padding saves time.

    Args:
        cost: prices time.
        memory: prices memory.
        chosen: the plan.
        others: the other candidates, fastest first.
        limit: memory of one device, in bytes.
        idle: layouts, with their strategies, that are not candidates because a mesh axis is idle in them.
    """
    axes = chosen.layout.axes
    rivals = [(c.name, c.layout, c.cost.step_time_us) for c in others if c.name != chosen.name]
    rivals += [(name, layout, 0.0) for name, layout in idle if all(name != c.name for c in others)]
    found: dict[int, list[Padding]] = {}
    blocks = block_elements(axes)
    for (cls, size), cases in _cases(chosen, rivals).items():
        padded_axes = with_axis_size(axes, cls, size)
        padded_cost, padded_memory = cost.resized(padded_axes), memory.resized(padded_axes)
        for words, layout, ways in cases:
            padded = best_assigned(price(words, _on(padded_axes, layout), padded_cost, padded_memory), padded_cost)
            if _gains(padded, chosen, limit):
                before, after = (n * blocks.get(cls, 1) for n in (axes.sizes[cls], size))
                step = padded.cost.step_time_us
                padding = Padding(axes.name(cls), before, ways, after, words, step, padded.peak_bytes)
                found.setdefault(cls, []).append(padding)
    return tuple(min(paddings, key=lambda p: p.step_time_us) for paddings in found.values())


def _cases(chosen: Candidate, rivals: Sequence[tuple[str, Layout, float]]) -> dict[tuple[int, int], list[Case]]:
    """The layouts to price, by (logical axis, padded size).

    For each undivided axis of the plan, this is the plan itself. For each undivided axis of the rivals, these are the
    fastest rivals for each number of shards. All of them get the same padded size, a multiple of all these numbers.

    Args:
        chosen: the plan.
        rivals: the strategy, layout and step time in microseconds of other plans.
    """
    sizes = chosen.layout.axes.sizes
    cases: dict[tuple[int, int], list[Case]] = {}
    for one in [*undivided(chosen.layout), *undivided_in_storage(chosen.layout)]:
        size = multiple(sizes[one.cls], one.wanted_shards)
        cases.setdefault((one.cls, size), []).append((chosen.name, chosen.layout, one.wanted_shards))
    by_ways: dict[int, dict[int, list[Case]]] = {}
    for words, layout, time in sorted(rivals, key=lambda rival: rival[2]):
        for one in undivided(layout):
            fastest = by_ways.setdefault(one.cls, {}).setdefault(one.wanted_shards, [])
            if _may_gain(one, time, chosen.cost.step_time_us) and len(fastest) < PADDED_RIVALS:
                fastest.append((words, layout, one.wanted_shards))
    for cls, ways in by_ways.items():
        if fastest := [case for some in ways.values() for case in some]:
            size = multiple(sizes[cls], math.lcm(*(case[2] for case in fastest)))
            cases.setdefault((cls, size), []).extend(fastest)
    return dict(list(cases.items())[:PADDED_PROGRAMS])


def may_gain_padded(layout: Layout, least_us: float, best_us: float) -> bool:
    """Whether a layout that takes at least `least_us` may be faster than `best_us` if one of its axes is padded."""
    return any(_may_gain(one, least_us, best_us) for one in undivided(layout))


def _may_gain(one: Undivided, time_us: float, best_us: float) -> bool:
    """Whether padding an axis a little may make a layout of `time_us` faster than `best_us`."""
    could_gain = time_us * one.shards / one.wanted_shards < best_us
    return could_gain and one.padded <= MOST_RIVAL_PADDING * one.size


def _on(axes: LogicalAxes, layout: Layout) -> Layout:
    """The same layout of a program with other sizes."""
    return Layout(axes, layout.roles, layout.mesh, layout.table, layout.storage, layout.fixed, layout.sequence)


def _gains(padded: Candidate, chosen: Candidate, limit: float) -> bool:
    if not chosen.fits(limit):
        return padded.fits(limit)
    most_us = chosen.cost.step_time_us * (1 - LEAST_PADDING_GAIN)
    return padded.fits(limit) and padded.cost.step_time_us < most_us


def with_axis_size(axes: LogicalAxes, cls: int, size: int) -> LogicalAxes:
    """The logical axes of the same program with another size of the logical axis `cls`."""
    before = axes.sizes[cls]
    sizes = [size if c == cls else n for c, n in enumerate(axes.sizes)]

    def resized(n: int, classes: Sequence[int]) -> int:
        return n * size ** (k := classes.count(cls)) // before**k

    def aval(leaves: Leaves, old: Any) -> Any:
        if not any(cls in dim for dim in leaves):
            return old
        return jax.ShapeDtypeStruct(tuple(map(resized, old.shape, leaves)), old.dtype)

    avals = list(map(aval, axes.of_value, axes.program.avals))
    copier = _BlockCopier(cls, resized, avals, iter(axes.of_op))
    program = Program(copier.block(axes.program.block), avals, axes.program.unknown)
    return replace(axes, program=program, sizes=sizes)


class _BlockCopier:
    """Copies a program's blocks with another size of a logical axis. Operators without that axis are shared."""

    def __init__(self, cls: int, resized: Callable[..., int], avals: Sequence[Any], of_op: Iterator[Mapping[str, Any]]):
        self.cls, self.resized, self.avals, self.of_op = cls, resized, avals, of_op
        self.rules: dict[Any, Rule] = {}

    def block(self, block: Block) -> Block:
        return replace(block, ops=[self.op(op, next(self.of_op)) for op in block.ops])

    def op(self, op: Op, factors: Mapping[str, tuple[int, ...]]) -> Op:
        blocks = tuple(map(self.block, op.blocks))
        resized = tuple(name for name, classes in factors.items() if self.cls in classes)
        if op.rule is None or not resized:
            return replace(op, blocks=blocks) if blocks else op
        key = id(op.rule), tuple((name, factors[name].count(self.cls)) for name in resized)
        if key not in self.rules:
            longer = (
                replace(f, size=self.resized(f.size, factors[f.name])) if f.name in resized and f.size else f
                for f in op.rule.factors
            )
            self.rules[key] = op.rule.where(factors=tuple(longer))
        return replace(op, rule=self.rules[key], eqn=self.eqn(op), blocks=blocks)

    def eqn(self, op: Op) -> Any:
        """A stand-in for the operator's equation, with the new shapes and only the attributes that the models read."""

        def variables(old: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
            return [v if n < 0 else SimpleNamespace(aval=self.avals[n]) for v, n in zip(old, numbers, strict=True)]

        return SimpleNamespace(
            primitive=op.eqn.primitive,
            params=op.eqn.params,
            source_info=op.eqn.source_info,
            invars=variables(op.eqn.invars, op.operands),
            outvars=variables(op.eqn.outvars, op.results),
        )
