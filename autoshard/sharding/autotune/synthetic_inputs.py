"""Made-up inputs of a program, and which programs may not be run on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard.sharding.program.tracing import Traced
from autoshard.spmdrules.ir.program import Op, Program


def not_to_be_run(traced: Traced) -> str:
    """Why a program must not be run on values that nobody gave; empty if it may."""
    if effects := _compat.open_jaxpr(traced.closed).effects:
        names = ", ".join(sorted({type(effect).__name__ for effect in effects}))
        return f"has side effects ({names}), which made-up values would have, too"
    if loop := _loop_by_values(traced.program):
        line = _compat.source_line(loop.eqn)
        return (
            f"has a loop whose end depends on values{' at ' + line if line else ''}: with made-up ones it may have none"
        )
    return ""


def _loop_by_values(program: Program) -> Op | None:
    """A loop whose condition depends on the program's inputs."""
    ops, taken, before = list(program.ops()), set(program.inputs), 0
    while len(taken) > before:  # until no loop carries a dependence any further
        before = len(taken)
        for op in ops:
            if op.name == "while" and taken.intersection(op.blocks[0].outputs):
                return op
            if taken.intersection(op.operands) and not op.blocks:
                if _holds_while(op.eqn):
                    return op
                taken.update(op.results)
            if op.name == "cond" and op.operands[0] in taken:
                taken.update(op.results)
            for tie in op.ties:
                if tie.outer in taken or tie.inner in taken:
                    taken.update((tie.outer, tie.inner))
    return None


def _holds_while(eqn: Any) -> bool:
    """Whether an operator that is taken as a whole (a `shard_map`) has a loop in it; those of kernels count steps."""
    if eqn.primitive.name == "pallas_call":
        return False
    inner = (v for param in eqn.params.values() for v in (param if isinstance(param, tuple | list) else (param,)))
    bodies = (_compat.open_jaxpr(v) for v in inner if _compat.is_jaxpr(v))
    return any(each.primitive.name == "while" or _holds_while(each) for body in bodies for each in body.eqns)


@functools.lru_cache(maxsize=1024)
def input_maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    """Makes an array where it lies: floats up to 0.05, integers up to 7, all true, or random keys; no scalar is 0."""

    def make() -> jax.Array:
        if _compat.is_extended(dtype):
            impls: list[Any] = []

            def bits_of(keys: jax.Array) -> jax.Array:
                impls.append(jax.random.key_impl(keys))
                return jax.random.key_data(keys)

            bits = jax.eval_shape(bits_of, jax.ShapeDtypeStruct(shape, dtype))
            return jax.random.wrap_key_data(_numbers(bits.shape, bits.dtype), impl=impls[0])
        return _numbers(shape, dtype)

    return jax.jit(make, out_shardings=sharding)


def _numbers(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return jnp.ones(shape, dtype)
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        place = place * np.uint32(size & 0xFFFFFFFF) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    mixed = (place + np.uint32(1)) * np.uint32(0x9E3779B1)  # a first 0 would stay one, and a scalar is often a divisor
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    if jnp.issubdtype(dtype, jnp.integer):
        return (mixed >> 29).astype(dtype)
    return ((mixed >> 8).astype(jnp.float32) * (0.05 / 2**24)).astype(dtype)
