"""Finds loops that update the state several times in one step, which cannot be cut into microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autoshard import _compat


def update_loop(closed: Any, batch: Iterable[int]) -> tuple[Any, int] | None:
    """Return a loop that takes an input of the step, replaces it in each iteration by the batch, and returns it.

    Args:
        closed: the step's closed jaxpr, with calls inlined.
        batch: the inputs that have the batch.

    Returns:
        The loop's equation and the number of the input; None if there is none.
    """
    jaxpr = _compat.open_jaxpr(closed)
    from_batch = {jaxpr.invars[i] for i in batch}
    inputs = {var: i for i, var in enumerate(jaxpr.invars) if i not in {*batch}}
    results = {var for var in jaxpr.outvars if not isinstance(var, _compat.Literal)}
    for eqn in jaxpr.eqns:
        variables = [a for a in eqn.invars if not isinstance(a, _compat.Literal)]
        if from_batch.isdisjoint(variables):
            continue
        from_batch.update(eqn.outvars)
        for before, after in _carry(eqn):
            if not isinstance(before, _compat.Literal) and before in inputs and after in results:
                return eqn, inputs[before]
    return None


def _carry(eqn: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of the values of a loop's carry before and after it."""
    if eqn.primitive.name == "scan":
        first, count = _compat.scan_arity(eqn.params)
    elif eqn.primitive.name == "while":
        first, count = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"], len(eqn.outvars)
    else:
        return []
    return [*zip(eqn.invars[first : first + count], eqn.outvars[:count], strict=True)]
