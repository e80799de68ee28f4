"""One measurement of the checkout on PYTHONPATH, for `against.py`.

    PYTHONPATH=CHECKOUT python benchmarks/against_measurements.py planning

Only public names are used, so that older revisions can be measured. The result is a line of JSON: the time in
microseconds, and the folder of the package that was measured. Times are CPU times, which depend less on other work on
the machine than elapsed times do.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from small_gpt import GPTConfig, gpt_step

import autoshard

BATCH = 16
RUNS = 5  # runs of planning and of propagation, the fastest of which counts; chosen
SCANNED = GPTConfig(layers=12, heads=8, width=512, vocab=8192, context=128)
UNROLLED = GPTConfig(layers=12, heads=8, width=512, vocab=8192, context=128, scan_layers=False)
TARGET = "v5e:4x4"
MESH = {"dp": 2, "tp": 4}
LEAVES, CALLS = 20, 1000  # leaves of the arguments and calls when dispatch is timed


def planning_us() -> float:
    """Time `autoshard.plan` of a scanned GPT's train step for a TPU, tracing included."""

    def run() -> float:
        step, _, state, tokens = gpt_step(SCANNED, BATCH)  # a new function, which no cache knows
        return spent_us(lambda: autoshard.plan(step, state, tokens, target=TARGET, donate_argnums=0))

    return min(run() for _ in range(RUNS))


def propagation_us() -> float:
    """Time `autoshard.propagate` over the jaxpr of an unrolled GPT's train step, without the time to trace it again."""
    step, _, state, tokens = gpt_step(UNROLLED, BATCH)
    closed = jax.make_jaxpr(step)(state, tokens)
    inputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
    specs = tuple(sharded_over_tp(x.shape) for x in inputs[:-1]) + (PartitionSpec("dp"),)

    def replayed(*args: Any) -> Any:
        return jax.extend.core.jaxpr_as_fun(closed)(*args)

    def run() -> float:
        trace_us = spent_us(lambda: jax.make_jaxpr(lambda *args: replayed(*args))(*inputs))
        whole_us = spent_us(
            lambda: autoshard.propagate(lambda *args: replayed(*args), *inputs, in_specs=specs, mesh=MESH)
        )
        return whole_us - trace_us

    return statistics.median(run() for _ in range(RUNS))


def sharded_over_tp(shape: tuple[int, ...]) -> PartitionSpec:
    """A spec that shards a matrix over `tp` along its longer dimension and replicates anything else."""
    if len(shape) != 2:
        return PartitionSpec()
    return PartitionSpec("tp") if shape[0] > shape[1] else PartitionSpec(None, "tp")


def dispatch_us() -> float:
    """Time a call of an `auto_shard`ed step on 8 devices, minus a call of the same step under `jax.jit`.

    Only the calling thread counts: the difference is its Python code, and the devices run on other threads.
    """
    step = autoshard.auto_shard(bump, mesh={"data": 8})
    state, x = {f"w{i}": jnp.full((8, 4), i, jnp.float32) for i in range(LEAVES)}, jnp.ones((8, 4))
    state = step(state, x)
    x = jax.device_put(x, jax.tree.leaves(step.lower(state, x).compile().input_shardings[0])[-1])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state, x))
    plain = jax.jit(bump, in_shardings=shardings, out_shardings=shardings[0])
    differences = []
    for number in range(CALLS):
        first, second = (step, plain) if number % 2 else (plain, step)
        once_us, twice_us = call_us(first, state, x), call_us(second, state, x)
        differences.append(once_us - twice_us if first is step else twice_us - once_us)
    return statistics.median(differences)


def bump(state: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """A cheap step that uses every leaf."""
    return {name: leaf + jnp.mean(x) for name, leaf in state.items()}


def call_us(step: Callable[..., Any], *args: Any) -> float:
    """The calling thread's CPU time of a call. The devices finish outside of it."""
    begin = time.thread_time_ns()
    result = step(*args)
    spent_ns = time.thread_time_ns() - begin
    jax.block_until_ready(result)
    return spent_ns / 1e3


def spent_us(action: Callable[[], Any]) -> float:
    """The process's CPU time of an action. Garbage of earlier actions is collected before."""
    gc.collect()
    begin = time.process_time_ns()
    action()
    return (time.process_time_ns() - begin) / 1e3


MEASUREMENTS = {"planning": planning_us, "dispatch": dispatch_us, "propagation": propagation_us}

if __name__ == "__main__":
    (which,) = sys.argv[1:]
    package = str(Path(autoshard.__file__).resolve().parent)
    print(json.dumps({"us": MEASUREMENTS[which](), "package": package}))
