"""What a walk remembers of an operator: what it is on its own, and how it was cut last.

A walk comes by every operator several times, and mostly finds its operands where they were: nothing has to be
weighed again then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.spmdrules.core.conflict_resolution import Operand, Resolution, resolve
from autoshard.spmdrules.core.placement import Placement, Spec
from autoshard.spmdrules.families.manual_sharding import mapped_specs
from autoshard.spmdrules.ir.program import Op

CONSTRAINTS = ("sharding_constraint", "reshard")


@dataclass(eq=False, slots=True)
class OperatorMemo:
    """An operator as a walk knows it.

    Attributes:
        fixed: how it is cut, where nothing else can be (`shard_map`).
        constrains: whether it is a user's constraint.
        twins: for each operand the first that is the same value.
        zeros: for each operand whether it is a literal zero.
        places, zero, wanted: what decided how it was cut last.
        settled: how it was cut last.
        still: whether that leaves its operands where they were.
        rests: whether, moreover, none of them is partial: no other operator can move them later in a walk.
        gives_zero: whether its results are all zeros.
    """

    fixed: Resolution | None
    is_constraint: bool
    same_as: tuple[int, ...]
    zero_literals: list[bool]
    placements: list[Placement] | None = None
    zeros: list[bool] | None = None
    requested: list[Spec | None] | None = None
    resolution: Resolution | None = None
    in_place: bool = False
    stable: bool = False
    zero_results: bool = False

    @classmethod
    def of(cls, op: Op, mesh: dict[str, int]) -> OperatorMemo:
        """Looks at an operator."""
        mapped = mapped_specs(op.eqn, mesh)
        fixed = None if mapped is None else Resolution(*(tuple(map(Placement, side)) for side in mapped))
        zeros = [v < 0 and literal_zero(atom) for v, atom in zip(op.operands, op.eqn.invars, strict=True)]
        return cls(fixed, op.name in CONSTRAINTS, tuple([op.operands.index(v) for v in op.operands]), zeros)

    def remember(
        self, op: Op, places: list[Placement], zero: list[bool], wanted: list[Spec | None], settled: Resolution
    ) -> Resolution:
        """Remembers how the operator is cut, and what decided that."""
        self.placements, self.zeros, self.requested = places, zero, wanted
        self.resolution, self.in_place = settled, settled.operands == tuple(places)
        self.stable = self.in_place and not any([place.partial for place in places])
        moved = op.rule.moves if op.rule is not None else ()
        self.zero_results = bool(moved) and all([zero[i] for i in moved])
        return settled


class ResolutionCache:
    """How operators are cut on a mesh, found once for all that are alike."""

    def __init__(self, mesh: dict[str, int], nbytes: list[float]):
        self.mesh = mesh
        self.nbytes = nbytes
        self.found: dict[Any, Resolution] = {}

    def of(
        self, op: Op, twins: tuple[int, ...], places: list[Placement], zero: list[bool], wanted: list[Spec | None]
    ) -> Resolution:
        """How an operator is cut; its arguments are those of `settle`, by operand and result."""
        key = (id(op.rule), tuple(places), tuple(zero), twins, tuple(wanted))
        found = self.found.get(key)
        if found is None:
            assert op.rule is not None
            sizes = [0.0 if v < 0 else self.nbytes[v] for v in op.operands]
            operands = [Operand(*each) for each in zip(places, sizes, zero, twins, strict=True)]
            found = resolve(op.rule, operands, [self.nbytes[r] for r in op.results], wanted, self.mesh)
            self.found[key] = found
        return found


def literal_zero(atom: Any) -> bool:
    """Whether an operand of an equation is a literal zero."""
    value = getattr(atom, "val", None)
    return value is not None and getattr(value, "shape", ()) == () and bool(value == 0)
