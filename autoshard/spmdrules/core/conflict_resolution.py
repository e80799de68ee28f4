"""How one operator is sharded, given the placements of its operands.

Each mesh axis does one of three things: it shards one factor of the operator, it passes a partial of the operands on to
the results, or it does neither, so that every device along it does the same work. Where the placements of the operands
agree, the operator follows them. Where they conflict, every combination is priced, and the one that moves the fewest
bytes wins:

    bytes = sum over operands of the cost of moving each from its placement to the one that the choice needs
          + sum over results of the cost of reducing those that the choice leaves partial
          + the cost of moving each result to its requested spec, where one is known

The first candidate wins a tie. Candidates are ordered: passing a partial on, then factors in the order of the operands,
then neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.spmdrules.core.factor_projection import project
from autoshard.spmdrules.core.placement import Placement, Spec, axes_of, cost
from autoshard.spmdrules.core.rule import Dims, Rule

IDEMPOTENT = ("max", "min", "and", "or")  # reducing copies of one value gives the value
# Above this many combinations, mesh axes are resolved one after the other. Chosen, not measured.
_MAX_COMBINATIONS = 256
_TIE = 1e-9  # relative; smaller differences between prices are rounding errors


@shown
@dataclass(frozen=True)
class Operand:
    """An operand before the operator is resolved.

    Attributes:
        placement: where it is.
        nbytes: bytes of the unsharded array.
        is_zero: whether all its elements are zero; such an operand is a partial sum over any axis.
        same_as: the number of the first operand that is the same value, which may be the operand itself.
    """

    placement: Placement
    nbytes: float
    is_zero: bool
    same_as: int


@shown
@dataclass(frozen=True)
class Resolution:
    """The placements that an operator needs its operands in, and those that it leaves its results in."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]


@shown
@dataclass(frozen=True)
class ShardFactor:
    """A mesh axis shards a factor."""

    factor: str


@shown
@dataclass(frozen=True)
class PassPartial:
    """Some operands are partial over a mesh axis, and so are the results."""

    operands: tuple[int, ...]
    op: str


Choice = ShardFactor | PassPartial | None


def resolve(
    rule: Rule,
    operands: Sequence[Operand],
    result_bytes: Sequence[float],
    requested: Sequence[Spec | None],
    mesh: Mapping[str, int],
) -> Resolution:
    """Decides how one operator is sharded.

    Args:
        rule: its rule, sizes bound.
        operands: its operands and their placements.
        result_bytes: bytes of each unsharded result.
        requested: the spec requested for each result, None where none is.
        mesh: mesh axis -> size.
    """
    return _Resolver(rule, operands, result_bytes, requested, mesh).best()


class _Resolver:
    def __init__(
        self,
        rule: Rule,
        operands: Sequence[Operand],
        result_bytes: Sequence[float],
        requested: Sequence[Spec | None],
        mesh: Mapping[str, int],
    ):
        self.rule = rule
        self.operands = operands
        self.result_bytes = result_bytes
        self.requested = requested
        self.mesh = mesh
        self.factors = rule.by_name
        # Both of these map a mesh axis to the factor that it shards: for each operand, and for each result's requested
        # spec. Where operands shard a factor over the same axes in different orders, the largest keeps its order.
        ranked = sorted(enumerate(operands), key=lambda pair: -pair[1].nbytes)
        self.operand_factors = {i: project(rule, rule.operands[i], o.placement.spec, mesh) for i, o in ranked}
        self.requested_factors = [
            {} if spec is None else project(rule, dims, spec, mesh)
            for dims, spec in zip(rule.results, requested, strict=True)
        ]

    def best(self) -> Resolution:
        """Returns what the operands agree on, else the cheapest combination."""
        options = {axis: self.options(axis) for axis in self.mesh}
        if all(len(found) <= 1 for found in options.values()) and not self.may_reduce(options):
            resolution = self.build({axis: found[0] for axis, found in options.items() if found})
            if resolution is not None:
                return resolution
        if math.prod(len(found) + 1 for found in options.values()) > _MAX_COMBINATIONS:
            return self.greedy(options)
        axes = list(options)
        combinations = itertools.product(*([*options[a], None] for a in axes))
        return self.cheapest(dict(zip(axes, choices, strict=True)) for choices in combinations)

    def options(self, axis: str) -> list[Choice]:
        """Returns the choices for a mesh axis, without None."""
        found: list[Choice] = list(self.partial_choices(axis))
        partial = any(axis == a for o in self.operands for a, _ in o.placement.partial)
        found += [ShardFactor(factors[axis]) for _, factors in sorted(self.operand_factors.items()) if axis in factors]
        if not found or partial:
            found += [ShardFactor(goal[axis]) for goal in self.requested_factors if axis in goal]
        return list(dict.fromkeys(found))

    def may_reduce(self, options: Mapping[str, Sequence[Choice]]) -> bool:
        """Whether reducing a partial here may be cheaper: its axis could shard a factor, or the result is larger."""
        partial = {a for o in self.operands for a, _ in o.placement.partial}
        if any(isinstance(c, ShardFactor) for a in partial for c in options.get(a, ())):
            return True
        largest = max(self.result_bytes, default=0.0)
        passed = [c for found in options.values() for c in found if isinstance(c, PassPartial)]
        return any(largest > sum(self.operands[i].nbytes for i in c.operands) for c in passed)

    def partial_choices(self, axis: str) -> Iterator[PassPartial]:
        """Yields the ways in which a partial over `axis` can pass through."""
        held = {i: op for i, o in enumerate(self.operands) for a, op in o.placement.partial if a == axis}
        if len(set(held.values())) != 1:
            return
        op = next(iter(held.values()))
        if self.is_aligned:
            yield PassPartial(tuple(held), op)
            return
        found = set()
        if op == "sum":
            for group in self.rule.linear:
                if held.keys() & set(group) and all(i in held or self.operands[i].is_zero for i in group):
                    found.add(tuple(i for i in group if i in held))
        # The other moved operands are whole on every device, and the reduction combines their copies with the partials.
        # This keeps their values if the reduction is idempotent, or a sum and they are zero.
        moved = tuple(i for i in self.rule.moves if i in held)
        rest = [i for i in self.rule.moves if i not in held]
        if moved and (op in IDEMPOTENT or (op == "sum" and all(self.operands[i].is_zero for i in rest)) or not rest):
            found.add(moved)
        for group in sorted(found):
            yield PassPartial(group, op)

    @property
    def is_aligned(self) -> bool:
        """Whether result i holds only elements of operand i, for every i (`optimization_barrier`)."""
        rule = self.rule
        return 1 < len(rule.operands) == len(rule.moves) and rule.operands == rule.results

    def greedy(self, options: Mapping[str, Sequence[Choice]]) -> Resolution:
        """Resolves one axis after the other. Used if there are too many combinations."""
        chosen: dict[str, Choice] = {}
        for axis, found in options.items():
            trials = [{**chosen, axis: choice} for choice in [*found, None]]
            priced = [(self.price(s), k) for k, t in enumerate(trials) if (s := self.build(t)) is not None]
            chosen = trials[min(priced)[1]]
        return self.cheapest([chosen])

    def cheapest(self, combinations: Iterator[dict[str, Choice]] | list[dict[str, Choice]]) -> Resolution:
        """Returns the feasible combination with the lowest price; the first one in a tie."""
        best: tuple[float, Resolution] | None = None
        for chosen in combinations:
            resolution = self.build(chosen)
            if resolution is None:
                continue
            price = self.price(resolution)
            if best is None or price < best[0] * (1 - _TIE):
                best = (price, resolution)
        assert best is not None, "sharding nothing is always feasible"
        return best[1]

    def build(self, chosen: Mapping[str, Choice]) -> Resolution | None:
        """Returns the placements under these choices, or None if a dimension cannot be sharded in this way."""
        axes: dict[str, list[str]] = {}
        for i, factors in self.operand_factors.items():
            self.add_axes(axes, chosen, factors, self.operands[i].placement.spec)
        for goal, spec in zip(self.requested_factors, self.requested, strict=True):
            self.add_axes(axes, chosen, goal, spec or ())
        if not self.is_feasible(axes):
            return None
        rule = self.rule
        passing = [(a, c) for a, c in chosen.items() if isinstance(c, PassPartial)]
        operands = tuple(
            Placement(_spec(dims, axes), tuple((a, c.op) for a, c in passing if i in c.operands))
            for i, dims in enumerate(rule.operands)
        )
        results = []
        for j, dims in enumerate(rule.results):
            passed = [(a, c.op) for a, c in passing if not self.is_aligned or j in c.operands]
            produced = [(a, op) for f, over in axes.items() if (op := rule.partial(f, j)) for a in over]
            results.append(Placement(_spec(dims, axes), tuple(sorted([*passed, *produced]))))
        return Resolution(operands, tuple(results))

    def add_axes(
        self, axes: dict[str, list[str]], chosen: Mapping[str, Choice], factors: Mapping[str, str], spec: Spec
    ) -> None:
        """Adds the chosen axes of one array's spec to the factors that they shard, in the order of the spec."""
        for axis in axes_of(spec):
            choice = chosen.get(axis)
            if isinstance(choice, ShardFactor) and factors.get(axis) == choice.factor:
                over = axes.setdefault(choice.factor, [])
                if axis not in over:
                    over.append(axis)

    def is_feasible(self, axes: Mapping[str, Sequence[str]]) -> bool:
        """Whether every factor divides evenly, and the factors major to a sharded one are fully sharded."""
        pieces = {f: math.prod(self.mesh[a] for a in over) for f, over in axes.items()}
        if any(not self.factors[f].shardable_into(n) for f, n in pieces.items()):
            return False
        for dims in (*self.rule.operands, *self.rule.results):
            for dim in dims:
                major_is_open = False  # whether a major factor is not fully sharded
                for f in dim:
                    if major_is_open and axes.get(f):
                        return False
                    major_is_open = major_is_open or pieces.get(f, 1) != self.factors[f].size
        return True

    def price(self, resolution: Resolution) -> float:
        """Returns the bytes that a resolution moves; the formula is in the module docstring."""
        total = 0.0
        for i, (o, target) in enumerate(zip(self.operands, resolution.operands, strict=True)):
            if o.same_as < i and target == resolution.operands[o.same_as]:
                continue  # the same value has moved there for an earlier operand
            total += cost(o.placement, target, o.nbytes, self.mesh)
        for place, nbytes, spec in zip(resolution.results, self.result_bytes, self.requested, strict=True):
            if place.partial or spec is not None:
                goal = place.reduced if spec is None else Placement(spec)
                total += cost(place, goal, nbytes, self.mesh)
        return total


def _spec(dims: Dims, axes: Mapping[str, Sequence[str]]) -> Spec:
    return tuple(tuple(a for f in dim for a in axes.get(f, ())) for dim in dims)
