"""Synthetic inputs of a program, and which programs must not be run on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard.sharding.autotune.constants import INPUT_CACHE_ENTRIES, INTEGER_BITS, MOST_FLOAT
from autoshard.sharding.program.tracing import Traced
from autoshard.spmdrules.ir.program import Op, Program


def reason_not_to_run(traced: Traced) -> str:
    """Return why a program must not be run on synthetic values; empty if it may be run."""
    if effects := _compat.open_jaxpr(traced.closed).effects:
        names = ", ".join(sorted({type(effect).__name__ for effect in effects}))
        return f"has side effects ({names}), which would also happen on synthetic values"
    if loop := _value_dependent_loop(traced.program):
        line = _compat.source_line(loop.eqn)
        place = f" at {line}" if line else ""
        return f"has a loop whose trip count depends on values{place}: with synthetic values it may never end"
    return ""


def _value_dependent_loop(program: Program) -> Op | None:
    """Return a loop whose condition depends on the program's inputs, if there is one."""
    ops, dependent, before = list(program.ops()), set(program.inputs), 0
    while len(dependent) > before:  # until loop carries add no more values
        before = len(dependent)
        for op in ops:
            if op.name == "while" and dependent.intersection(op.blocks[0].outputs):
                return op
            if dependent.intersection(op.operands) and not op.blocks:
                if _contains_while(op.eqn):
                    return op
                dependent.update(op.results)
            if op.name == "cond" and op.operands[0] in dependent:
                dependent.update(op.results)
            for edge in op.edges:
                if edge.outer in dependent or edge.inner in dependent:
                    dependent.update((edge.outer, edge.inner))
    return None


def _contains_while(eqn: Any) -> bool:
    """Whether an operator with nested jaxprs, such as `shard_map`, contains a while loop. Pallas kernels are exempt."""
    if eqn.primitive.name == "pallas_call":
        return False
    inner = (v for param in eqn.params.values() for v in (param if isinstance(param, tuple | list) else (param,)))
    bodies = (_compat.open_jaxpr(v) for v in inner if _compat.is_jaxpr(v))
    return any(each.primitive.name == "while" or _contains_while(each) for body in bodies for each in body.eqns)


@functools.lru_cache(maxsize=INPUT_CACHE_ENTRIES)
def input_maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    """Return a jitted function that makes an array in its sharding.

    Floats are at most `MOST_FLOAT`, integers have `INTEGER_BITS` bits, booleans are true, and keys are random. No
    scalar is 0.
    """

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
    position = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        position = position * np.uint32(size & 0xFFFFFFFF) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    # Plus 1, because the hash of 0 is 0, and scalars are often divisors.
    mixed = (position + np.uint32(1)) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    if jnp.issubdtype(dtype, jnp.integer):
        return (mixed >> (32 - INTEGER_BITS)).astype(dtype)
    return ((mixed >> 8).astype(jnp.float32) * (MOST_FLOAT / 2**24)).astype(dtype)
