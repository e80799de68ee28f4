"""Chooses when a scan over layers moves slices of stacks in host memory, and writes that into the program.

XLA:TPU schedules such transfers late. It fetches all slices of an iteration at the end of the iteration before. Each
fetch waits for the last use of the slice that it replaces. XLA sends a result during the next iteration. This send has
to end before that iteration computes its own result. So the device often waits. The rewritten scan says itself when
each slice moves:

    fetched now     in the iteration that uses it, from the start of the iteration on
    fetched ahead   one iteration before; the carry of the scan holds the slice
    sent now        in the iteration that computes it

A slice is fetched now if it is needed in the second half of the iteration's FLOPs, else ahead. It is needed when the
first product or inner loop uses it or a value that other operators compute from it. Those operators can wait. A result
is sent now if it is computed in the first half of the FLOPs. XLA schedules the other sends. The bounds are
`FETCHED_NOW_FROM` and `SENT_NOW_UNTIL`.

Slices are fetched one after the other, in the order in which they are needed. If several are needed at the same time,
the smallest is fetched first. XLA schedules a loop body backward and gives each fetch more compute than it needs, so
little compute is left for the first fetches.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.lower.constants import FETCHED_NOW_FROM, SENT_NOW_UNTIL
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.flops import flops_of, matmul_flops
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.spmdrules.ir.program import Block, Op, inlined, users_of, walk

_DEVICE = jax.memory.Space.Device
_Body = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]  # (carry, slices) -> (carry, results)


@shown
@dataclass(frozen=True)
class HostMoves:
    """When a scan moves slices. Numbers count the stacks that it slices, or its stacked results.

    Attributes:
        now: the stacks whose slices are fetched now, in this order.
        ahead: the stacks whose slices are fetched ahead, in this order.
        sent: the results that are sent now.
    """

    now: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()


def host_moves(op: Op, avals: Sequence[Any]) -> HostMoves:
    """Return when a scan moves slices. A slice that is also used in host memory is not moved.

    Args:
        op: the scan.
        avals: the aval of each value of the program.
    """
    n_consts, n_carry = _compat.scan_arity(op.eqn.params)
    block, count = op.blocks[0], n_consts + n_carry
    slices = [k for k, v in enumerate(block.inputs[count:]) if _compat.is_on_host(avals[v])]
    results = [k for k, v in enumerate(block.outputs[n_carry:]) if v >= 0 and _compat.is_on_host(avals[v])]
    if op.eqn.params["length"] < 2 or not (slices or results):
        return HostMoves()
    times = _Times(block)
    uses = {k: use for k in slices if (use := times.needed(block.inputs[count + k])) is not None}
    makes = {k: made for k in results if (made := times.made(block.outputs[n_carry + k])) is not None}
    sizes = {k: nbytes(avals[block.inputs[count + k]]) for k in uses}
    in_order, late = sorted(uses, key=lambda k: (uses[k], sizes[k])), times.total * FETCHED_NOW_FROM
    return HostMoves(
        tuple(k for k in in_order if uses[k] >= late),
        tuple(k for k in in_order if uses[k] < late),
        tuple(k for k in makes if makes[k] <= times.total * SENT_NOW_UNTIL),
    )


class _Times:
    """The times at which a block uses and computes values. A time is the number of FLOPs in the block before it."""

    def __init__(self, block: Block):
        self.ops, self.total, self.results = list(inlined(block)), 0.0, {*block.outputs}
        self.begin: dict[int, float] = {}  # id of an operator -> the FLOPs before it
        for op in self.ops:
            self.begin[id(op)] = self.total
            self.total += sum(flops_of(each) * each.trips for each in _with_nested(op))
        self.users = users_of(self.ops)
        self.makers = {v: op for op in self.ops for v in op.results}
        self.needs: dict[int, float] = {}  # value -> when the first product takes it, or a value computed from it
        for op in reversed(self.ops):
            if op.blocks or matmul_flops(op):
                self.needs |= dict.fromkeys(op.operands, self.begin[id(op)])
            elif later := [self.needs[v] for v in op.results if v in self.needs]:
                self.needs |= {v: min(*later, self.needs.get(v, self.total)) for v in op.operands}

    def needed(self, value: int) -> float | None:
        """Return when a value is needed on the device; None if it is used in host memory, too, or nowhere.

        A value is needed by the first product, or operator with a block, that takes it or takes what other operators
        compute from it. Those can wait. If there is no such product, the value is needed at its first use.
        """
        users = self.users.get(value, [])
        if value in self.results or not all(map(is_host_transfer, users)):
            return None
        moved = [new for user in users for old, new in zip(user.operands, user.results, strict=True) if old == value]
        products = [self.needs[new] for new in moved if new in self.needs]
        return min(products or (self.begin[id(op)] for new in moved for op in self.users.get(new, [])), default=None)

    def made(self, value: int) -> float | None:
        """Return when the device computes a value in host memory; None if the value does not come from the device."""
        maker = self.makers.get(value)
        if maker is None or not is_host_transfer(maker):
            return None
        before = maker.operands[maker.results.index(value)]
        source = self.makers.get(before)
        return 0.0 if source is None else self.begin[id(source)]


def _with_nested(op: Op) -> Iterable[Op]:
    yield op
    for block in op.blocks:
        yield from walk(block)


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
