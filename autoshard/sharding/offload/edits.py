"""The changes that `replay` makes to one jaxpr of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.program.operator_kinds import INLINED_CALLS


@shown
@dataclass
class Edits:
    """The changes to one jaxpr. Variables are those of the jaxpr; equations are given by their `id`.

    Attributes:
        canonical: a variable -> the variable whose value it has. Only `name` makes such copies.
        kept: canonical variables that are moved to the host where they are made, and back for the backward pass.
        stacks: a scan -> the stacked results (counted without the carry) that its body moves to the host.
        inner: (equation, number of its jaxpr) -> the changes to a jaxpr within the equation.
        inputs: variables that enter in host memory.
        outputs: positions of results that are returned in host memory.
        order: the equations in another order, with `UpdateLoop`s in place of some; None keeps it.
    """

    canonical: Mapping[Any, Any] = field(default_factory=dict)
    kept: set[Any] = field(default_factory=set)
    stacks: dict[int, set[int]] = field(default_factory=dict)
    inner: dict[tuple[int, int], Edits] = field(default_factory=dict)
    inputs: frozenset[Any] = frozenset()
    outputs: frozenset[int] = frozenset()
    order: Sequence[Any] | None = None

    def of(self, var: Any) -> Any:
        """The variable whose value a variable has."""
        return self.canonical.get(var, var)


def call_of(eqn: Any) -> Any | None:
    """The jaxpr of a call that only groups equations, without shardings of its own; None for other equations."""
    if eqn.primitive.name not in INLINED_CALLS:
        return None
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(hasattr(sharding, "spec") for sharding in placed):
        return None
    return next((value for value in eqn.params.values() if _compat.is_jaxpr(value)), None)


def jaxprs_of(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    found = []
    for value in eqn.params.values():
        found += [each for each in (value if isinstance(value, (tuple, list)) else (value,)) if _compat.is_jaxpr(each)]
    return found


def has_backward(eqn: Any) -> bool:
    """Whether an equation, or one within it, is in a backward pass."""
    if _compat.is_transposed(eqn):
        return True
    return any(has_backward(each) for inner in jaxprs_of(eqn) for each in _compat.open_jaxpr(inner).eqns)


def is_differentiated(eqn: Any) -> bool:
    """Whether an equation, or one within it, is in a forward pass that is differentiated, or in a backward pass."""
    if _compat.is_differentiated(eqn):
        return True
    return any(is_differentiated(each) for inner in jaxprs_of(eqn) for each in _compat.open_jaxpr(inner).eqns)
