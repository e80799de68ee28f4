"""How one operator is cut over each mesh axis, given where its operands are and where its results are wanted.

For each mesh axis the choices are: one of the operator's factors, or none (every device of that axis does the same).
A choice costs

    bytes moved = sum over operands of what takes it from where it is to where the choice needs it
                + what takes each result from where the choice leaves it to where it is wanted

each collective as `spmdrules.place` prices it, one's own part of something whole for nothing; plus, for none, the
repeated work, turned into bytes by `flops_per_byte` (what the machine computes while one byte crosses a link). Ties go
to the factor that stands first, so every process makes the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autoshard._shown import shown
from autoshard.spmdrules.core.factor_projection import project
from autoshard.spmdrules.core.placement import Spec, axes_of, bytes_sent_per_byte, shard_count
from autoshard.spmdrules.core.rule import Dims, Rule

MoveKind = Literal["all-gather", "all-to-all", "reduce-scatter", "all-reduce"]


@shown
@dataclass(frozen=True)
class Move:
    """One collective that an operator needs.

    Attributes:
        kind: what kind it is.
        axes: over which mesh axes.
        array: which operand (0, 1, ...) or result (-1, -2, ...) moves.
        local_bytes: what a device has before.
        wire_bytes: bytes that leave each device.
    """

    kind: MoveKind
    axes: tuple[str, ...]
    array: int
    local_bytes: float
    wire_bytes: float


@shown
@dataclass(frozen=True)
class OperatorStrategy:
    """The factor that each mesh axis cuts (None: none), and the collectives that follow."""

    factors: Mapping[str, str | None]
    moves: tuple[Move, ...]

    def spec(self, dims: Dims) -> Spec:
        """The sharding of an operand or result made of `dims` under this strategy."""
        return tuple(tuple(a for f in dim for a, g in self.factors.items() if g == f) for dim in dims)


@dataclass(frozen=True)
class OperandSpecs:
    """An operator's operands (or results): their dims, bytes whole, and specs."""

    dims: Sequence[Dims]
    nbytes: Sequence[float]
    specs: Sequence[Spec]
    rule: Rule
    mesh: Mapping[str, int]

    @cached_property
    def places(self) -> list[dict[str, str]]:
        """For each array: mesh axis -> the factor that it cuts, "" where it cuts none evenly."""
        return [
            dict.fromkeys(axes_of(spec), "") | project(self.rule, dims, spec, self.mesh)
            for dims, spec in zip(self.dims, self.specs, strict=True)
        ]


def choose_strategy(
    rule: Rule,
    operands: OperandSpecs,
    results: OperandSpecs,
    mesh: Mapping[str, int],
    flops: float,
    flops_per_byte: float,
) -> OperatorStrategy:
    """The cheapest cut for each mesh axis.

    Args:
        rule: the operator's rule.
        operands: where its operands are.
        results: where its results are wanted.
        mesh: mesh axis -> size.
        flops: the operator's work, whole.
        flops_per_byte: see the module's head.
    """
    chosen: dict[str, str | None] = {}
    cut: dict[str, int] = {}
    for axis, n in mesh.items():
        options = dict.fromkeys(p[axis] for a in (operands, results) for p in a.places if p.get(axis))
        able = [f for f in options if rule.factor(f).cuts_into(cut.get(f, 1) * n)]
        best: tuple[float, str | None] | None = None
        for factor in [*able, None] if options else [None]:
            cost = sum(m.wire_bytes for m in _moves(rule, operands, results, mesh, {**chosen, axis: factor}))
            if factor is None:
                cost += flops * (n - 1) / n / math.prod(cut.values() or [1]) / flops_per_byte if options else 0.0
            if best is None or cost < best[0] * (1 - 1e-9):
                best = (cost, factor)
        assert best is not None
        chosen[axis] = best[1]
        if best[1] is not None:
            cut[best[1]] = cut.get(best[1], 1) * n
    for axis in _scattered(rule, chosen, cut):
        chosen[axis] = None
    return OperatorStrategy(chosen, tuple(_moves(rule, operands, results, mesh, chosen)))


def _scattered(rule: Rule, chosen: Mapping[str, str | None], cut: Mapping[str, int]) -> list[str]:
    """The axes that cut a factor which stands behind one that is not cut to single elements: no shard is one piece."""
    found: set[str] = set()
    for dim in {dim for dims in (*rule.operands, *rule.results) for dim in dims if len(dim) > 1}:
        whole = True
        for f in dim:
            found |= {f} if f in cut and not whole else set()
            whole = whole and f not in found and cut.get(f, 1) == rule.factor(f).size
    return [axis for axis, factor in chosen.items() if factor in found]


def _moves(
    rule: Rule,
    operands: OperandSpecs,
    results: OperandSpecs,
    mesh: Mapping[str, int],
    factors: Mapping[str, str | None],
) -> list[Move]:
    """The collectives if mesh axes cut these factors; axes that are not among them move nothing.

    One array moves over several axes at once: reduced and scattered first, gathered last.
    """
    out: list[Move] = []

    def add(kind: MoveKind, axes: list[str], array: int, local: float) -> float:
        """A collective of an array that has `local` bytes on each device before; what it has then."""
        n = math.prod(mesh[a] for a in axes)
        if wire := bytes_sent_per_byte(kind, n) * local:
            out.append(Move(kind, tuple(axes), array, local, wire))
        return local / n if kind == "reduce-scatter" else local

    for i, (dims, size, spec, place) in enumerate(
        zip(operands.dims, operands.nbytes, operands.specs, operands.places, strict=True)
    ):
        leaving = [a for a, f in factors.items() if a in place and place[a] != f]
        if leaving:
            local = size / shard_count(spec, mesh)
            stays = [a for a in leaving if (f := factors[a]) is not None and _has(dims, f)]
            add("all-to-all", stays, i, local)
            add("all-gather", [a for a in leaving if a not in stays], i, local)
    for i, (dims, size, spec, place) in enumerate(
        zip(results.dims, results.nbytes, results.specs, results.places, strict=True)
    ):
        made = {a: f for a, f in factors.items() if f is not None and place.get(a) != f}
        if not made:
            continue
        cut = [a for a, f in factors.items() if f is not None and _has(dims, f)]
        local = size / math.prod(mesh[a] for a in {*cut, *(a for a in axes_of(spec) if a not in factors)})
        partial = [a for a, f in made.items() if a not in cut and rule.partial(f, i) is not None]
        local = add("reduce-scatter", [a for a in partial if a in place], -1 - i, local)
        add("all-reduce", [a for a in partial if a not in place], -1 - i, local)
        add("all-to-all", [a for a in made if a in cut and a in place], -1 - i, local)
        add("all-gather", [a for a in made if a in cut and a not in place], -1 - i, local)
    return out


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in dim for dim in dims)
