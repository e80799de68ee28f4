"""Chooses when a scan over layers moves slices of stacks in host memory, and writes that into the program.

XLA:TPU schedules such transfers late. It fetches all slices of an iteration at the end of the iteration before. Each
fetch waits for the last use of the slice that it replaces. XLA sends a result during the next iteration. This send has
to end before that iteration computes its own result. So the device often waits. The rewritten scan says itself when
each slice moves (`loops.host_moves`).

Three kinds of barriers keep XLA from moving these transfers. The index of a slice waits for the carry. Each fetch waits
for the fetch before it. The carry waits for the stacks of sent results. A slice that is fetched ahead is also copied by
a `select` into the buffer of the carry. Without the copy, XLA would fetch into that buffer, and only after the last use
of the slice before. In the last iteration, fetches ahead have no use: they repeat the slice of that iteration.

Compiled for v5e:2x4, eight layers of six matrices under `fsdp:8`, with two values of 64 MiB per layer in host memory,
take 341 ms instead of 394 (`benchmarks/host_stacks.py`).

Mistral 7B is an example (`python benchmarks/recipes.py --only mistral-7b-v6e-8`). Its plan for v6e:2x4 keeps queries,
keys and values in host memory. The backward pass scales the queries early, but only the gradient of attention, which
comes late, multiplies them. Fetched now, the compiled step takes 4.83 s, of which 0.15 s are exposed transfers. Fetched
ahead, because of the first use, it takes 5.23 s and exposes 0.50 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from autoshard import _compat
from autoshard.sharding.loops.host_moves import HostMoves, host_moves
from autoshard.spmdrules.ir.program import Op

_DEVICE = jax.memory.Space.Device
_Body = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]  # (carry, slices) -> (carry, results)


def scan_with_host_stacks(
    op: Op,
    avals: Sequence[Any],
    body: Callable[[Any, list[Any]], tuple[Any, list[Any]]],
    init: Any,
    xs: list[Any],
    *,
    on_tpu: bool,
) -> tuple[Any, list[Any]]:
    """Return what `lax.scan` returns. On a TPU, slices of stacks in host memory move when `host_moves` says.

    A scan without an array in its carry does not change, because barriers need a value to wait for. JAX cannot
    transpose or map `lax.dynamic_slice` of an array in host memory. So derivatives and `jax.vmap` use a plain scan.

    Args:
        op: the scan as it is in the program.
        avals: the aval of each value of the program.
        body: its lowered body. It takes fetched slices in device memory.
        init: the initial carry.
        xs: the stacks to slice.
        on_tpu: whether the program is compiled for TPUs.
    """
    how = {name: op.eqn.params[name] for name in ("length", "reverse", "unroll")}
    start, tree = jax.tree.flatten(init)
    moves = host_moves(op, avals) if on_tpu and any(map(_is_array, start)) else HostMoves()
    if moves == HostMoves():
        return lax.scan(body, init, xs, **how)
    n_consts, n_carry = _compat.scan_arity(op.eqn.params)
    slices = [avals[v] for v in op.blocks[0].inputs[n_consts + n_carry :]]
    results = [avals[v] for v in op.blocks[0].outputs[n_carry:]]
    fetched = {*moves.now, *moves.ahead}
    on_host = [_compat.is_on_host(a) and k not in fetched for k, a in enumerate(slices)]
    shapes = [
        _compat.abstract_array(a.shape, a.dtype, a.weak_type, on_host=h) for a, h in zip(slices, on_host, strict=True)
    ]
    traced = jax.make_jaxpr(body)(init, shapes)
    bare, constants = _compat.split_constants(traced)
    iteration = _compat.jaxpr_as_function(_compat.close(bare, []))

    def body_with(consts: list[Any]) -> _Body:
        def run(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = iteration(*consts, *carry, *x)
            return out[: len(start)], out[len(start) :]

        return run

    def plain(consts: list[Any], carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            x = [jax.device_put(one, _DEVICE) if k in fetched else one for k, one in enumerate(x)]
            return body_with(consts)(carry, x)

        return lax.scan(step, carry, xs, **how)

    def moved(consts: list[Any], carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        return _moved_scan(moves, results, body_with(consts), carry, xs, how)

    # `custom_jvp` refuses a body with effects, such as an ordered callback.
    run = moved if traced.effects else _with_rules_of(plain, moved)
    carry, ys = run(list(constants), start, xs)
    return tree.unflatten(carry), ys


def _is_array(x: Any) -> bool:
    """Whether a barrier can wait for a value."""
    return bool(getattr(x, "ndim", 0)) and not _compat.is_extended(x.dtype)


def _moved_scan(
    moves: HostMoves, results: Sequence[Any], body: _Body, init: list[Any], xs: list[Any], how: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Return the results of a scan that moves slices when `moves` says.

    Args:
        moves: when it moves slices.
        results: the aval of each stacked result of one iteration.
        body: its body.
        init: the initial carry.
        xs: the stacks to slice.
        how: the length, the direction and the unrolling of the scan, as `lax.scan` takes them.
    """
    length, reverse = how["length"], how["reverse"]
    waiting = max((k for k, x in enumerate(init) if _is_array(x)), key=lambda k: init[k].size)
    fetched = {*moves.now, *moves.ahead}

    def fetch(k: int, index: Any) -> Any:
        one = lax.dynamic_index_in_dim(xs[k], index, keepdims=False, allow_negative_indices=False)
        return jax.device_put(one, _DEVICE)

    def with_slices(found: dict[int, Any], others: Sequence[Any]) -> list[Any]:
        remaining = iter(others)
        return [found[k] if k in fetched else next(remaining) for k in range(len(xs))]

    def step(state: tuple[Any, ...], x: list[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        index, carry, made, held = state
        found, fetch_index, carry = dict(zip(moves.ahead, held, strict=True)), index, list(carry)
        if fetched:
            fetch_index, carry[waiting] = lax.optimization_barrier((index, carry[waiting]))
        for k in moves.now:
            fetch_index, found[k] = lax.optimization_barrier((fetch_index, fetch(k, fetch_index)))
        carry, ys = body(carry, with_slices(found, x))
        next_fetch = jnp.maximum(fetch_index - 1, 0) if reverse else jnp.minimum(fetch_index + 1, length - 1)
        ahead = []
        for k in moves.ahead:
            next_fetch, one = lax.optimization_barrier((next_fetch, fetch(k, next_fetch)))
            ahead.append(jnp.where(next_fetch >= 0, one, jnp.zeros_like(one)))
        made = [lax.dynamic_update_index_in_dim(s, ys[k], index, 0) for s, k in zip(made, moves.sent, strict=True)]
        if made:
            made, carry[waiting] = lax.optimization_barrier((made, carry[waiting]))
        next_index = jnp.maximum(index - 1, 0) if reverse else index + 1
        return (next_index, carry, made, ahead), [y for k, y in enumerate(ys) if k not in moves.sent]

    first = jnp.asarray(length - 1 if reverse else 0, jnp.int32)
    held = [fetch(k, first) for k in moves.ahead]
    made = [_compat.empty_on_host((length, *results[k].shape), results[k].dtype) for k in moves.sent]
    rest = [x for k, x in enumerate(xs) if k not in fetched]
    (_, carry, made, _), ys = lax.scan(step, (first, init, made, held), rest, **how)
    own, others = dict(zip(moves.sent, made, strict=True)), iter(ys)
    return carry, [own[k] if k in own else next(others) for k in range(len(ys) + len(own))]


def _with_rules_of(plain: Callable[..., Any], moved: Callable[..., Any]) -> Callable[..., Any]:
    """Return `moved` with the derivative and the batching rule of `plain`, which has the same results."""
    mapped = custom_vmap(moved)

    @mapped.def_vmap
    def batched(size: int, is_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda each: 0 if each else None, tuple(is_batched))
        out = jax.vmap(plain, axes, axis_size=size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    run = jax.custom_jvp(mapped)
    run.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return run
