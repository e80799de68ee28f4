"""Steps of the corpus on one attached GPU: with their plan, and under plain `jax.jit`.

Nobody wrote these programs for the planner (`formulations/`). Each has one device's share of the rows of its first
machine. Where the whole state is too large for a GPU, it has fewer layers. A step runs twice: as it is written under
`jax.jit`, and with the plan for one device, which may replace attention by a kernel. The note gives the time under
`jax.jit` over the time with the plan, and how far the two losses are apart after a few steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import common  # noqa: F401  makes `formulations` importable, and sets the number of devices of a CPU
import jax
from formulations.corpus import CORPUS
from formulations.formulation import UNANNOTATED, Program, Sizes
from gpu_timing import Figure, Predictions, compiled_together, seconds_of

from autoshard import Plan, plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.machines.targets import Target, find_target

FEWER: Mapping[
    str, Sizes
] = {  # chosen: the state takes at most half of 80 GB; two layers stay, since XLA unrolls a loop of one
    "llama-70b-scanned": {"layers": 2},
    "llama-7b-2k-unrolled": {"layers": 4},
    "llama-7b-4k-unrolled": {"layers": 4},
    "gemma-9b-pairs": {"pairs": 2},
    "palm-8b-parallel": {"layers": 4},
    "latent-7b": {"layers": 6},
    "moe-8-one-hot": {"layers": 2},
    "moe-64-shared": {"layers": 3},
    "moe-16-ragged": {"layers": 3},
    "moe-16-choice": {"layers": 3},
    "gpt-2.6b-fused": {"layers": 16},
    "llama-8b-accumulated": {"layers": 4},
}
TOGETHER = 8  # chosen: programs whose two versions are compiled at the same time
STEPS = 3  # chosen: losses are compared after as many steps
_SHARED = ("rows", "nodes", "edges")  # sizes that the machine's devices divide


def sizes_of(name: str) -> Sizes:
    """Return the sizes of a program for one device.

    >>> sizes_of("vit-l16-scanned")["rows"]
    64
    """
    machine, sizes = next(iter(CORPUS[name].targets.items()))
    devices = find_target(machine).devices
    shares = {key: max(1, size // devices) if key in _SHARED else size for key, size in sizes.items()}
    return {**shares, **FEWER.get(name, {})}


def figures(target: Target, *, small: bool = False, only: str = "") -> Iterator[Figure]:
    """Compile the programs with `only` in their name, some together, and run one after the other."""
    names = [name for name in CORPUS if only in name]
    for begin in range(0, len(names), TOGETHER):
        yield from _figures({name: _made(name, small) for name in names[begin : begin + TOGETHER]}, target)


def _figures(made: Mapping[str, Program], target: Target) -> Iterator[Figure]:
    lowered: dict[tuple[str, str], Any] = {}
    for name, program in made.items():
        state, batch = program.shapes()
        step = _planned(program, target).jit(jax.devices()[:1])
        lowered[name, "plan"] = step.lower(state, *batch)  # pyright: ignore[reportFunctionMemberAccess]
        lowered[name, "jit"] = jax.jit(program.step, donate_argnums=0).lower(state, *batch)
    compiled = compiled_together(lowered)
    for name, program in made.items():
        if (name, "plan") in compiled:
            yield from _run(name, program, compiled[name, "plan"], compiled.get((name, "jit")))


def predictions(target: Target) -> Predictions:
    """Return the times of the plans in milliseconds, and their peaks in GiB."""
    found = {}
    for name in CORPUS:
        estimate = _planned(_made(name), target).estimate
        found[name, "time"], found[name, "memory"] = estimate.step_time_us / 1e3, estimate.peak_memory_bytes / 2**30
    return found


def _made(name: str, small: bool = False) -> Program:
    formulation = CORPUS[name]
    return formulation.make(UNANNOTATED, **(formulation.small if small else sizes_of(name)))


def _planned(program: Program, target: Target) -> Plan:
    state, batch = program.shapes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        return plan(program.step, state, *batch, target=target.name, plan="dp:1", donate_argnums=0)


def _run(name: str, program: Program, planned: Any, plain: Any) -> Iterator[Figure]:
    sizes = planned.memory_analysis()
    allocated = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    yield Figure("formulations", name, "memory", "GiB", (allocated + sizes.temp_size_in_bytes) / 2**30)
    try:
        with_plan, loss, spread = _timed(program, planned)
    except jax.errors.JaxRuntimeError as error:  # such as: out of memory
        print(f"{name}: {str(error).splitlines()[0][:200]}", flush=True)
        return
    note = "plain jit: not compiled"
    if plain is not None:
        try:
            alone, expected, _ = _timed(program, plain)
            apart = abs(loss - expected) / max(abs(expected), 1e-30)
            note = f"plain jit takes {alone / with_plan:.2f} times as long; losses differ by {apart:.1e}"
        except jax.errors.JaxRuntimeError as error:
            note = f"plain jit: {str(error).splitlines()[0][:60]}"
    yield Figure("formulations", name, "time", "ms", 1e3 * with_plan, spread, note)


def _timed(program: Program, compiled: Callable[..., Any]) -> tuple[float, float, float]:
    """Return the median seconds of a step, the loss after a few steps, and the spread of the times."""
    state, batch = jax.jit(program.state)(jax.random.key(0)), jax.jit(program.batch)(jax.random.key(1))
    loss = math.nan
    for _ in range(STEPS):
        state, loss = compiled(state, *batch)
    loss = float(loss)

    def once() -> Any:
        nonlocal state
        state, found = compiled(state, *batch)
        return found

    found = seconds_of(once, repeats=3)
    return found.median, loss, found.spread
