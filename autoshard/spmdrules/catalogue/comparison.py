"""Comparisons, logic and predicates. Their results are booleans, so they have no gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.spmdrules.catalogue.entry import Operator, f32

_NOTE = "no gradient: booleans"
_X, _Y = f32(4, 8), f32(4, 8)
_SMALL_INTS = np.array([[0, 1, 2, 0, 3, 1, 2, 2], [1, 1, 0, 2, 3, 3, 0, 1]] * 2, np.int32)
_ROLLED_INTS = np.roll(_SMALL_INTS, 1, 1)
_SPECIAL_VALUES = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -2.0, 0.5]] * 4, np.float32)
_BOOLS = jax.ShapeDtypeStruct((4, 8), jnp.bool_)

_COMPARISONS = {
    "equal": jnp.equal,
    "not_equal": jnp.not_equal,
    "greater": jnp.greater,
    "greater_equal": jnp.greater_equal,
    "less": jnp.less,
    "less_equal": jnp.less_equal,
}
_CONNECTIVES = {"logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor}
_PREDICATES = {
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isfinite": jnp.isfinite,
    "isposinf": jnp.isposinf,
    "isneginf": jnp.isneginf,
    "signbit": jnp.signbit,
}
OPERATORS: tuple[Operator, ...] = (
    *(Operator(name, fn, (_SMALL_INTS, _ROLLED_INTS), (), _NOTE) for name, fn in _COMPARISONS.items()),
    *(Operator(name, fn, (_BOOLS, _BOOLS), (), _NOTE) for name, fn in _CONNECTIVES.items()),
    Operator("logical_not", jnp.logical_not, (_BOOLS,), (), _NOTE),
    *(Operator(name, fn, (_SPECIAL_VALUES,), (), _NOTE) for name, fn in _PREDICATES.items()),
    Operator("isclose", partial(jnp.isclose, atol=0.5), (_X, _Y), (), _NOTE),
    Operator("allclose", partial(jnp.allclose, atol=0.5), (_X, _Y), (), _NOTE),
    Operator("array_equal", jnp.array_equal, (_SMALL_INTS, _ROLLED_INTS), (), _NOTE),
    Operator("isin", jnp.isin, (_SMALL_INTS, np.array([1, 3, 3, 7], np.int32)), (), _NOTE),
)
