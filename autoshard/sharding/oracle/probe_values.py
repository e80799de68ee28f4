"""Values that distinguish a right rule from a wrong one, and the comparison of results.

Values recorded from a program are often zeros, ones or masks, for which a sum, a maximum and a copy agree. Each
operator is therefore run on several sets of operands: first the recorded values where they are informative, then random
values of both signs and various magnitudes. Indices stay in range, except in the later sets (see `_indices`).
All magnitudes and shares are chosen, not measured.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.sharding.oracle.cases import Case, is_key, to_numpy
from autoshard.sharding.oracle.constants import BOOLEAN_TRIALS, NARROWEST_TOLERANCE, TOLERANCES, TRIALS
from autoshard.spmdrules.custom_ops.opaque_primitive import drawn_operands, is_operator
from autoshard.spmdrules.families.grouped_matmul import drawn_group_sizes

# Integer operands that random values would make invalid (pivots). Their recorded values are kept.
_RECORDED_ONLY = {"lu_pivots_to_permutation": (0,), "geqp3": (1,)}


def trials(case: Case, count: int = TRIALS) -> list[list[np.ndarray]]:
    """Sets of operands to run an operator on, and `BOOLEAN_TRIALS` more for an operator with boolean operands.

    Args:
        case: the operator with its recorded operands.
        count: the number of sets.
    """
    boolean = any(a.dtype == np.bool_ for a in case.avals)
    return [_operands(case, trial) for trial in range(count + BOOLEAN_TRIALS * boolean)]


def _operands(case: Case, trial: int) -> list[np.ndarray]:
    rng = np.random.default_rng([trial, 7])
    ranges, drawn = index_ranges(case), _drawn(case, rng)
    operands = []
    for i, operand in enumerate(case.operands):
        recorded = to_numpy(operand)
        if i in _RECORDED_ONLY.get(case.name, ()) or not recorded.size or (trial == 0 and is_key(operand.dtype)):
            operands.append(recorded)
        elif i in drawn:
            operands.append(recorded if trial == 0 and _informative(recorded) else drawn[i].astype(recorded.dtype))
        elif is_key(operand.dtype):
            operands.append(rng.integers(0, 2**32, recorded.shape, np.uint32).astype(recorded.dtype))
        elif i in ranges:
            operands.append(_indices(case, recorded, ranges[i], trial, rng))
        elif trial == 0 and _informative(recorded):
            operands.append(recorded)
        elif case.name == "select_n" and i == 0 and _integer(recorded):
            operands.append(rng.integers(0, len(case.operands) - 1, recorded.shape).astype(recorded.dtype))
        else:
            values = random_like(recorded, rng)
            values = _with_ties(values) if trial % 3 == 1 else values
            values = _solvable(values) if case.name == "triangular_solve" and i == 0 else values
            operands.append(_with_nonfinite(values, rng) if case.name == "is_finite" else values)
    return operands


def _drawn(case: Case, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Valid random values of operands that have to fit the others: sizes of groups, and what an operator draws."""
    if is_operator(case.eqn.primitive):
        return drawn_operands(case.eqn.params["fn"], case.avals, rng)
    if case.name == "ragged_dot_general":
        (ragged,) = case.eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        return {2: drawn_group_sizes(rng, case.avals[2].shape, case.avals[0].shape[ragged])}
    return {}


def _solvable(matrices: np.ndarray) -> np.ndarray:
    """Triangular matrices with a large diagonal. The solutions of others would be mostly rounding error."""
    size = matrices.shape[-1]
    diagonal = np.eye(size, dtype=bool)
    return np.where(diagonal, matrices + np.copysign(2, np.real(matrices)), matrices / size).astype(matrices.dtype)


def _with_nonfinite(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Replaces some values by infinity or NaN."""
    return np.where(rng.uniform(size=values.shape) < 0.3, rng.choice([np.inf, np.nan], values.shape), values).astype(
        values.dtype
    )


def _with_ties(values: np.ndarray) -> np.ndarray:
    """Rounds floats to integers other than zero, so that some are equal: random floats hardly ever are."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values
    wide = values.astype(np.float64)
    return np.where(wide < 0, np.floor(wide), np.maximum(np.ceil(wide), 1.0)).astype(values.dtype)


def random_like(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random values of the shape and dtype of `x`, of both signs and various magnitudes."""
    if x.dtype == np.bool_:
        return _random_bools(x.shape, rng)
    if _integer(x):
        low = 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -7
        return rng.integers(low, 8, x.shape).astype(x.dtype)
    values = rng.normal(size=x.shape) * rng.uniform(0.3, 3.0, x.shape)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        values = values + 1j * rng.normal(size=x.shape)
    return np.asarray(values).astype(x.dtype)


def _random_bools(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Blocks of true, of false and of both, so that `and`, `or` and `xor` differ between shards."""
    density = rng.choice([0.0, 0.5, 1.0], [min(n, 2) for n in shape])
    for axis, n in enumerate(shape):
        if n > 2:
            density = np.repeat(density, [(n + 1) // 2, n // 2], axis)
    return rng.uniform(size=shape) < density


def _informative(x: np.ndarray) -> bool:
    if x.size == 1:
        return bool(np.isfinite(np.asarray(x, np.complex128)).all() and x.any())
    return bool((x != x.flat[0]).any())


def _integer(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


def index_ranges(case: Case) -> dict[int, np.ndarray]:
    """For each operand that holds indices, the largest valid index (for each component of its last dimension)."""
    if is_operator(case.eqn.primitive):  # its name is the user's and may be that of a primitive
        return {}
    shapes = [a.shape for a in case.avals]
    numbers = case.eqn.params.get("dimension_numbers")
    if case.name == "dynamic_slice":
        room = np.subtract(shapes[0], case.eqn.params["slice_sizes"])
        return {1 + d: room[d] for d in range(len(room))}
    if case.name == "dynamic_update_slice":
        room = np.subtract(shapes[0], shapes[1])
        return {2 + d: room[d] for d in range(len(room))}
    if case.name == "gather":
        room = np.subtract(shapes[0], case.eqn.params["slice_sizes"])
        return {1: room[list(numbers.start_index_map)]}
    if case.name.startswith("scatter"):
        window = np.ones(len(shapes[0]), int)
        dropped = {*numbers.inserted_window_dims, *getattr(numbers, "operand_batching_dims", ())}
        kept = [d for d in range(len(shapes[0])) if d not in dropped]
        window[kept] = [shapes[2][d] for d in numbers.update_window_dims]
        return {1: np.subtract(shapes[0], window)[list(numbers.scatter_dims_to_operand_dims)]}
    return {}


def _indices(case: Case, recorded: np.ndarray, top: np.ndarray, trial: int, rng: np.random.Generator) -> np.ndarray:
    """Random indices; distinct or sorted where the operator's parameters promise that.

    From the third set on, some are out of bounds, except with PROMISE_IN_BOUNDS: all other modes define the result.
    """
    if trial == 0 and _informative(recorded):
        return recorded
    ordered = bool(case.eqn.params.get("indices_are_sorted"))
    overwrites = case.name == "scatter" and recorded.size > np.size(top)  # the result of equal indices is undefined
    if ordered or overwrites or case.eqn.params.get("unique_indices"):
        return _distinct(case, recorded, top, rng, ordered)
    in_bounds = str(case.eqn.params.get("mode", "")).endswith("PROMISE_IN_BOUNDS")
    beyond = 0 if trial < 2 or in_bounds else 3
    below = 0 if jnp.issubdtype(recorded.dtype, jnp.unsignedinteger) else beyond
    return rng.integers(-below, np.asarray(top) + 1 + beyond, recorded.shape).astype(recorded.dtype)


def _distinct(case: Case, recorded: np.ndarray, top: np.ndarray, rng: np.random.Generator, ordered: bool) -> np.ndarray:
    """Distinct random indices; the recorded ones if there are too few distinct ones, or if windows might overlap."""
    extents = np.asarray(top) + 1
    rows, count = recorded.size // max(1, np.size(top)), int(np.prod(extents))
    numbers = case.eqn.params["dimension_numbers"]
    mapped = getattr(numbers, "scatter_dims_to_operand_dims", ())
    if rows > count or any(case.avals[0].shape[d] > n for d, n in zip(mapped, extents, strict=False)):
        return recorded
    chosen = rng.choice(count, rows, replace=False)
    indices = np.unravel_index(np.sort(chosen) if ordered else chosen, tuple(extents))
    return np.stack(indices, -1).reshape(recorded.shape).astype(recorded.dtype)


def difference(whole: np.ndarray, other: np.ndarray, tolerance: float | None = None) -> str | None:
    """Describes how two results differ; None if they agree within a tolerance, by default that of their dtype."""
    if whole.shape != other.shape:
        return f"shape {other.shape} instead of {whole.shape}"
    if whole.dtype != other.dtype:
        return f"dtype {other.dtype} instead of {whole.dtype}"
    if not whole.size:
        return None
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        wrong = int(np.sum(whole != other))
        return f"{wrong} of {whole.size} elements differ" if wrong else None
    error = relative_error(whole, other)
    allowed = TOLERANCES.get(_real_bytes(whole.dtype), NARROWEST_TOLERANCE) if tolerance is None else tolerance
    return None if error <= allowed else f"largest relative error {error:.3g} (allowed {allowed:g})"


def _real_bytes(dtype: Any) -> int:
    return np.dtype(dtype).itemsize // (2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1)


def relative_error(whole: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of an element, relative to its own magnitude plus the median magnitude."""
    a, b = np.asarray(whole, np.complex128), np.asarray(other, np.complex128)
    finite = np.isfinite(a)
    if (finite != np.isfinite(b)).any() or (np.isnan(a) != np.isnan(b)).any():
        return float("inf")
    infinite = np.isinf(a)
    if (a[infinite] != b[infinite]).any():
        return float("inf")
    a, b = a[finite], b[finite]
    if not a.size:
        return 0.0
    size = np.abs(a)
    typical = np.median(size) or size.mean() or 1e-30
    return float((np.abs(a - b) / (size + typical)).max())
