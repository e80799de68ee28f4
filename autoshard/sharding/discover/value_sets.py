"""Sets of values for `discover`, which differ in sign, magnitude and ties, so that no wrong guess fits all of them.

Each kind of set refutes different wrong guesses. Numbers of both signs distinguish a sum after a ReLU from a maximum.
Negative numbers distinguish a maximum with 0 from a maximum of the elements. Ties distinguish the first of equal
elements from the last. If one half of the values is much larger than the other, one piece alone does not give the whole
result.

The caller's own values come first, then small changes of these. They keep what a function expects of its arguments: a
matrix that can be factored, an index within its range. All magnitudes are chosen, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.sharding.oracle.cases import is_key, to_numpy
from autoshard.sharding.oracle.probe_values import random_like

KINDS = (
    "given", "scaled", "noisy", "mixed", "ties", "negative", "positive", "uneven",
    "large", "small", "mixed", "ties", "uneven", "mixed", "uneven", "mixed",
)  # fmt: skip
_CHANGES = ("given", "scaled", "noisy")


def value_sets(operands: Sequence[Any], given: Sequence[bool], rounds: int = 1) -> list[list[np.ndarray]]:
    """Returns sets of operands, one for each of `KINDS` in each round.

    Args:
        operands: an example of each operand, with its shape and dtype.
        given: for each operand, whether the example's values are the caller's own.
        rounds: how many times to go through the kinds.
    """
    sizes = [n for x in operands if jnp.issubdtype(x.dtype, jnp.inexact) for n in x.shape if n > 1]
    top = min(sizes, default=4)  # an upper bound for integers, so that they are valid indices into any dimension
    sets = []
    for number, kind in enumerate(KINDS * rounds):
        rng = np.random.default_rng([number, 11])
        sets.append([_values(x, kind, own, top, rng) for x, own in zip(operands, given, strict=True)])
    return sets


def _values(example: Any, kind: str, own: bool, top: int, rng: np.random.Generator) -> np.ndarray:
    x = to_numpy(example)
    if is_key(example.dtype):
        return x if kind == "given" and own else rng.integers(0, 2**32, x.shape, np.uint32).astype(x.dtype)
    if not x.size:
        return x
    own = own and (x.size == 1 or bool((x != x.flat[0]).any()))  # constant values are not informative
    if x.dtype == np.bool_:
        return x if kind == "given" and own else random_like(x, rng)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _integers(x, kind, own, top, rng)
    return _changed(x, kind, rng) if own and kind in _CHANGES else _numbers(x, kind, rng)


def _changed(x: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """The caller's own values, or values near them."""
    if kind == "given":
        return x
    factor = 1.7 if kind == "scaled" else rng.uniform(0.95, 1.05, x.shape)
    return np.asarray(x * factor).astype(x.dtype)


def _numbers(x: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    values = random_like(x, rng).astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)
    if kind == "ties" and not np.iscomplexobj(values):
        values = np.where(values < 0, np.floor(values), np.maximum(np.ceil(values), 1.0))
    elif kind in ("negative", "positive"):
        values = (np.abs(values) + 0.1) * (1 if kind == "positive" else -1)
    elif kind == "uneven":
        values = values * _blocks(x.shape, rng)
    elif kind in ("large", "small"):
        values = values * 10.0 ** rng.uniform(*((0.5, 2.5) if kind == "large" else (-3, -1)))
    return values.astype(x.dtype)


def _blocks(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Factors between 1/10 and 10 that are constant within each half of each dimension."""
    factors = 10.0 ** rng.uniform(-1, 1, [min(n, 2) for n in shape])
    for axis, n in enumerate(shape):
        if n > 2:
            factors = np.repeat(factors, [(n + 1) // 2, n // 2], axis)
    return factors


def _integers(x: np.ndarray, kind: str, own: bool, top: int, rng: np.random.Generator) -> np.ndarray:
    """Integers: the caller's own, these shuffled, others in their range, indices below `top`, or small numbers."""
    if own and kind in _CHANGES:
        return x if kind == "given" else rng.permutation(x.reshape(-1)).reshape(x.shape)
    low, high = (int(x.min()), int(x.max()) + 1) if own else (0, top)
    if kind in ("negative", "large") and not jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        low, high = (-7, 8) if kind == "large" else (-7, 0)
    elif kind == "ties":
        high = min(high, low + 2)
    return rng.integers(low, high, x.shape).astype(x.dtype)


def rounded(operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The operands with a relative change of one machine epsilon in each number, like one more rounding."""
    rng = np.random.default_rng(5)

    def perturbed(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        factor = 1 + float(jnp.finfo(x.dtype).eps) * rng.choice([-1.0, 1.0], x.shape)
        return np.asarray(x * factor).astype(x.dtype)

    return list(map(perturbed, operands))
