"""Calls of plans that keep the optimizer's state on the host, although the user's function expects it on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.offload.words import AUTO, OPTIMIZER, Words
from autoshard.sharding.program.tracing import Traced, trace
from autoshard.sharding.runtime.planned_signature import PlannedSignature


def trace_for_offload(words: Words, fn: Callable[..., Any], args: Any, kwargs: Any, *options: Any) -> Traced:
    """Trace a function. Its optimizer's state may be on the host, if an earlier call under `offload=` left it there.

    Args:
        words: what the plan moves to the host.
        fn: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        *options: see `trace`.
    """
    try:
        return trace(fn, args, kwargs, *options)
    except PlanError:
        if not {AUTO, OPTIMIZER} & {*words} or not any(map(_compat.is_on_host, jax.tree.leaves((args, kwargs)))):
            raise
    # The function is written for state in device memory.
    args, kwargs = jax.tree.map(_on_device, (args, kwargs))
    return trace(fn, args, kwargs, *options)


def _on_device(x: Any) -> Any:
    if not _compat.is_on_host(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False)))


def signatures_in_other_memory(signature: Any, traced: Traced) -> list[Any]:
    """The signatures of a plan that moves arguments to the host: before its first call, and after it.

    They differ only in the memory of these arguments.
    """
    if not traced.moved_inputs:
        return []
    tree, types, *rest = signature
    return [
        (tree, tuple((*one[:-1], on_host) if i in traced.moved_inputs else one for i, one in enumerate(types)), *rest)
        for on_host in (False, True)
    ]


def run_under_trace(entry: PlannedSignature, leaves: Sequence[Any]) -> list[Any]:
    """Evaluate the planned program inside another transformation, which sets the memory of arguments and results."""
    run = entry.bound.executable.constrained_program(entry.mesh)
    moved = {i for i in entry.traced.moved_inputs if not _compat.is_on_host(leaves[i])}
    if not moved:
        return run(*leaves)
    warnings.warn(
        f"auto_shard({entry.traced.name}): the call is inside a transformed function (jit, scan, ...), which has the "
        "optimizer's state in device memory: offload='optimizer' moves it to the host only within the step. Call the "
        "step outside, or give it this state in pinned_host memory",
        AutoshardWarning,
        stacklevel=users_stacklevel(),
    )
    results = run(*(jax.device_put(x, jax.memory.Space.Host) if i in moved else x for i, x in enumerate(leaves)))
    back = {o for i, o in entry.traced.state if i in moved}
    return [jax.device_put(x, jax.memory.Space.Device) if o in back else x for o, x in enumerate(results)]
