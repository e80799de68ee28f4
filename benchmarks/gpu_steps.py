"""Train steps on one attached GPU, and their plans: time, and memory.

Each step is planned for the chip as one device, and runs with random tokens or images. Memory is what XLA allocates on
the device: arguments, results that reuse no argument, and temporaries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import jax
import optax
from gpu_timing import Figure, Predictions, compiled_together, seconds_of
from single_device import LLAMA

from autoshard import Plan, plan
from autoshard.errors import AutoshardWarning
from autoshard.kernels.grouped.call import GroupedCall
from autoshard.models.dropless import operators
from autoshard.models.workloads import Workload, workload
from autoshard.sharding.machines.targets import Target
from autoshard.train.step.optimizer import OptimizerConfig, make_optimizer
from autoshard.train.step.train_state import Program, make_program
from autoshard.train.step.train_step import make_train_step

_LLAMA = Workload("llama-1b", dataclasses.replace(LLAMA, attention="auto"), 4)
_MIXTRAL = workload("mixtral-8x7b").with_(
    batch_size=8, layers=8, width=1024, heads=16, kv_heads=8, ffn=3584, context=2048
)
CASES: Mapping[str, Workload] = {
    "Llama 1B, remat full": _LLAMA.with_(remat="full"),
    "Llama 1B, remat dots": _LLAMA.with_(remat="dots"),
    "Llama 1B, remat none": _LLAMA.with_(remat="none"),
    "Llama 1B, residual on the host": _LLAMA.with_(remat="host:residual"),
    "Llama 1B, residual and qkv on the host": _LLAMA.with_(remat="host:residual+qkv"),
    "Llama 1B, remat full, plain attention": _LLAMA.with_(remat="full", attention="plain"),
    "GPT 1.3B, remat full": workload("gpt-1.3b").with_(batch_size=16),
    "ViT-L/16, remat full": workload("vit-l16").with_(batch_size=128),
    "MoE 690M, remat full": workload("moe-690m").with_(batch_size=8),
    "Mixtral of 8 layers of 1024, dropless, remat full": _MIXTRAL,
    "Mixtral of 8 layers of 1024, dropless, experts without kernels, remat full": _MIXTRAL,
}
WITHOUT_KERNELS = "experts without kernels"  # part of a name: experts run as a loop over tiles, as on other platforms
SMALL: Mapping[str, Workload] = {name: workload(name) for name in ("llama-tiny", "mixtral-tiny", "vit-tiny")}


def figures(target: Target, *, small: bool = False, only: str = "") -> Iterator[Figure]:
    """Plan all steps with `only` in their name, compile them together, and run them one after the other."""
    programs, lowered = {}, {}
    for name, work in (SMALL if small else CASES).items():
        if only not in name:
            continue
        programs[name], made = _planned(name, work, target)
        shapes = programs[name].abstract_state(), work.batch()
        lowered[name] = made.jit(jax.devices()[:1]).lower(*shapes)  # pyright: ignore[reportFunctionMemberAccess]
    for name, compiled in compiled_together(lowered).items():
        yield from _run(name, (SMALL if small else CASES)[name], programs[name], compiled)


def predictions(target: Target) -> Predictions:
    """Return the times of the plans in milliseconds, and their peaks in GiB."""
    found = {}
    for name, work in CASES.items():
        estimate = _planned(name, work, target)[1].estimate
        found[name, "time"], found[name, "memory"] = estimate.step_time_us / 1e3, estimate.peak_memory_bytes / 2**30
    return found


def _planned(name: str, work: Workload, target: Target) -> tuple[Program, Plan]:
    program = make_program(work.build, make_optimizer(OptimizerConfig(), 1000))
    step = make_train_step(program, optax.constant_schedule(1e-4))
    tiled = patch.object(operators, "grouped_call", lambda dtype: GroupedCall("tiled", launches=True))
    with warnings.catch_warnings(), tiled if WITHOUT_KERNELS in name else contextlib.nullcontext():
        warnings.simplefilter("ignore", AutoshardWarning)
        shapes = program.abstract_state(), work.batch()
        return program, plan(step, *shapes, target=target.name, plan="dp:1", donate_argnums=0)


def _run(name: str, work: Workload, program: Program, compiled: Any) -> Iterator[Figure]:
    sizes = compiled.memory_analysis()
    allocated = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    allocated += sizes.temp_size_in_bytes
    yield Figure("steps", name, "memory", "GiB", allocated / 2**30)
    batch = jax.device_put(work.random_batch())
    state = jax.jit(program.create_state)(jax.random.key(0))

    def once() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"]

    try:
        found = seconds_of(once)
    except jax.errors.JaxRuntimeError as error:  # such as: out of memory
        print(f"{name}: {str(error).splitlines()[0][:200]}", flush=True)
        return
    yield Figure("steps", name, "time", "ms", 1e3 * found.median, found.spread, f"loss {float(once()):.3f}")
