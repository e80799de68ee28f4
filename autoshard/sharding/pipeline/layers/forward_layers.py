"""Finds the layers of a program without gradients, such as an evaluation loss or a function that returns logits.

The layers are then the scan with most weights, or equal blocks of operators. No other operator may take these weights:
it would run the layers a second time, on all devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax.numpy as jnp

from autoshard import _compat
from autoshard.sharding.microbatches.flow import HEAVY
from autoshard.sharding.pipeline.layers.layer_runs import Run
from autoshard.sharding.program.array_sizes import nbytes


def find_layers(jaxpr: Any, whole: int) -> tuple[Any | None, str]:
    """Return the scan over the layers of a program without gradients, or None and the reason.

    Args:
        jaxpr: the program of one microbatch, see `cut_stages`.
        whole: the number of inputs that all microbatches share.
    """
    found: Any = None
    most, shared = 0, _weights(jaxpr.invars[:whole])
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and _compat.scan_arity(eqn.params)[1]:
            size = sum(nbytes(v.aval) for v in _slices(eqn, shared))
            found, most = (eqn, size) if size > most else (found, most)
    if found is None:
        return None, ""
    weights = _slices(found, shared)
    other = next((eqn for eqn in jaxpr.eqns if eqn is not found and weights & {*_variables(eqn.invars)}), None)
    return (found, "") if other is None else (None, _taken_twice(found, other, weights))


def layers_alone(run: Run, shared: Collection[Any]) -> int:
    """Return the bytes of the weights of a run of layers; 0 if it may have gradients.

    Gradients take the weights again, or products of them and of values within the layers.
    """
    of_layers = (o.atoms for o in run.of_kind("slices"))
    weights = {v for atoms in of_layers if all(_is_in(v, shared) for v in atoms) for v in _weights(atoms)}
    outside = (*run.eqns[: run.first], *run.eqns[run.end :])
    ends = {run.variables(carry.made)[-1] for carry in run.of_kind("carry")}
    within = {v for v in run.made if v not in ends}
    if not ends or any(weights & {*_variables(eqn.invars)} for eqn in outside):
        return 0
    if any(eqn.primitive.name in HEAVY and within & {*_variables(eqn.invars)} for eqn in outside):
        return 0
    return sum(nbytes(v.aval) for v in weights)


def _taken_twice(layers: Any, other: Any, weights: set[Any]) -> str:
    value = next(v for v in _variables(other.invars) if v in weights)
    one, two = (_compat.program_line(eqn) or eqn.primitive.name for eqn in (layers, other))
    return (
        f"weights {value.aval.str_short()} of the layers at {one} are taken by another operator, at {two}, which does "
        "not compute their gradients from residuals of the layers"
    )


def _slices(eqn: Any, weights: set[Any]) -> set[Any]:
    return weights.intersection(_variables(eqn.invars[sum(_compat.scan_arity(eqn.params)) :]))


def _weights(variables: Iterable[Any]) -> set[Any]:
    return {v for v in variables if jnp.issubdtype(v.aval.dtype, jnp.inexact)}


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, _compat.Literal)]


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    return not isinstance(atom, _compat.Literal) and atom in variables
