"""Replaces collectives over axes that `jax.vmap` names by reductions.

``jax.lax.psum(x, "batch")`` under ``jax.vmap(..., axis_name="batch")`` adds along a dimension of an ordinary array.
JAX keeps the primitive `psum` for it, with the number of the dimension in place of the axis's name. This is
`reduce_sum`, which has a rule. Other collectives under `vmap` become gathers, transposes and iotas in JAX itself.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from autoshard import _compat

_REDUCTIONS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def as_reduction(eqn: Any) -> Any:
    """Returns the reduction that an equation computes if it is a collective over dimensions, else the equation."""
    reduce = _REDUCTIONS.get(eqn.primitive.name)
    if reduce is None or not all(isinstance(axis, int) for axis in eqn.params["axes"]):
        return eqn
    axes = tuple(eqn.params["axes"])
    jaxpr = jax.make_jaxpr(lambda x: reduce(x, axes))(_compat.shape_dtype_of(eqn.invars[0]))
    (reduction,) = _compat.open_jaxpr(jaxpr).eqns
    return eqn.replace(primitive=reduction.primitive, params=reduction.params)
