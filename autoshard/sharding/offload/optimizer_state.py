"""Finds the optimizer's state of a step, and an order of its update that needs few of these arrays at a time.

    optimizer state = state of a floating type that neither the forward nor the backward pass reads, with the shape of a
                      state array that one of them reads: moments, traces, averages of parameters

The update runs leaf by leaf: the equations that a parameter's new value needs are evaluated together. So a moment is
brought, used and sent back before the next leaf's moments come. Optimizers are usually written the other way round, as
one loop over all leaves for each formula; then all moments would be on the device at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autoshard import _compat
from autoshard.sharding.offload.constants import SMALLEST_BYTES
from autoshard.sharding.offload.edits import is_differentiated
from autoshard.sharding.program.array_sizes import is_float, nbytes


def optimizer_state(closed: Any, state: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs (input, result) of the optimizer's state.

    Args:
        closed: the program, with its calls inlined.
        state: the pairs of all state.
    """
    jaxpr = _compat.open_jaxpr(closed)
    read = {jaxpr.invars.index(var) for var in _needed(jaxpr, filter(is_differentiated, jaxpr.eqns)) & {*jaxpr.invars}}
    if not read:
        return []
    shapes = {jaxpr.invars[i].aval.shape for i, _ in state if i in read}
    found = []
    for i, o in state:
        aval = jaxpr.invars[i].aval
        if i in read or _compat.is_on_host(aval) or jaxpr.outvars[o] is jaxpr.invars[i]:
            continue
        if aval.shape in shapes and nbytes(aval) >= SMALLEST_BYTES and is_float(aval):
            found.append((i, o))
    return found


def update_order(closed: Any, moved: Sequence[tuple[int, int]]) -> tuple[list[Any], dict[Any, tuple[Any, ...]]]:
    """Order the equations of a program so that the optimizer's update runs leaf by leaf.

    Returns:
        The equations in their new order; and for each moved input what must be computed before it is brought: the
        gradient of its parameter, and the new value of the parameter before. Without that, compilers bring all of the
        state at the beginning of the step.

    Args:
        closed: the program, with its calls inlined.
        moved: the pairs (input, result) of the optimizer's state.
    """
    jaxpr = _compat.open_jaxpr(closed)
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    fixed = [eqn for eqn in jaxpr.eqns if is_differentiated(eqn) or eqn.effects]
    needed = _needed(jaxpr, fixed)
    first = {id(eqn) for eqn in fixed} | {id(made_by[var]) for var in needed if var in made_by}
    order = [eqn for eqn in jaxpr.eqns if id(eqn) in first]
    done = {id(eqn) for eqn in order}
    results, inputs = {o for _, o in moved}, {jaxpr.invars[i] for i, _ in moved}
    made_before = {var for eqn in order for var in eqn.outvars}
    waits: dict[Any, tuple[Any, ...]] = {}
    last: tuple[Any, ...] = ()
    # A parameter's new value needs its moments, so these are computed with it.
    for n in sorted(range(len(jaxpr.outvars)), key=lambda n: n in results):
        start = len(order)
        _append_with_operands(made_by.get(_variable(jaxpr.outvars[n])), made_by, done, order)
        taken = dict.fromkeys(var for eqn in order[start:] for var in map(_variable, eqn.invars) if var is not None)
        brought = [var for var in taken if var in inputs and var not in waits]
        for var in brought:
            gradients = [v for v in taken if v in made_before and v.aval.shape == var.aval.shape]
            waits[var] = (*gradients[:1], *last)
        last = (jaxpr.outvars[n],) if brought else last
    for eqn in jaxpr.eqns:
        _append_with_operands(eqn, made_by, done, order)
    return order, waits


def _append_with_operands(eqn: Any, made_by: dict[Any, Any], done: set[int], order: list[Any]) -> None:
    """Append an equation to the order, after those that make its operands."""
    waiting = [eqn] if eqn is not None else []
    while waiting:
        last = waiting[-1]
        missing = [each for atom in last.invars if (each := made_by.get(_variable(atom))) and id(each) not in done]
        if missing:
            waiting += reversed(missing)
            continue
        waiting.pop()
        if id(last) not in done:
            done.add(id(last))
            order.append(last)


def _needed(jaxpr: Any, eqns: Iterable[Any]) -> set[Any]:
    """The variables that equations take, directly or through other equations."""
    needed = {var for eqn in eqns for var in map(_variable, eqn.invars) if var is not None}
    for eqn in reversed(jaxpr.eqns):
        if any(var in needed for var in eqn.outvars):
            needed |= {var for var in map(_variable, eqn.invars) if var is not None}
    return needed


def _variable(atom: Any) -> Any:
    """The variable of an operand or result; None for a literal."""
    return None if isinstance(atom, _compat.Literal) else atom
