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

# The oracle compiles much and runs it once.
QUICK: Any = {"xla_backend_optimization_level": 0}

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
    sizes = [_size(rule, f) for f in factors]
    tail = x.shape[len(dims) :]  # the words of PRNG keys
    spread = x.reshape((*sizes, *tail))
    grid = {}
    for place in places(counts) if wanted is None else wanted:
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


def run_strategies(
    case: Case, rule: Rule, strategies: Sequence[Mapping[str, int]], trials: Sequence[Sequence[np.ndarray]]
) -> list[list[list[Grid]] | Exception]:
    """Runs every shard of several strategies, compiled as one program: compiling is what takes the time.

    Args:
        case: the operator.
        rule: its rule.
        strategies: how many ways each factor is cut.
        trials: sets of whole operands.

    Returns:
        For each strategy, for each trial, for each result the shards' results; or what the operator raised.
    """
    outcomes: list[list[list[Grid]] | Exception | None] = []
    for counts in strategies:
        mapped = rule.body is not None and any(rule.factor(f).kind == "halo" for f in counts)
        try:
            outcomes.append(_run_mapped(case, rule, trials, counts) if mapped else _traced(case, rule, trials[0], counts))
        except Exception as error:  # noqa: BLE001 - whatever an operator raises on its shards is the outcome
            outcomes.append(error)
    waiting = [i for i, outcome in enumerate(outcomes) if outcome is None]
    try:
        found = _run_batch(case, rule, [strategies[i] for i in waiting], trials)
    except Exception:  # noqa: BLE001 - one of them is guilty: each for itself then
        found = [_run_alone(case, rule, strategies[i], trials) for i in waiting]
    for i, outcome in zip(waiting, found, strict=True):
        outcomes[i] = outcome
    return [outcome for outcome in outcomes if outcome is not None]


def _traced(case: Case, rule: Rule, operands: Sequence[np.ndarray], counts: Mapping[str, int]) -> None:
    """Raises what the operator or the body raises on shards of these shapes."""
    first = places(counts)[0]
    jax.eval_shape(_on_shard(case, rule, counts), _position(first), *_shards_at(case, rule, operands, counts, first))


def _run_alone(
    case: Case, rule: Rule, counts: Mapping[str, int], trials: Sequence[Sequence[np.ndarray]]
) -> list[list[Grid]] | Exception:
    try:
        return _run_batch(case, rule, [counts], trials)[0]
    except Exception as error:  # noqa: BLE001
        return error


def _run_batch(
    case: Case, rule: Rule, strategies: Sequence[Mapping[str, int]], trials: Sequence[Sequence[np.ndarray]]
) -> list[list[list[Grid]]]:
    """One program that runs one shard of each strategy, called as often as there are shards."""
    if not strategies:
        return []
    functions = [_on_shard(case, rule, counts) for counts in strategies]

    def run(inputs: list[tuple[Any, ...]]) -> list[list[Any]]:
        return [function(*shards) for function, shards in zip(functions, inputs, strict=True)]

    compiled = jax.jit(run, compiler_options=QUICK)
    orders = [places(counts) for counts in strategies]
    outcomes: list[list[list[Grid]]] = [[[{} for _ in case.results] for _ in trials] for _ in strategies]
    for t, operands in enumerate(trials):
        for turn in range(max(map(len, orders))):
            at = [order[turn % len(order)] for order in orders]
            inputs = [
                (_position(place), *_shards_at(case, rule, operands, counts, place))
                for counts, place in zip(strategies, at, strict=True)
            ]
            for s, results in enumerate(compiled(inputs)):
                for r, value in enumerate(results):
                    outcomes[s][t][r][at[s]] = plain(value)
    return outcomes


def _on_shard(case: Case, rule: Rule, counts: Mapping[str, int]) -> Any:
    """The operator on one shard, as a function of where that is and of its operands.

    As under `shard_map`, a body learns only at run time which shard it is.
    """
    if rule.body is None:
        shard = Shard(rule, counts, {})
        params = rule.local(case.eqn.params, shard) if rule.local else case.eqn.params
        return lambda position, *shards: case.call(shards, params)
    body = rule.body
    return lambda position, *shards: _as_list(body(Shard(rule, counts, dict(zip(counts, position))), *shards))


def _position(place: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(map(np.int32, place))


def _shards_at(
    case: Case, rule: Rule, operands: Sequence[np.ndarray], counts: Mapping[str, int], place: tuple[int, ...]
) -> list[Any]:
    return [
        typed(cut(x, rule, dims, counts, [place])[place], like)
        for x, dims, like in zip(operands, rule.operands, case.operands, strict=True)
    ]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def device_mesh(sizes: Sequence[int]) -> Mesh | None:
    """A mesh with axes a, b, ... over the first devices, None where there are too few."""
    count = math.prod(sizes)
    if count > jax.device_count():
        return None
    devices = np.asarray(jax.devices()[:count]).reshape(sizes)
    return Mesh(devices, tuple("abcd"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def _run_mapped(
    case: Case, rule: Rule, trials: Sequence[Sequence[np.ndarray]], counts: Mapping[str, int]
) -> list[list[Grid]]:
    """Runs the body on real devices, where neighbours can talk."""
    body, mesh = rule.body, device_mesh(tuple(counts.values()))
    assert body is not None
    if mesh is None:
        raise Disagreement(f"it needs {math.prod(counts.values())} devices, there are {jax.device_count()}")
    names = mesh.axis_names
    axes = dict(zip(counts, names, strict=True))
    spec = PartitionSpec(names)

    def run(*stacked: Any) -> list[Any]:
        index = {f: jax.lax.axis_index(axis) for f, axis in axes.items()}
        return [x[None] for x in _as_list(body(Shard(rule, counts, index, axes), *(x[0] for x in stacked)))]

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    outcomes = []
    for operands in trials:
        grids = [cut(x, rule, dims, counts) for x, dims in zip(operands, rule.operands, strict=True)]
        stacked = [
            typed(np.stack(list(grid.values())), like) for grid, like in zip(grids, case.operands, strict=True)
        ]
        results = [plain(x) for x in mapped(*stacked)]
        outcomes.append([dict(zip(places(counts), x, strict=True)) for x in results])
    return outcomes
