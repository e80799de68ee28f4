"""A cache of a walk: for each operator its fixed properties, and its last resolution.

A walk visits every operator several times. Usually the placements of its operands have not changed, and the operator
need not be resolved again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.spmdrules.core.conflict_resolution import Operand, Resolution, resolve
from autoshard.spmdrules.core.placement import Placement, Spec
from autoshard.spmdrules.families.manual_sharding import mapped_specs
from autoshard.spmdrules.ir.program import Op

CONSTRAINTS = ("sharding_constraint", "reshard")


@shown
@dataclass(eq=False, slots=True)
class OperatorMemo:
    """What a walk remembers about one operator.

    Attributes:
        fixed: its resolution, if only one is possible (`shard_map`), else None.
        is_constraint: whether it is a sharding constraint.
        same_as: for each operand, the first operand that is the same value.
        zero_literals: for each operand, whether it is a literal zero.
        placements: the operands' placements when it was last resolved.
        zeros: for each operand, whether it was zero then.
        requested: the specs requested for the results then.
        resolution: its last resolution.
        in_place: whether that resolution leaves its operands where they were.
        stable: whether, in addition, no operand was partial, so that no other operator moves them later in a walk.
        zero_results: whether all elements of its results are zero.
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
        """Creates the memo of an operator that has not been resolved yet."""
        mapped = mapped_specs(op.eqn, mesh)
        fixed = None if mapped is None else Resolution(*(tuple(map(Placement, side)) for side in mapped))
        zeros = [v < 0 and literal_zero(atom) for v, atom in zip(op.operands, op.eqn.invars, strict=True)]
        return cls(fixed, op.name in CONSTRAINTS, tuple([op.operands.index(v) for v in op.operands]), zeros)

    def remember(
        self,
        op: Op,
        placements: list[Placement],
        zeros: list[bool],
        requested: list[Spec | None],
        resolution: Resolution,
    ) -> None:
        """Stores the operator's resolution and the inputs that it was computed from."""
        self.placements, self.zeros, self.requested = placements, zeros, requested
        self.resolution, self.in_place = resolution, resolution.operands == tuple(placements)
        self.stable = self.in_place and not any([place.partial for place in placements])
        moved = op.rule.moves if op.rule is not None else ()
        self.zero_results = bool(moved) and all([zeros[i] for i in moved])


class ResolutionCache:
    """The resolutions of operators on a mesh, computed once for all operators with the same rule and inputs."""

    def __init__(self, mesh: dict[str, int], nbytes: list[float]):
        self.mesh = mesh
        self.nbytes = nbytes
        self.resolutions: dict[Any, Resolution] = {}

    def resolve(
        self,
        op: Op,
        same_as: tuple[int, ...],
        placements: list[Placement],
        zeros: list[bool],
        requested: list[Spec | None],
    ) -> Resolution:
        """Returns the resolution of an operator.

        Args:
            op: the operator.
            same_as: for each operand, the first operand that is the same value.
            placements: the placement of each operand.
            zeros: for each operand, whether all its elements are zero.
            requested: the spec requested for each result, None where none is.
        """
        key = (id(op.rule), tuple(placements), tuple(zeros), same_as, tuple(requested))
        found = self.resolutions.get(key)
        if found is None:
            assert op.rule is not None
            sizes = [0.0 if v < 0 else self.nbytes[v] for v in op.operands]
            operands = [Operand(*each) for each in zip(placements, sizes, zeros, same_as, strict=True)]
            found = resolve(op.rule, operands, [self.nbytes[r] for r in op.results], requested, self.mesh)
            self.resolutions[key] = found
        return found


def literal_zero(atom: Any) -> bool:
    """Whether an operand of an equation is a literal zero."""
    value = getattr(atom, "val", None)
    return value is not None and getattr(value, "shape", ()) == () and bool(value == 0)
