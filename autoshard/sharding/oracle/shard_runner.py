"""Running an operator on the shards that its rule declares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from autoshard.sharding.oracle.cases import Case, plain, typed
from autoshard.sharding.oracle.shards import Disagreement, Grid, cut, places
from autoshard.spmdrules.core.rule import Rule, Shard
from autoshard.spmdrules.custom_ops.opaque_primitive import flat

# The oracle compiles much and runs it once.
QUICK: Any = {"xla_backend_optimization_level": 0}


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
            outcomes.append(
                _run_mapped(case, rule, trials, counts) if mapped else _traced(case, rule, trials[0], counts)
            )
        except Exception as error:  # of any operator or body, with any error: it is the outcome, told by the oracle
            outcomes.append(error)
    waiting = [i for i, outcome in enumerate(outcomes) if outcome is None]
    try:
        found = _run_batch(case, rule, [strategies[i] for i in waiting], trials)
    except Exception:  # an operator of the batch raised something: each runs for itself, and that one keeps its error
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
    except Exception as error:  # whatever an operator raises on its shards is the outcome
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
    body = flat(rule.body)
    return lambda position, *shards: body(Shard(rule, counts, dict(zip(counts, position, strict=True))), *shards)


def _position(place: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(map(np.int32, place))


def _shards_at(
    case: Case, rule: Rule, operands: Sequence[np.ndarray], counts: Mapping[str, int], place: tuple[int, ...]
) -> list[Any]:
    return [
        typed(cut(x, rule, dims, counts, [place])[place], like)
        for x, dims, like in zip(operands, rule.operands, case.operands, strict=True)
    ]


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
        return [x[None] for x in flat(body)(Shard(rule, counts, index, axes), *(x[0] for x in stacked))]

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    outcomes = []
    for operands in trials:
        grids = [cut(x, rule, dims, counts) for x, dims in zip(operands, rule.operands, strict=True)]
        stacked = [typed(np.stack(list(grid.values())), like) for grid, like in zip(grids, case.operands, strict=True)]
        results = [plain(x) for x in mapped(*stacked)]
        outcomes.append([dict(zip(places(counts), x, strict=True)) for x in results])
    return outcomes
