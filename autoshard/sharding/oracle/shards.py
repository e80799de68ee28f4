"""Splits arrays into the shards that a rule declares, and joins shards of results as the rule declares."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.sharding.oracle.probe_values import difference
from autoshard.spmdrules.core.rule import POSITIONS, Dims, Rule, Shard

Grid = dict[tuple[int, ...], Any]  # a shard's index along each split factor -> the shard

_COMBINE = {
    "sum": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


class Disagreement(Exception):
    """The shards' results contradict the rule."""


def shard_indices(counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The index of every shard along each split factor."""
    return list(itertools.product(*(range(n) for n in counts.values())))


def split_shards(
    x: np.ndarray, rule: Rule, dims: Dims, counts: Mapping[str, int], only: Sequence[tuple[int, ...]] | None = None
) -> Grid:
    """Splits an array along every dimension that has a split factor, at that factor's position in the dimension.

    Args:
        x: the unsharded array.
        rule: the rule, which has the sizes of the factors.
        dims: the factors of the array's dimensions.
        counts: how many ways each factor is split.
        only: the indices of the shards to return. Default: all.
    """
    factors = [f for dim in dims for f in dim]
    tail = x.shape[len(dims) :]  # the trailing dimension of PRNG keys, their words
    spread = x.reshape((*map(Shard(rule, {}, {}).size, factors), *tail))
    grid = {}
    for index in shard_indices(counts) if only is None else only:
        shard = Shard(rule, counts, dict(zip(counts, index, strict=True)))
        slices = tuple(slice(shard.offset(f), shard.offset(f) + shard.size(f)) for f in factors)
        grid[index] = spread[slices].reshape((*shard.shape(dims), *tail))
    return grid


def join_shards(grid: Grid, rule: Rule, result: int, counts: Mapping[str, int], operands: Sequence[np.ndarray]) -> Any:
    """Joins the shards of a result: concatenated if sharded, reduced if partial, else required to be equal.

    Args:
        grid: the shards of the result.
        rule: the rule that declares how the shards are joined.
        result: the number of the result.
        counts: how many ways each factor is split.
        operands: the unsharded operands. Their values decide which shard's position is the result of an argmax.

    Raises:
        Disagreement: a shard does not have the declared shape, or replicated shards differ.
    """
    dims = rule.results[result]
    factors = [f for dim in dims for f in dim]
    shard, whole = Shard(rule, counts, {}), Shard(rule, {}, {})
    local, shape = list(map(shard.size, factors)), shard.shape(dims)
    spread: Grid = {}
    for index, piece in grid.items():
        if piece.shape[: len(dims)] != shape:
            raise Disagreement(f"a shard of result {result} has shape {piece.shape}, but the rule declares {shape}")
        spread[index] = piece.reshape((*local, *piece.shape[len(dims) :]))
    for name in reversed(list(counts)):
        heads = dict.fromkeys(index[:-1] for index in spread)
        spread = {
            head: _join_along([spread[(*head, i)] for i in range(counts[name])], rule, result, name, factors, operands)
            for head in heads
        }
    joined = spread[()]
    return joined.reshape((*whole.shape(dims), *joined.shape[len(factors) :]))


def _join_along(
    pieces: list[np.ndarray], rule: Rule, result: int, name: str, factors: list[str], operands: Sequence[np.ndarray]
) -> np.ndarray:
    if name in factors:
        return np.concatenate(pieces, factors.index(name))
    op = rule.partial(name, result)
    if op is None:
        for piece in pieces[1:]:
            if wrong := difference(pieces[0], piece):
                raise Disagreement(f"result {result} should be the same on all shards along {name}: {wrong}")
        return pieces[0]
    if op in POSITIONS:
        return join_positions(pieces, op, operands[0], rule.operands[0], name)
    if op in ("and", "or", "xor") and jnp.issubdtype(pieces[0].dtype, jnp.inexact):
        raise Disagreement(f"result {result} is {pieces[0].dtype}, but '{op}' reduces only booleans and integers")
    return reduce_pieces(pieces, op)


def reduce_pieces(pieces: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduces partial terms. Low-precision floats are reduced in float32."""
    dtype = pieces[0].dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    wide = [p.astype(np.float32) for p in pieces] if narrow else pieces
    if dtype == np.bool_ and op in ("sum", "mul"):  # XLA's add and multiply of booleans
        op = "or" if op == "sum" else "and"
    return functools.reduce(_COMBINE[op], wide).astype(dtype)


def join_positions(pieces: list[np.ndarray], op: str, operand: np.ndarray, dims: Dims, name: str) -> np.ndarray:
    """Selects the position of the largest or smallest element from the positions that the shards found.

    Positions count in the unsharded array. Among equal elements, the first shard's position is selected.
    """
    axis = next(d for d, dim in enumerate(dims) if name in dim)
    sign = 1 if op == "argmax" else -1

    def value(position: np.ndarray) -> np.ndarray:
        index = np.expand_dims(position.reshape(np.delete(operand.shape, axis)), axis).astype(np.int64)
        inside = np.clip(index, 0, operand.shape[axis] - 1)
        return np.take_along_axis(operand, inside, axis).reshape(position.shape).astype(np.float64) * sign

    best = pieces[0]
    for piece in pieces[1:]:
        new, old = value(piece), value(best)
        best = np.where((new > old) | (np.isnan(new) & ~np.isnan(old)), piece, best)  # NaN wins in argmax and argmin
    return best
