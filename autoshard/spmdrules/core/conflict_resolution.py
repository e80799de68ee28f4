"""How one operator is cut, given where its operands are: its rule applied, and conflicts settled.

Each mesh axis cuts one factor of the operator, passes a partial of its operands on to its results, or does neither
(every device of that axis then does the same). What the operands say is taken where they agree. Where they do not,
every combination is priced, and the one that moves the fewest bytes wins:

    bytes = sum over operands of what takes them from where they are to where the choice needs them
          + sum over results of what making them whole will take, where the choice leaves them partial
          + what takes each result to where it is wanted, where that is known

Ties go to what was found first: passing a partial on, then factors in the order of operands, then nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.spmdrules.core.factor_projection import project
from autoshard.spmdrules.core.placement import Placement, Spec, axes_of, cost
from autoshard.spmdrules.core.rule import Dims, Rule

IDEMPOTENT = ("max", "min", "and", "or")  # reducing copies of one value gives the value
_MAX_COMBINATIONS = 256


@dataclass(frozen=True)
class Operand:
    """An operand as it comes.

    Attributes:
        place: where it is.
        nbytes: its bytes, whole.
        zero: whether it is all zeros, and so a partial sum over anything.
        twin: the first operand that is the same value; its own number if there is none before it.
    """

    placement: Placement
    nbytes: float
    is_zero: bool
    same_as: int


@dataclass(frozen=True)
class Resolution:
    """Where an operator takes its operands, and where it leaves its results."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]


@dataclass(frozen=True)
class ShardFactor:
    """A mesh axis cuts a factor."""

    factor: str


@dataclass(frozen=True)
class PassPartial:
    """A mesh axis over which some operands are partial, and so the results."""

    operands: tuple[int, ...]
    op: str


Choice = ShardFactor | PassPartial | None


def resolve(
    rule: Rule,
    operands: Sequence[Operand],
    result_bytes: Sequence[float],
    wanted: Sequence[Spec | None],
    mesh: Mapping[str, int],
) -> Resolution:
    """The cut of one operator.

    Args:
        rule: its rule, sizes bound.
        operands: where its operands are.
        result_bytes: bytes of each whole result.
        wanted: where each result should be, None where nothing says so.
        mesh: mesh axis -> size.
    """
    return _Resolver(rule, operands, result_bytes, wanted, mesh).best()


class _Resolver:
    def __init__(
        self,
        rule: Rule,
        operands: Sequence[Operand],
        result_bytes: Sequence[float],
        wanted: Sequence[Spec | None],
        mesh: Mapping[str, int],
    ):
        self.rule = rule
        self.operands = operands
        self.result_bytes = result_bytes
        self.wanted = wanted
        self.mesh = mesh
        self.factors = rule.by_name
        # Where operands cut a factor by the same axes in another order, the largest one keeps its order.
        ranked = sorted(enumerate(operands), key=lambda pair: -pair[1].nbytes)
        self.cuts = {i: project(rule, rule.operands[i], o.placement.spec, mesh) for i, o in ranked}
        self.goals = [
            {} if spec is None else project(rule, dims, spec, mesh)
            for dims, spec in zip(rule.results, wanted, strict=True)
        ]

    def best(self) -> Resolution:
        """What the operands say where they agree, else the cheapest combination."""
        options = {axis: self.options(axis) for axis in self.mesh}
        if all(len(found) <= 1 for found in options.values()) and not self.may_reduce(options):
            settled = self.build({axis: found[0] for axis, found in options.items() if found})
            if settled is not None:
                return settled
        if math.prod(len(found) + 1 for found in options.values()) > _MAX_COMBINATIONS:
            return self.greedy(options)
        axes = list(options)
        combinations = itertools.product(*([*options[a], None] for a in axes))
        return self.cheapest(dict(zip(axes, choices, strict=True)) for choices in combinations)

    def options(self, axis: str) -> list[Choice]:
        """What a mesh axis could do here, besides nothing."""
        found: list[Choice] = list(self.partial_choices(axis))
        partial = any(axis == a for o in self.operands for a, _ in o.placement.partial)
        found += [ShardFactor(cut[axis]) for _, cut in sorted(self.cuts.items()) if axis in cut]
        if not found or partial:
            found += [ShardFactor(goal[axis]) for goal in self.goals if axis in goal]
        return list(dict.fromkeys(found))

    def may_reduce(self, options: Mapping[str, Sequence[Choice]]) -> bool:
        """Whether making a partial whole here may be cheaper: its axis cuts a factor, or what it makes is larger."""
        partial = {a for o in self.operands for a, _ in o.placement.partial}
        if any(isinstance(c, ShardFactor) for a in partial for c in options.get(a, ())):
            return True
        largest = max(self.result_bytes, default=0.0)
        passed = [c for found in options.values() for c in found if isinstance(c, PassPartial)]
        return any(largest > sum(self.operands[i].nbytes for i in c.operands) for c in passed)

    def partial_choices(self, axis: str) -> Iterator[PassPartial]:
        """The ways in which a partial over `axis` can pass through."""
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
        moved = tuple(i for i in self.rule.moves if i in held)
        rest = [i for i in self.rule.moves if i not in held]
        if moved and (op in IDEMPOTENT or (op == "sum" and all(self.operands[i].is_zero for i in rest)) or not rest):
            found.add(moved)
        for group in sorted(found):
            yield PassPartial(group, op)

    @property
    def is_aligned(self) -> bool:
        """Whether each result is the operand of the same number, moved (`optimization_barrier`)."""
        rule = self.rule
        return 1 < len(rule.operands) == len(rule.moves) and rule.operands == rule.results

    def greedy(self, options: Mapping[str, Sequence[Choice]]) -> Resolution:
        """One axis after the other, where there are too many combinations."""
        chosen: dict[str, Choice] = {}
        for axis, found in options.items():
            trials = [{**chosen, axis: choice} for choice in [*found, None]]
            priced = [(self.price(s), k) for k, t in enumerate(trials) if (s := self.build(t)) is not None]
            chosen = trials[min(priced)[1]]
        return self.cheapest([chosen])

    def cheapest(self, combinations: Iterator[dict[str, Choice]] | list[dict[str, Choice]]) -> Resolution:
        """The feasible combination with the lowest price; of equals the first."""
        best: tuple[float, Resolution] | None = None
        for chosen in combinations:
            settled = self.build(chosen)
            if settled is None:
                continue
            price = self.price(settled)
            if best is None or price < best[0] * (1 - 1e-9):
                best = (price, settled)
        assert best is not None, "cutting nothing is always feasible"
        return best[1]

    def build(self, chosen: Mapping[str, Choice]) -> Resolution | None:
        """Where operands and results are under these choices, None where a dimension cannot be cut like that."""
        axes: dict[str, list[str]] = {}
        for i, cut in self.cuts.items():
            self.add_axes(axes, chosen, cut, self.operands[i].placement.spec)
        for goal, spec in zip(self.goals, self.wanted, strict=True):
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
            cut = [(a, op) for f, over in axes.items() if (op := rule.partial(f, j)) for a in over]
            results.append(Placement(_spec(dims, axes), tuple(sorted([*passed, *cut]))))
        return Resolution(operands, tuple(results))

    def add_axes(
        self, axes: dict[str, list[str]], chosen: Mapping[str, Choice], cut: Mapping[str, str], spec: Spec
    ) -> None:
        """Adds the chosen axes of one array's spec to their factors, in its order."""
        for axis in axes_of(spec):
            choice = chosen.get(axis)
            if isinstance(choice, ShardFactor) and cut.get(axis) == choice.factor:
                over = axes.setdefault(choice.factor, [])
                if axis not in over:
                    over.append(axis)

    def is_feasible(self, axes: Mapping[str, Sequence[str]]) -> bool:
        """Whether each factor is cut evenly, and what is minor in a dimension only where its majors are fully cut."""
        pieces = {f: math.prod(self.mesh[a] for a in over) for f, over in axes.items()}
        if any(not self.factors[f].cuts_into(n) for f, n in pieces.items()):
            return False
        for dims in (*self.rule.operands, *self.rule.results):
            for dim in dims:
                open_part = False
                for f in dim:
                    if open_part and axes.get(f):
                        return False
                    open_part = open_part or pieces.get(f, 1) != self.factors[f].size
        return True

    def price(self, settled: Resolution) -> float:
        """Bytes moved under a choice; see the module's head."""
        total = 0.0
        for i, (o, target) in enumerate(zip(self.operands, settled.operands, strict=True)):
            if o.same_as < i and target == settled.operands[o.same_as]:
                continue  # moved already
            total += cost(o.placement, target, o.nbytes, self.mesh)
        for place, nbytes, spec in zip(settled.results, self.result_bytes, self.wanted, strict=True):
            if place.partial or spec is not None:
                goal = place.reduced if spec is None else Placement(spec)
                total += cost(place, goal, nbytes, self.mesh)
        return total


def _spec(dims: Dims, axes: Mapping[str, Sequence[str]]) -> Spec:
    return tuple(tuple(a for f in dim for a in axes.get(f, ())) for dim in dims)
