"""Slots in host memory, in which values of a loop wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autoshard import _compat
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Rule, Shard
from autoshard.spmdrules.core.rule_builder import RuleBuilder


def _zeros(*, shape: tuple[int, ...], dtype: Any) -> Any:
    return jnp.zeros(shape, dtype)


slots_p = Primitive("host_slots")
slots_p.def_impl(_zeros)
slots_p.def_abstract_eval(lambda *, shape, dtype: _compat.abstract_array(shape, dtype, on_host=True))
mlir.register_lowering(slots_p, mlir.lower_fun(_zeros, multiple_results=False))


def host_slots(shape: Sequence[int], dtype: Any) -> Any:
    """Returns zeros in host memory.

    XLA allocates them there, because the loop writes values to them that it moves to the host. If they were made on the
    device and moved, the device would hold all of them once.

    Args:
        shape: the shape, `[S, ...]` for S slots.
        dtype: the dtype.
    """
    return slots_p.bind(shape=tuple(shape), dtype=jnp.dtype(dtype))


@rule(slots_p)
def _slots_rule(*, shape: tuple[int, ...], dtype: Any) -> Rule:
    """``-> a b``: each shard has zeros of its own."""
    build = RuleBuilder()
    dims = build.dims(shape)

    def local(params: Any, shard: Shard) -> Any:
        return {**params, "shape": shard.shape(dims)}

    return build.rule([], [dims], local=local)
