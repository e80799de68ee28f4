"""Running an operator on the shards that its rule declares, and putting the results together as it declares."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from autoshard.sharding.oracle_cases import Case, plain, typed
from autoshard.sharding.oracle_values import difference
from autoshard.spmdrules.rule import Dims, Rule, Shard

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


def cut(x: np.ndarray, rule: Rule, dims: Dims, counts: Mapping[str, int]) -> Grid:
    """Cuts an array along every dimension that holds a cut factor, at the factor's place in the dimension."""
    factors = [f for dim in dims for f in dim]
    sizes = [_size(rule, f) for f in factors]
    tail = x.shape[len(dims) :]  # the words of PRNG keys
    spread = x.reshape((*sizes, *tail))
    grid = {}
    for place in places(counts):
        at = dict(zip(counts, place, strict=True))
        slices = []
        for f, size in zip(factors, sizes, strict=True):
            part = size // counts.get(f, 1)
            slices.append(slice(at.get(f, 0) * part, (at.get(f, 0) + 1) * part))
        shape = Shard(rule, counts, at).shape(dims)
        grid[place] = spread[tuple(slices)].reshape((*shape, *tail))
    return grid


def _size(rule: Rule, name: str) -> int:
    size = rule.factor(name).size
    assert size is not None, f"{rule.text}: the size of {name} is not bound"
    return size


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
    local = [_size(rule, f) // counts.get(f, 1) for f in factors]
    shape = tuple(math.prod(_size(rule, f) // counts.get(f, 1) for f in dim) for dim in dims)
    spread: Grid = {}
    for place, piece in grid.items():
        if piece.shape[: len(dims)] != shape:
            raise Disagreement(f"a shard of result {result} has shape {piece.shape}, declared is {shape}")
        spread[place] = piece.reshape((*local, *piece.shape[len(dims) :]))
    for name in reversed(counts):
        heads = dict.fromkeys(place[:-1] for place in spread)
        spread = {
            head: _join_one([spread[(*head, i)] for i in range(counts[name])], rule, result, name, factors, operands)
            for head in heads
        }
    joined = spread[()]
    whole = tuple(math.prod(_size(rule, f) for f in dim) for dim in dims)
    return joined.reshape((*whole, *joined.shape[len(factors) :]))


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
    if op in ("argmax", "argmin"):
        return _join_positions(pieces, op, operands[0], rule.operands[0], name)
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


def _join_positions(pieces: list[np.ndarray], op: str, operand: np.ndarray, dims: Dims, name: str) -> np.ndarray:
    """Of the positions (in the whole array) that the shards found, the one whose element wins; the first of equals."""
    axis = next(d for d, dim in enumerate(dims) if name in dim)
    sign = 1 if op == "argmax" else -1

    def value(position: np.ndarray) -> np.ndarray:
        at = np.expand_dims(position.reshape(np.delete(operand.shape, axis)), axis).astype(np.int64)
        inside = np.clip(at, 0, operand.shape[axis] - 1)
        return np.take_along_axis(operand, inside, axis).reshape(position.shape).astype(np.float64) * sign

    best = pieces[0]
    for piece in pieces[1:]:
        best = np.where(value(piece) > value(best), piece, best)
    return best


def run_shards(case: Case, rule: Rule, operands: Sequence[np.ndarray], counts: Mapping[str, int]) -> list[Grid]:
    """Runs every shard of one strategy.

    Returns:
        For each result, the shards' results.
    """
    grids = [cut(x, rule, dims, counts) for x, dims in zip(operands, rule.operands, strict=True)]
    if rule.body is not None and any(rule.factor(f).kind == "halo" for f in counts):
        return _run_mapped(case, rule, grids, counts)
    results: list[Grid] = [{} for _ in case.results]
    for place in places(counts):
        shards = [grid[place] for grid in grids]
        for r, value in enumerate(_run_one(case, rule, shards, counts, place)):
            results[r][place] = value
    return results


def _run_one(
    case: Case, rule: Rule, shards: list[np.ndarray], counts: Mapping[str, int], place: tuple[int, ...]
) -> list[np.ndarray]:
    if rule.body is None:
        shard = Shard(rule, counts, dict(zip(counts, place, strict=True)))
        params = rule.local(case.eqn.params, shard) if rule.local else case.eqn.params
        return case.run(shards, params)
    arrays = [typed(x, like) for x, like in zip(shards, case.operands, strict=True)]
    run = _jitted_body(rule.body, _Same(rule), tuple(counts.items()))
    return [plain(x) for x in run(tuple(map(np.int32, place)), *arrays)]


class _Same:
    """A key that is the object itself: two rules may be equal and differ in their bodies."""

    def __init__(self, rule: Rule):
        self.rule = rule

    def __hash__(self) -> int:
        return id(self.rule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.rule is self.rule


@functools.lru_cache(maxsize=64)
def _jitted_body(body: Any, key: _Same, counts: tuple[tuple[str, int], ...]) -> Any:
    """The body compiled once for all shards: as under `shard_map`, where a shard is, is known at run time only."""

    def run(place: tuple[Any, ...], *shards: Any) -> list[Any]:
        index = dict(zip(dict(counts), place, strict=True))
        return _as_list(body(Shard(key.rule, dict(counts), index), *shards))

    return jax.jit(run)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def device_mesh(sizes: Sequence[int]) -> Mesh | None:
    """A mesh with axes a, b, ... over the first devices, None where there are too few."""
    count = math.prod(sizes)
    if count > jax.device_count():
        return None
    devices = np.asarray(jax.devices()[:count]).reshape(sizes)
    return Mesh(devices, tuple("abcd"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def _run_mapped(case: Case, rule: Rule, grids: list[Grid], counts: Mapping[str, int]) -> list[Grid]:
    """Runs the body on real devices, where neighbours can talk."""
    body, mesh = rule.body, device_mesh(tuple(counts.values()))
    assert body is not None
    if mesh is None:
        raise Disagreement(f"needs {math.prod(counts.values())} devices, there are {jax.device_count()}: start more")
    names = mesh.axis_names
    axes = dict(zip(counts, names, strict=True))
    spec = PartitionSpec(names)

    def run(*stacked: Any) -> list[Any]:
        index = {f: jax.lax.axis_index(axis) for f, axis in axes.items()}
        return [x[None] for x in _as_list(body(Shard(rule, counts, index, axes), *(x[0] for x in stacked)))]

    stacked = [
        typed(np.stack(list(grid.values())), like) for grid, like in zip(grids, case.operands, strict=True)
    ]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    results = [plain(x) for x in jax.jit(mapped)(*stacked)]
    return [dict(zip(places(counts), x, strict=True)) for x in results]
