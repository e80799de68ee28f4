"""Runs an operator on the shards that its rule declares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from autoshard.sharding.oracle.cases import Case, from_numpy, to_numpy
from autoshard.sharding.oracle.shards import Disagreement, Grid, shard_indices, split_shards
from autoshard.spmdrules.core.rule import Rule, Shard
from autoshard.spmdrules.custom_ops.opaque_primitive import returning_list
from autoshard.spmdrules.families.stacked.stages import shift_p

# The oracle compiles many programs and runs each of them once.
FAST_COMPILE: Any = {"xla_backend_optimization_level": 0}


def run_strategies(
    case: Case, rule: Rule, strategies: Sequence[Mapping[str, int]], trials: Sequence[Sequence[np.ndarray]]
) -> list[list[list[Grid]] | Exception]:
    """Runs every shard of several strategies. They are compiled as one program, since compilation dominates the time.

    Args:
        case: the operator to run.
        rule: its rule.
        strategies: how many ways each factor is split, for each strategy.
        trials: sets of unsharded operands.

    Returns:
        For each strategy, the shards' results by trial and result, or the exception that the operator raised.
    """
    outcomes: list[list[list[Grid]] | Exception | None] = []
    for counts in strategies:
        moves = any(rule.factor(f).kind == "halo" for f in counts) or case.eqn.primitive is shift_p
        mapped = rule.body is not None and moves
        try:
            outcomes.append(
                _run_mapped(case, rule, trials, counts) if mapped else _check_traceable(case, rule, trials[0], counts)
            )
        except Exception as error:  # operators and bodies may raise any error: the oracle reports it
            outcomes.append(error)
    pending = [i for i, outcome in enumerate(outcomes) if outcome is None]
    try:
        results = _run_batch(case, rule, [strategies[i] for i in pending], trials)
    except Exception:  # one strategy of the batch raised: run them one by one to find out which
        results = [_run_alone(case, rule, strategies[i], trials) for i in pending]
    for i, outcome in zip(pending, results, strict=True):
        outcomes[i] = outcome
    return [outcome for outcome in outcomes if outcome is not None]


def _check_traceable(case: Case, rule: Rule, operands: Sequence[np.ndarray], counts: Mapping[str, int]) -> None:
    """Traces the operator or the body with the shapes of a shard. Errors of the operator or body pass through."""
    first = shard_indices(counts)[0]
    jax.eval_shape(
        _on_shard(case, rule, counts), _traceable_index(first), *_shards_at(case, rule, operands, counts, first)
    )


def _run_alone(
    case: Case, rule: Rule, counts: Mapping[str, int], trials: Sequence[Sequence[np.ndarray]]
) -> list[list[Grid]] | Exception:
    try:
        return _run_batch(case, rule, [counts], trials)[0]
    except Exception as error:  # an operator may raise any error: it is the outcome
        return error


def _run_batch(
    case: Case, rule: Rule, strategies: Sequence[Mapping[str, int]], trials: Sequence[Sequence[np.ndarray]]
) -> list[list[list[Grid]]]:
    """Compiles one program that runs one shard of each strategy, and calls it once per shard."""
    if not strategies:
        return []
    functions = [_on_shard(case, rule, counts) for counts in strategies]

    def run(inputs: list[tuple[Any, ...]]) -> list[list[Any]]:
        return [function(*shards) for function, shards in zip(functions, inputs, strict=True)]

    compiled = jax.jit(run, compiler_options=FAST_COMPILE)
    orders = [shard_indices(counts) for counts in strategies]
    outcomes: list[list[list[Grid]]] = [[[{} for _ in case.results] for _ in trials] for _ in strategies]
    for t, operands in enumerate(trials):
        for number in range(max(map(len, orders))):
            indices = [order[number % len(order)] for order in orders]
            inputs = [
                (_traceable_index(index), *_shards_at(case, rule, operands, counts, index))
                for counts, index in zip(strategies, indices, strict=True)
            ]
            for s, results in enumerate(compiled(inputs)):
                for r, value in enumerate(results):
                    outcomes[s][t][r][indices[s]] = to_numpy(value)
    return outcomes


def _on_shard(case: Case, rule: Rule, counts: Mapping[str, int]) -> Any:
    """Returns the operator on one shard, as a function of the shard's index and its operands.

    As under `shard_map`, a body knows its shard's index only at run time.
    """
    if rule.body is None:
        shard = Shard(rule, counts, {})
        params = rule.local(case.eqn.params, shard) if rule.local else case.eqn.params
        return lambda position, *shards: case.call(shards, params)
    body = returning_list(rule.body)
    return lambda position, *shards: body(Shard(rule, counts, dict(zip(counts, position, strict=True))), *shards)


def _traceable_index(index: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(map(np.int32, index))


def _shards_at(
    case: Case, rule: Rule, operands: Sequence[np.ndarray], counts: Mapping[str, int], index: tuple[int, ...]
) -> list[Any]:
    return [
        from_numpy(split_shards(x, rule, dims, counts, [index])[index], like)
        for x, dims, like in zip(operands, rule.operands, case.operands, strict=True)
    ]


def device_mesh(sizes: Sequence[int]) -> Mesh | None:
    """A mesh with axes a, b, ... over the first devices; None if there are too few devices."""
    count = math.prod(sizes)
    if count > jax.device_count():
        return None
    devices = np.asarray(jax.devices()[:count]).reshape(sizes)
    return Mesh(devices, tuple("abcd"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def _run_mapped(
    case: Case, rule: Rule, trials: Sequence[Sequence[np.ndarray]], counts: Mapping[str, int]
) -> list[list[Grid]]:
    """Runs a body that communicates with other shards, on devices."""
    body, mesh = rule.body, device_mesh(tuple(counts.values()))
    assert body is not None
    if mesh is None:
        raise Disagreement(
            f"the check needs {math.prod(counts.values())} devices, but there are {jax.device_count()}; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={math.prod(counts.values())} before jax starts"
        )
    names = mesh.axis_names
    axes = dict(zip(counts, names, strict=True))
    spec = PartitionSpec(names)

    def run(*stacked: Any) -> list[Any]:
        index = {f: jax.lax.axis_index(axis) for f, axis in axes.items()}
        return [x[None] for x in returning_list(body)(Shard(rule, counts, index, axes), *(x[0] for x in stacked))]

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    outcomes = []
    for operands in trials:
        grids = [split_shards(x, rule, dims, counts) for x, dims in zip(operands, rule.operands, strict=True)]
        stacked = [
            from_numpy(np.stack(list(grid.values())), like) for grid, like in zip(grids, case.operands, strict=True)
        ]
        results = [to_numpy(x) for x in mapped(*stacked)]
        outcomes.append([dict(zip(shard_indices(counts), x, strict=True)) for x in results])
    return outcomes
