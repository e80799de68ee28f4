"""The operators that may be in a slice, in NumPy and float64: a proof compiles nothing and runs inside any trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.sharding.rewrite.slices import COMPARISONS, SIZE_FREE

_BINARY = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum,
    "and": np.logical_and, "or": np.logical_or, "eq": np.equal, "ge": np.greater_equal, "ne": np.not_equal,
    "gt": np.greater, "le": np.less_equal, "lt": np.less, "min": np.minimum,
}  # fmt: skip
_UNARY = {
    "abs": np.abs, "sign": np.sign, "exp": np.exp,
    "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "neg": np.negative,
    "sqrt": np.sqrt, "square": np.square, "tanh": np.tanh, "not": np.logical_not, "is_finite": np.isfinite,
    "rsqrt": lambda x: 1 / np.sqrt(x), "logistic": lambda x: 1 / (1 + np.exp(-x)), "stop_gradient": lambda x: x,
    "one_minus_square": lambda x: 1 - x * x, "zeros_like": np.zeros_like,
}  # fmt: skip
_REDUCTIONS = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_and": np.all, "reduce_or": np.any}


def wide(array: Any) -> np.ndarray:
    """Return an array in float64 if it is of floats."""
    found = np.asarray(array)
    return found.astype(np.float64) if jnp.issubdtype(found.dtype, jnp.floating) else found


def evaluate_operator(op: str, params: Mapping[str, Any], *operands: np.ndarray) -> np.ndarray:
    """Return the result of an operator.

    Args:
        op: the name of its primitive, one of `SIZE_FREE` and `COMPARISONS`.
        params: its parameters.
        *operands: its operands; floats are float64.
    """
    with np.errstate(all="ignore"):
        if op in _BINARY:
            return _BINARY[op](*operands)
        if op in _UNARY:
            return _UNARY[op](*operands)
        if op in _REDUCTIONS:
            return np.asarray(_REDUCTIONS[op](operands[0], axis=tuple(params["axes"])))
        return _OTHERS[op](params, *operands)


def _dot_general(params: Mapping[str, Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (a_contracted, b_contracted), (a_batch, b_batch) = params["dimension_numbers"]
    letters = iter(range(a.ndim + b.ndim))
    names_a = [next(letters) for _ in range(a.ndim)]
    names_b = [next(letters) for _ in range(b.ndim)]
    for d, e in zip((*a_contracted, *a_batch), (*b_contracted, *b_batch), strict=True):
        names_b[e] = names_a[d]
    free = [n for d, n in enumerate(names_a) if d not in (*a_contracted, *a_batch)]
    free += [n for d, n in enumerate(names_b) if d not in (*b_contracted, *b_batch)]
    return np.einsum(a, names_a, b, names_b, [*(names_a[d] for d in a_batch), *free])


def _broadcast_in_dim(params: Mapping[str, Any], x: np.ndarray, *_: Any) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for d, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[d] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _convert(params: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    target = params["new_dtype"]
    return x.astype(np.float64 if jnp.issubdtype(target, jnp.floating) else target)


def _ordered(x: np.ndarray, dimensions: Sequence[int] | None) -> np.ndarray:
    return x if dimensions is None else x.transpose(dimensions)


def _select(params: Mapping[str, Any], which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.where(which, cases[1], cases[0])


_OTHERS: dict[str, Callable[..., np.ndarray]] = {
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _convert,
    "select_n": _select,
    "integer_pow": lambda params, x: x ** float(params["y"]),
    "reshape": lambda params, x: _ordered(x, params["dimensions"]).reshape(params["new_sizes"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "expand_dims": lambda params, x: np.expand_dims(x, tuple(params["dimensions"])),
}

assert {*_BINARY, *_UNARY, *_REDUCTIONS, *_OTHERS} == SIZE_FREE | COMPARISONS, (
    "the table and `slices` name other operators"
)
