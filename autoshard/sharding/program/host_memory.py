"""Values in host memory: which operators move values between the memory of a device and that of its host.

A program moves a value with `jax.device_put`. A checkpoint policy such as `save_and_offload_only_these_names` adds such
operators. The planner keeps every value where the program puts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.spmdrules.ir.program import Op, Program, inlined

_SHOWN = 3  # arguments that an error message lists; chosen


def is_host_transfer(op: Op) -> bool:
    """Whether an operator moves values between the memory of a device and that of its host."""
    return op.name == "device_put" and any(
        _compat.is_on_host(a.aval) != _compat.is_on_host(b.aval)
        for a, b in zip(op.eqn.invars, op.eqn.outvars, strict=True)
    )


def fetched_slices(program: Program) -> dict[int, tuple[Op, int]]:
    """Return the values that each iteration of a scan copies to the device from a stack in host memory.

    Returns:
        Value in device memory -> its scan, and the number of the stack among those that the scan slices.
    """
    found: dict[int, tuple[Op, int]] = {}
    for loop in program.ops():
        if loop.name != "scan":
            continue
        slices = loop.blocks[0].inputs[sum(_compat.scan_arity(loop.eqn.params)) :]
        number = {v: k for k, v in enumerate(slices) if _compat.is_on_host(program.avals[v])}
        for op in inlined(loop.blocks[0]):
            if is_host_transfer(op):
                moved = zip(op.operands, op.results, strict=True)
                found |= {new: (loop, number[old]) for old, new in moved if old in number}
    return found


def unmoved_names_text(program: Program) -> str:
    """Describe the names that a checkpoint policy offloads to no effect: their values stay on the device.

    The policies of differentiated functions count. Without a derivative nothing is kept, so nothing is moved. The
    text is empty if there are no such names.
    """
    names_of = {op.results[0]: op.eqn.params["name"] for op in program.ops() if op.name == "name"}
    policies = {
        id(policy): policy
        for op in program.ops()
        if (policy := op.eqn.params.get("policy")) is not None and op.eqn.params.get("differentiated")
    }
    known = set(names_of.values())
    wanted = {name for policy in policies.values() for name in _compat.offloaded_names(policy, known)}
    moved = {names_of.get(v) for op in program.ops() if is_host_transfer(op) for v in op.operands}
    unread = sorted(wanted & known - moved)
    unknown = sorted(wanted - known)
    texts = []
    if unread:
        texts.append(
            f"{_quoted(unread)}, but the backward pass reads no value of that name, so none is moved. Name a value "
            "that it reads, such as the input of a layer; the result of a layer is the next one's input"
        )
    if unknown:
        there = f"the names are {', '.join(sorted(known))}" if known else "it has no named values"
        texts.append(
            f"{_quoted(unknown)}, but no value that the step needs has that name; {there}. Check the spelling, and "
            "name a value that the backward pass reads"
        )
    return ". It offloads ".join(texts)


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def mixed_memory_error(name: str, error: ValueError, inputs: Mapping[str, Any]) -> PlanError | None:
    """Return the error for a function that computes with values of both memories, which JAX refuses.

    Args:
        name: the function's name.
        error: what JAX raised during the trace.
        inputs: path -> shape of each input.

    Returns:
        An error that names the inputs in host memory; None if `error` says something else.
    """
    on_host = [path for path, x in inputs.items() if _compat.is_on_host(x)]
    if "memory_space of all inputs" not in str(error):
        return None
    more = f" and {len(on_host) - _SHOWN} more" if len(on_host) > _SHOWN else ""
    held = ", ".join(f"'{path}'" for path in on_host[:_SHOWN]) + more
    where = f"In host memory: {held}" if on_host else "The function puts one of them into host memory itself"
    return PlanError(
        f"auto_shard({name}): an operator combines values in host memory with values in device memory: {error}. "
        f"{where}. Move them with jax.device_put(x, jax.memory.Space.Device) before they are used"
    )
