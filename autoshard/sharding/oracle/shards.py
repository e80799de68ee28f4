"""Cutting arrays into the shards that a rule declares, and putting shards of results together as it declares."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.sharding.oracle.probe_values import difference
from autoshard.spmdrules.core.rule import POSITIONS, Dims, Rule, Shard

Grid = dict[tuple[int, ...], Any]  # place along each cut factor -> what that shard holds

_COMBINE = {
    "sum": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


class Disagreement(Exception):
    """The shards' results cannot be what the rule says."""


def places(counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The place of every shard along each cut factor."""
    return list(itertools.product(*(range(n) for n in counts.values())))


def cut(
    x: np.ndarray, rule: Rule, dims: Dims, counts: Mapping[str, int], wanted: Sequence[tuple[int, ...]] | None = None
) -> Grid:
    """Cuts an array along every dimension that holds a cut factor, at the factor's place in the dimension.

    Args:
        x: the whole array.
        rule: what gives the factors their sizes.
        dims: the array's dimensions.
        counts: how many ways each factor is cut.
        wanted: the places of the shards to cut out, all if not given.
    """
    factors = [f for dim in dims for f in dim]
    tail = x.shape[len(dims) :]  # the words of PRNG keys
    spread = x.reshape((*map(Shard(rule, {}, {}).size, factors), *tail))
    grid = {}
    for place in places(counts) if wanted is None else wanted:
        shard = Shard(rule, counts, dict(zip(counts, place, strict=True)))
        slices = tuple(slice(shard.offset(f), shard.offset(f) + shard.size(f)) for f in factors)
        grid[place] = spread[slices].reshape((*shard.shape(dims), *tail))
    return grid


def join(grid: Grid, rule: Rule, result: int, counts: Mapping[str, int], operands: Sequence[np.ndarray]) -> Any:
    """Puts the shards of a result together: side by side, reduced where it is partial, else equal everywhere.

    Args:
        grid: the shards' results.
        rule: what says how.
        result: which result.
        counts: how many ways each factor is cut.
        operands: the whole operands, which decide between the positions that shards found (argmax).

    Raises:
        Disagreement: a shard has another shape than declared, or copies differ.
    """
    dims = rule.results[result]
    factors = [f for dim in dims for f in dim]
    shard, whole = Shard(rule, counts, {}), Shard(rule, {}, {})
    local, shape = list(map(shard.size, factors)), shard.shape(dims)
    spread: Grid = {}
    for place, piece in grid.items():
        if piece.shape[: len(dims)] != shape:
            raise Disagreement(f"a shard of result {result} has shape {piece.shape}, declared is {shape}")
        spread[place] = piece.reshape((*local, *piece.shape[len(dims) :]))
    for name in reversed(list(counts)):
        heads = dict.fromkeys(place[:-1] for place in spread)
        spread = {
            head: _join_one([spread[(*head, i)] for i in range(counts[name])], rule, result, name, factors, operands)
            for head in heads
        }
    joined = spread[()]
    return joined.reshape((*whole.shape(dims), *joined.shape[len(factors) :]))


def _join_one(
    pieces: list[np.ndarray], rule: Rule, result: int, name: str, factors: list[str], operands: Sequence[np.ndarray]
) -> np.ndarray:
    if name in factors:
        return np.concatenate(pieces, factors.index(name))
    op = rule.partial(name, result)
    if op is None:
        for piece in pieces[1:]:
            if wrong := difference(pieces[0], piece):
                raise Disagreement(f"result {result} should be the same on every shard of {name}, but {wrong}")
        return pieces[0]
    if op in POSITIONS:
        return join_positions(pieces, op, operands[0], rule.operands[0], name)
    if op in ("and", "or", "xor") and jnp.issubdtype(pieces[0].dtype, jnp.inexact):
        raise Disagreement(f"result {result} is {pieces[0].dtype}, '{op}' joins booleans and integers only")
    return reduce_pieces(pieces, op)


def reduce_pieces(pieces: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduces partial terms; sums in low precision are taken in float32."""
    dtype = pieces[0].dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    wide = [p.astype(np.float32) for p in pieces] if narrow else pieces
    if dtype == np.bool_ and op in ("sum", "mul"):  # XLA's add and multiply of booleans
        op = "or" if op == "sum" else "and"
    return functools.reduce(_COMBINE[op], wide).astype(dtype)


def join_positions(pieces: list[np.ndarray], op: str, operand: np.ndarray, dims: Dims, name: str) -> np.ndarray:
    """Of the positions (in the whole array) that the shards found, the one whose element wins; the first of equals."""
    axis = next(d for d, dim in enumerate(dims) if name in dim)
    sign = 1 if op == "argmax" else -1

    def value(position: np.ndarray) -> np.ndarray:
        at = np.expand_dims(position.reshape(np.delete(operand.shape, axis)), axis).astype(np.int64)
        inside = np.clip(at, 0, operand.shape[axis] - 1)
        return np.take_along_axis(operand, inside, axis).reshape(position.shape).astype(np.float64) * sign

    best = pieces[0]
    for piece in pieces[1:]:
        new, old = value(piece), value(best)
        best = np.where((new > old) | (np.isnan(new) & ~np.isnan(old)), piece, best)  # NaN wins, whichever is asked for
    return best
