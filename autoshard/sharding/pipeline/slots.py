"""Slots in which values wait for their stage's next part, in device memory or in host memory.

A value that `offload=` moves waits in host memory. It is sent there as a whole when its part has ended, and comes back
before the part that takes it. In between, the device holds nothing of it. Nothing computes on the host: elements of
arrays in host memory cannot be selected. So an idle stage writes a slot in which nothing waits. If there may be none,
the host has one slot more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import _compat
from autoshard.sharding.offload.edits import jaxprs_of
from autoshard.sharding.pipeline.stage_cut import NotStaged, StageCut
from autoshard.spmdrules.families.host_slots import host_slots
from autoshard.spmdrules.families.stacked.stages import read_slots, write_slots

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class NotOffloaded(NotStaged):
    """The stages cannot move a value to the host. The text gives the reason."""


def empty_slots(count: int, shape: Sequence[int], var: Any, always: bool) -> Any:
    """Return zeros `[S, ...]` for a variable; in host memory `[S + 1, ...]`, unless each stage always writes."""
    if _compat.is_on_host(var.aval):
        return host_slots((count + (not always), *shape), var.aval.dtype)
    return jnp.zeros((count, *shape), var.aval.dtype)


def write(slots: Any, x: Any, index: Any, always: bool) -> Any:
    """Write one slot of each stage; see `write_slots`."""
    if not _compat.is_on_host(slots):
        return write_slots(slots, x, index, always=always)
    unused = slots.shape[0] - 1
    index = index if always else jnp.where(index < 0, unused, index)
    return write_slots(slots, jax.device_put(x, _HOST), index, always=True)


def read(slots: Any, index: Any) -> Any:
    """Return one slot of each stage, in device memory; see `read_slots`."""
    x = read_slots(slots, index)
    return jax.device_put(x, _DEVICE) if _compat.is_on_host(slots) else x


def layer_on_device(closed: Any) -> Any:
    """Return the body of a stack of layers as a function whose operands and results are in device memory.

    Args:
        closed: the body. It may move its own slices and results to the host and back, see `offload.replay`.
    """
    jaxpr, constants = _compat.open_jaxpr(closed), _compat.constants(closed)
    if not any(map(_is_transfer, jaxpr.eqns)):
        return _compat.jaxpr_as_function(closed)

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            operands = [a.val if isinstance(a, _compat.Literal) else env[a] for a in eqn.invars]
            if _is_transfer(eqn):
                env |= zip(eqn.outvars, operands, strict=True)
                continue
            with _compat.source_of(eqn):
                env |= zip(eqn.outvars, _compat.bind(eqn, eqn.params, *operands), strict=True)
        return [a.val if isinstance(a, _compat.Literal) else env[a] for a in jaxpr.outvars]

    return run


def has_transfers(jaxpr: Any) -> bool:
    """Whether a program moves values between the memory of a device and that of its host."""
    return any(map(_is_transfer, _equations(jaxpr)))


def check_moves(cut: StageCut, waits: bool) -> None:
    """Check that the stages can move what the program moves to the host.

    Args:
        cut: the program of one microbatch, cut.
        waits: whether residuals wait in slots.

    Raises:
        NotOffloaded: they cannot.
    """
    stacks = [stack.eqn for stack in (cut.forward, cut.backward) if stack.eqn is not None]
    own = {id(eqn) for each in stacks for eqn in _compat.open_jaxpr(each.params["jaxpr"]).eqns}
    moved = [eqn for eqn in _equations(cut.jaxpr) if _is_transfer(eqn)]
    outside = [eqn for eqn in moved if id(eqn) not in own]
    if moved and not waits:
        raise NotOffloaded("the stages keep their inputs, and no residuals that could be moved")
    if outside:
        line = _compat.program_line(outside[0])
        raise NotOffloaded(
            f"the value{' at ' + line if line else ''} is not one that {cut.forward.place} keep for their gradients"
        )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from _equations(_compat.open_jaxpr(inner))


def _is_transfer(eqn: Any) -> bool:
    """Whether an equation moves one value between the memory of a device and that of its host."""
    if eqn.primitive.name != "device_put":
        return False
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return any(_compat.is_on_host(a.aval) != _compat.is_on_host(b.aval) for a, b in pairs)
