"""Finds the optimizer's state of a step, and an order of its update that needs only a small part of it at a time.

    optimizer state = state of a floating type that neither the forward nor the backward pass reads, with the shape of a
                      state array that one of them reads: moments, traces, averages of parameters

Small arrays, such as the moments of biases, stay on the device (`constants.py`).

The update runs parameter by parameter: the equations that a new value needs are evaluated together. Optimizers are
usually written the other way round, as one loop over all parameters for each formula. The update of a stacked parameter
becomes a loop over its layers (`update_loops`). The moments of other parameters come at the beginning of the step and
leave at its end, as compilers schedule them, and count as device memory until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard import _compat
from autoshard.sharding.offload.constants import SMALL_SHARE, SMALLEST_BYTES
from autoshard.sharding.offload.edits import is_differentiated
from autoshard.sharding.offload.update_loops import stack_lengths, update_loop
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
    sizes = {pair: nbytes(jaxpr.invars[pair[0]].aval) for pair in found}
    small = _small(sizes)
    return [pair for pair in found if pair not in small]


def _small(sizes: Mapping[tuple[int, int], float]) -> set[tuple[int, int]]:
    """The smallest arrays: each has less than `SMALL_SHARE` of the bytes of the largest, and together of all bytes."""
    small: set[tuple[int, int]] = set()
    total, largest, so_far = sum(sizes.values()), max(sizes.values(), default=0.0), 0.0
    for pair, size in sorted(sizes.items(), key=lambda item: item[1]):
        so_far += size
        if size < SMALL_SHARE * largest and so_far < SMALL_SHARE * total:
            small.add(pair)
    return small


def update_order(closed: Any, moved: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the equations of a program in an order in which the optimizer's update runs parameter by parameter.

    The update of a stacked parameter is an `UpdateLoop` in place of its equations, where that is possible.

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
    lengths, done = stack_lengths(order), {id(eqn) for eqn in order}
    inputs, results = {jaxpr.invars[i] for i, _ in moved}, {o for _, o in moved}
    users: dict[Any, set[int]] = {}
    for eqn in jaxpr.eqns:
        for var in map(_variable, eqn.invars):
            users.setdefault(var, set()).add(id(eqn))
    of_program = {*map(_variable, jaxpr.outvars)}

    def as_loop(update: list[Any], shape: tuple[int, ...]) -> list[Any] | None:
        own = {id(eqn) for eqn in update}
        later = {v for eqn in update for v in eqn.outvars if v in of_program or users.get(v, set()) - own}
        found = update_loop(update, shape, later)
        return found and [*found[0], found[1]]

    # A parameter's new value needs its moments, so these are computed with it.
    for n in sorted(range(len(jaxpr.outvars)), key=lambda n: n in results):
        update: list[Any] = []
        _append_with_operands(made_by.get(_variable(jaxpr.outvars[n])), made_by, done, update)
        shape = tuple(jaxpr.outvars[n].aval.shape)
        if inputs & _operands(update):
            alike = [jaxpr.outvars[o] for o in results if jaxpr.outvars[o].aval.shape == shape]
            state = _state_of(update, alike, made_by, done, inputs)
            loops = len(shape) > 1 and shape[0] in lengths
            found = as_loop([*update, *state], shape) if loops else [*update, *state]
            if found is not None:
                done |= {id(eqn) for eqn in state}
            update = found or as_loop(update, shape) or update
        order += update
    for eqn in jaxpr.eqns:
        _append_with_operands(eqn, made_by, done, order)
    return order


def _state_of(
    update: Sequence[Any], results: Iterable[Any], made_by: dict[Any, Any], done: set[int], inputs: set[Any]
) -> list[Any]:
    """The equations that make the new values of a parameter's state, beyond those of its update.

    A step may choose between the new state and the old one, or average the new values of the parameter. Together with
    the update, the new values of all its state are made once, layer by layer.

    Args:
        update: the equations of the parameter's new value.
        results: new values of state with the parameter's shape.
        made_by: variable -> the equation that makes it.
        done: the equations that stand before, by `id`.
        inputs: the old values of the optimizer's state.
    """
    own = inputs & _operands(update)  # and what is computed from it
    for eqn in update:
        if own & _operands([eqn]):
            own |= {var for var in eqn.outvars if var.aval.shape}
    done, found = {*done, *map(id, update)}, []
    for var in results:
        chain: list[Any] = []
        before = {*done}
        _append_with_operands(made_by.get(_variable(var)), made_by, before, chain)
        if own & _operands(chain):
            found, done = [*found, *chain], before
    return found


def _operands(eqns: Iterable[Any]) -> set[Any]:
    return {var for eqn in eqns for var in map(_variable, eqn.invars)} - {None}


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
    needed = _operands(eqns)
    for eqn in reversed(jaxpr.eqns):
        if any(var in needed for var in eqn.outvars):
            needed |= {var for var in map(_variable, eqn.invars) if var is not None}
    return needed


def _variable(atom: Any) -> Any:
    """The variable of an operand or result; None for a literal."""
    return None if isinstance(atom, _compat.Literal) else atom
