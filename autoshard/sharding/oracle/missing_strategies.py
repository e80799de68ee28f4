"""Finds strategies that an operator allows and its rule does not declare, and checks declared linearity."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from autoshard.sharding.oracle.cases import Case, is_key
from autoshard.sharding.oracle.constants import (
    LINEARITY_TRIALS,
    MIN_COMPARED_ELEMENTS,
    PIECE_COUNTS,
    SEARCH_TRIALS,
    STRICT_TOLERANCE,
)
from autoshard.sharding.oracle.probe_values import difference, random_like, trials
from autoshard.sharding.oracle.shards import reduce_pieces
from autoshard.spmdrules.core.rule import Rule, Shard

_MIN_MANTISSA_BITS = 5  # with fewer bits, a dtype does not hold the quarters up to 8 that `_exact_terms` uses
# Operators whose linearity cannot be decided: they reduce with a user's function, or are the identity up to rounding.
_UNDECIDABLE = ("reduce", "reduce_window", "nextafter")
Split = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, ...]]
_REDUCTIONS = ("sum", "max", "min", "mul", "and", "or", "xor")


def smallest_divisor(size: int | None) -> int | None:
    """The fewest equal pieces that a dimension can be split into; None if no count of `PIECE_COUNTS` divides it."""
    return next((n for n in PIECE_COUNTS if size and size % n == 0), None)


def missing_factors(case: Case, rule: Rule) -> list[tuple[str, str]]:
    """Finds factors that are `whole` in the rule, although the operator can run on pieces of them.

    Args:
        case: the operator to check.
        rule: its rule.

    Returns:
        For each such factor, its name and how the results of the pieces are joined.
    """
    found = []
    for factor in rule.factors:
        if factor.kind == "whole" and smallest_divisor(factor.size):
            if how := _how_to_join(case, rule, factor.name, trials(case, SEARCH_TRIALS)):
                found.append((factor.name, how))
    return found


def _how_to_join(case: Case, rule: Rule, name: str, operand_sets: Sequence[Sequence[np.ndarray]]) -> str | None:
    """One way to join each result's pieces that holds on all sets of operands; None if some result has no such way."""
    axes = [_axis(rule, dims, name) for dims in rule.operands]
    if all(axis is None for axis in axes):
        return None
    ways: list[set[str]] | None = None
    informative = False  # constant results may refute a way of joining, but do not support one
    for operands in operand_sets:
        whole = case.run(operands)
        informative = informative or is_informative(whole)
        try:
            pieces = _run_pieces(case, rule, name, axes, operands)
        except Exception:  # an operator may reject pieces with any error: then there is nothing to join
            return None
        if any(len(piece) != len(whole) for piece in pieces):
            return None
        holds = [_ways_that_hold(case, r, w, [p[r] for p in pieces]) for r, w in enumerate(whole)]
        ways = holds if ways is None else [a & b for a, b in zip(ways, holds, strict=True)]
        if not all(ways):
            return None
    return ", ".join(min(way) for way in ways) if ways and informative else None


def is_informative(results: Sequence[np.ndarray]) -> bool:
    """Whether results are evidence: each has finite elements, and one has elements that differ (a scalar: not zero)."""
    exact = [np.asarray(x, np.complex128) for x in results]
    finite = [x[np.isfinite(x)] for x in exact]
    return all(x.size for x in finite) and any(
        f.any() if x.size == 1 else (f != f.flat[0]).any() for x, f in zip(exact, finite, strict=True)
    )


def _axis(rule: Rule, dims: Any, name: str) -> int | None:
    """The dimension whose major factor this is; None if it occurs in no dimension or only after another factor."""
    for d, dim in enumerate(dims):
        real = [f for f in dim if rule.factor(f).size != 1]
        if real and real[0] == name:
            return d
    return None


def _run_pieces(
    case: Case, rule: Rule, name: str, axes: Sequence[int | None], operands: Sequence[np.ndarray]
) -> list[list[np.ndarray]]:
    ways = smallest_divisor(rule.factor(name).size)
    assert ways, "the caller has checked that the size can be split"
    parts = [
        np.split(x, ways, axis) if axis is not None else [x] * ways for x, axis in zip(operands, axes, strict=True)
    ]
    params = _guess_params(case, rule, name, ways)
    return [case.run([part[i] for part in parts], params) for i in range(ways)]


def _guess_params(case: Case, rule: Rule, name: str, ways: int) -> Mapping[str, Any]:
    """The parameters, with each shape of a result or an operand replaced by the shape of its shard."""
    shard = Shard(rule, {name: ways}, {name: 0})
    pairs = [*zip(case.results, rule.results, strict=True), *zip(case.avals, rule.operands, strict=True)]
    local = {tuple(aval.shape): shard.shape(dims) for aval, dims in reversed(pairs)}
    params = rule.local(case.eqn.params, shard) if rule.local else case.eqn.params
    return {
        k: local.get(v, v) if isinstance(v, tuple) and all(isinstance(n, int) for n in v) and len(v) > 0 else v
        for k, v in params.items()
    }


def _ways_that_hold(case: Case, result: int, whole: np.ndarray, pieces: Sequence[np.ndarray]) -> set[str]:
    if pieces[0].shape == whole.shape:
        dtype = case.results[result].dtype
        found = {op for op in _REDUCTIONS if _reducible(op, dtype) and not difference(whole, reduce_pieces(pieces, op))}
        equal = not any(difference(whole, piece) for piece in pieces)
        return found | ({"equal on all pieces"} if equal else set())
    return {
        f"concatenated along dimension {d}"
        for d in range(whole.ndim)
        if not difference(whole, _concatenated(pieces, d))
    }


def _concatenated(pieces: Sequence[np.ndarray], axis: int) -> np.ndarray:
    try:
        return np.concatenate(pieces, axis)
    except ValueError:
        return np.empty((0,), pieces[0].dtype)


def _reducible(op: str, dtype: Any) -> bool:
    return not is_key(dtype) and (op not in ("and", "or", "xor") or not jnp.issubdtype(dtype, jnp.inexact))


def check_linear(
    case: Case, rule: Rule, operand_sets: Sequence[Sequence[np.ndarray]]
) -> list[tuple[Literal["wrong", "missing"], str]]:
    """Checks the operands that the rule declares linear or moved, and finds linear groups that it does not declare.

    Returns:
        The kind (wrong or missing) and the message of each finding.
    """
    # Infinities do not split into terms.
    operand_sets = [operands for operands in operand_sets if all(map(_finite, operands))]
    found: list[tuple[Literal["wrong", "missing"], str]] = []
    for group in rule.linear:
        if _can_split(case, group) and not additive(case, group, operand_sets):
            found.append(("wrong", f"is not linear in operands {_listed(group)}"))
    if rule.moves:
        if _can_split(case, rule.moves) and not additive(case, rule.moves, operand_sets):
            found.append(
                ("wrong", f"does more than move operands {_listed(rule.moves)}: partial sums do not pass through it")
            )
        if not _monotone(case, rule.moves, operand_sets):
            found.append(
                ("wrong", f"does more than move operands {_listed(rule.moves)}: partial maxima do not pass through it")
            )
    declared = [set(g) for g in (*rule.linear, rule.moves)]
    for group in possible_groups(case):
        if not _is_implied(set(group), declared) and surely_additive(case, group, operand_sets):
            found.append(("missing", f"is linear in operands {_listed(group)}"))
    return found


def _finite(x: np.ndarray) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(np.isfinite(x.astype(np.complex128)).all())


def _is_implied(group: set[int], declared: Sequence[set[int]]) -> bool:
    """Whether a declared group contains this one or is part of it (then the other operands do not affect results)."""
    return any(group <= other or (other and other <= group) for other in declared)


def _listed(group: Sequence[int]) -> str:
    return " ".join(map(str, group))


def _can_split(case: Case, group: Sequence[int]) -> bool:
    """Whether partial sums of these operands can exist: the operands and results are numbers."""
    avals = [*(case.avals[i] for i in group), *case.results]
    return all(not is_key(a.dtype) and a.dtype != np.bool_ for a in avals)


def possible_groups(case: Case) -> list[tuple[int, ...]]:
    """The groups to check: each floating-point operand alone, and all of them together."""
    if case.name in _UNDECIDABLE:
        return []
    floats = [i for i, a in enumerate(case.avals) if jnp.issubdtype(a.dtype, jnp.inexact)]
    if any(not jnp.issubdtype(a.dtype, jnp.inexact) for a in case.results) or not floats:
        return []
    return [(i,) for i in floats] + ([tuple(floats)] if len(floats) > 1 else [])


def additive(case: Case, group: Sequence[int], operand_sets: Sequence[Sequence[np.ndarray]]) -> bool:
    """Whether the results for two terms of these operands sum to the results for the terms' sum."""
    return all(
        _agree(_run_terms(case, group, operands, _exact_terms), "sum") for operands in operand_sets[:LINEARITY_TRIALS]
    )


def surely_additive(case: Case, group: Sequence[int], operand_sets: Sequence[Sequence[np.ndarray]]) -> bool:
    """Like `additive`, within a strict tolerance and on informative values, with repeats if there are few results."""
    repeats = max(1, MIN_COMPARED_ELEMENTS // max(1, sum(math.prod(a.shape) for a in case.results)))
    informative = False
    for operands, repeat in itertools.product(operand_sets[:LINEARITY_TRIALS], range(repeats)):
        terms = _run_terms(case, group, operands, _random_terms, repeat)
        if not _agree(terms, "sum", STRICT_TOLERANCE):
            return False
        informative = informative or all(is_informative(term) for term in terms)
    return informative


def _monotone(case: Case, group: Sequence[int], operand_sets: Sequence[Sequence[np.ndarray]]) -> bool:
    if any(is_key(a.dtype) for a in (*case.results, *(case.avals[i] for i in group))):
        return True
    return all(_agree(_run_terms(case, group, operands, _max_terms), "max") for operands in operand_sets)


def _run_terms(
    case: Case, group: Sequence[int], operands: Sequence[np.ndarray], split: Split, repeat: int = 0
) -> list[list[np.ndarray]]:
    """The results for each of two terms of the operands in `group`, and for their sum. Each repeat draws new terms."""
    rng = np.random.default_rng(
        [zlib.crc32(np.ascontiguousarray(x).tobytes()) for x in operands] + [repeat] * (repeat > 0)
    )
    splits = {i: split(operands[i], rng) for i in group}
    return [case.run([splits[i][t] if i in splits else x for i, x in enumerate(operands)]) for t in range(3)]


def _agree(terms: Sequence[Sequence[np.ndarray]], op: str, tolerance: float | None = None) -> bool:
    """Whether the results for two terms, reduced by `op`, equal the results for the combined terms."""
    for first, second, whole in zip(*terms, strict=True):
        joined = "or" if whole.dtype == np.bool_ and op == "max" else op
        if difference(whole, reduce_pieces([first, second], joined), tolerance):
            return False
    return True


def _exact_terms(x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Two terms of different size and sign, and their sum, all exact in the dtype: any error is the operator's."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
        first, second = random_like(x, rng), random_like(x, rng) * (1 if unsigned else -3)
        return first, second.astype(x.dtype), (first + second).astype(x.dtype)
    if jnp.finfo(x.dtype).nmant < _MIN_MANTISSA_BITS:
        first, second = rng.integers(-2, 3, x.shape), rng.integers(-2, 2, x.shape)
        return first.astype(x.dtype), second.astype(x.dtype), (first + second).astype(x.dtype)
    first = np.asarray(rng.integers(-24, 25, x.shape) / 4).astype(x.dtype)
    second = np.asarray(rng.integers(-8, 9, x.shape) / -4).astype(x.dtype)
    return first, second, np.asarray(first + second).astype(x.dtype)


def _random_terms(x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Two random terms and their sum."""
    first, second = random_like(x, rng), random_like(x, rng)
    return first, second, np.asarray(first + second).astype(x.dtype)


def _max_terms(x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    first, second = random_like(x, rng), random_like(x, rng)
    return first, second, (first | second) if x.dtype == np.bool_ else reduce_pieces([first, second], "max")
