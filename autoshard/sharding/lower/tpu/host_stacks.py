"""Writes into a program when its scans over layers move slices of stacks in host memory (`loops.host_moves`).

XLA:TPU schedules such transfers late. It fetches all slices of an iteration at the end of the iteration before. Each
fetch waits for the last use of the slice that it replaces. XLA sends a result during the next iteration. This send has
to end before that iteration computes its own result. So the device often waits. The rewritten scan says itself when
each slice moves.

Three kinds of barriers keep XLA from moving these transfers. The index of a slice waits for the carry. Each fetch waits
for the fetch before it. The carry waits for the stacks of sent results. A slice that is fetched ahead is also copied by
a `select` into the buffer of the carry. Without the copy, XLA would fetch into that buffer, and only after the last use
of the slice before. In the last iteration, fetches ahead have no use: they repeat the slice of that iteration.

A scan that keeps results runs its last iteration after the loop, and only the iterations of the loop send these
results. What is kept is a result of its own, in device memory. The scan that takes the stacks begins with it in its
carry, and fetches for the second iteration in the first one. If the carry of the first scan held the results of each
iteration instead, XLA would copy the input of each layer. The stacks in device memory begin with unset memory, because
XLA would set all of it for a loop that does not fill them.

The last iteration is a loop, too. A barrier hides from XLA that it has one iteration. In straight code, XLA would run
the last layer together with what follows. Eight layers of Llama 3.1 8B, compiled for v6e:2x4 (24 rows of 8192 tokens,
`fsdp:8`, all but the input of each layer in host memory), would need 15.8 GiB, because the weights of the head would be
gathered above the values of the last layer. They need 14.5 GiB, and 14.3 if nothing is kept.

Compiled for v5e:2x4, eight layers of six matrices under `fsdp:8`, with two values of 64 MiB per layer in host memory,
take 362 ms instead of 422 (`benchmarks/host_stacks.py`).

Mistral 7B is an example (`python benchmarks/recipes.py --only mistral-7b-v6e-8`). Its plan for v6e:2x4 keeps queries,
keys and values in host memory. The backward pass scales the queries early, but only the gradient of attention, which
comes late, multiplies them. Fetched now, the compiled step takes 4.83 s, of which 0.15 s are exposed transfers. Fetched
ahead, because of the first use, it takes 5.23 s and exposes 0.50 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.loops.host_moves import HostMoves, can_wait, host_moves
from autoshard.sharding.lower.body_lowering import BodyLowering
from autoshard.spmdrules.ir.program import Op

_DEVICE = jax.memory.Space.Device


def scan_with_host_stacks(
    lowering: BodyLowering, op: Op, body: Callable[[Any, list[Any]], tuple[Any, list[Any]]], init: Any, xs: list[Any]
) -> tuple[Any, list[Any]]:
    """Return what `lax.scan` returns. On a TPU, slices of stacks in host memory move when `host_moves` says.

    JAX cannot transpose or map `lax.dynamic_slice` of an array in host memory. So derivatives and `jax.vmap` use a
    plain scan.

    Args:
        lowering: lowers the body. Its `kept` has what other scans kept, and gets what this one keeps.
        op: the scan as it is in the program.
        body: its lowered body. It takes fetched slices in device memory.
        init: the initial carry.
        xs: the stacks to slice.
    """
    program, moves = lowering.layout.axes.program, HostMoves()
    if lowering.tpu is not None:
        moves = host_moves(program, lowering.tpu).get(id(op), moves)
    how = {name: op.eqn.params[name] for name in ("length", "reverse", "unroll")}
    if moves == HostMoves():
        return lax.scan(body, init, xs, **how)
    start, tree = jax.tree.flatten(init)
    n_consts, n_carry = _compat.scan_arity(op.eqn.params)
    slices = [program.avals[v] for v in op.blocks[0].inputs[n_consts + n_carry :]]
    fetched = {*moves.now, *moves.ahead}
    shapes = [
        _compat.abstract_array(a.shape, a.dtype, a.weak_type, on_host=_compat.is_on_host(a) and k not in fetched)
        for k, a in enumerate(slices)
    ]
    traced = jax.make_jaxpr(body)(init, shapes)
    results = [var.aval for var in _compat.open_jaxpr(traced).outvars[len(start) :]]
    bare, consts = _compat.split_constants(_compat.with_transferred(traced, [len(start) + k for k in moves.kept]))
    iteration = _compat.jaxpr_as_function(_compat.close(bare, []))
    scan = _Scan(moves, results, iteration, len(start), how)
    # `custom_jvp` refuses a body with effects, such as an ordered callback.
    run = scan.moved if traced.effects else _with_rules_of(scan.plain, scan.moved)
    ready = [lowering.kept.pop(op.operands[n_consts + n_carry + k]) for k in moves.ready]
    carry, ys, kept = run(list(consts), start, xs, ready)
    lowering.kept.update(zip((op.results[n_carry + k] for k in moves.kept), kept, strict=True))
    return tree.unflatten(carry), ys


@shown
@dataclass(frozen=True)
class _Scan:
    """A scan that moves slices.

    Attributes:
        moves: when it moves slices.
        results: the aval of each stacked result of one iteration.
        iteration: its body: (constants, carry, slices) -> (carry, results, what is kept of them on the device).
        carries: the number of values in its carry.
        how: the length, the direction and the unrolling of the scan, as `lax.scan` takes them.
    """

    moves: HostMoves
    results: Sequence[Any]
    iteration: Callable[..., list[Any]]
    carries: int
    how: Mapping[str, Any]

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers of the first and of the last iteration."""
        last = self.how["length"] - 1
        return (last, 0) if self.how["reverse"] else (0, last)

    def after(self, index: Any) -> Any:
        """The number of the iteration after another one; that of the last one for itself."""
        return jnp.maximum(index - 1, 0) if self.how["reverse"] else jnp.minimum(index + 1, self.how["length"] - 1)

    def body(self, consts: list[Any], carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], ...]:
        """Return the carry, the results, and what is kept of one iteration."""
        out, end = self.iteration(*consts, *carry, *x), self.carries + len(self.results)
        return out[: self.carries], out[self.carries : end], out[end:]

    def plain(self, consts: list[Any], init: list[Any], xs: list[Any], ready: list[Any]) -> tuple[list[Any], ...]:
        """Return (carry, results, what is kept) of a scan whose slices XLA moves. Each result has all slices."""
        fetched = {*self.moves.now, *self.moves.ahead}

        def step(state: tuple[Any, list[Any], list[Any]], x: list[Any]) -> tuple[Any, list[Any]]:
            index, carry, _ = state
            x = [jax.device_put(one, _DEVICE) if k in fetched else one for k, one in enumerate(x)]
            for k, first in zip(self.moves.ready, ready, strict=True):
                x[k] = jnp.where(index == self.ends[0], first, x[k])
            carry, ys, kept = self.body(consts, carry, x)
            return (self.after(index), carry, kept), ys

        kept = [jnp.zeros(self.results[k].shape, self.results[k].dtype) for k in self.moves.kept]
        first = jnp.asarray(self.ends[0], jnp.int32)
        (_, carry, kept), ys = lax.scan(step, (first, init, kept), xs, **self.how)
        return carry, ys, kept

    def moved(self, consts: list[Any], init: list[Any], xs: list[Any], ready: list[Any]) -> tuple[list[Any], ...]:
        """Return (carry, results, what is kept) of a scan that moves slices when `moves` says.

        The stacks of the results that are kept lack the slice of the last iteration.
        """
        moves, fetched = self.moves, {*self.moves.now, *self.moves.ahead}
        waiting = max((k for k, x in enumerate(init) if can_wait(x)), key=lambda k: init[k].size)
        first = jnp.asarray(self.ends[0], jnp.int32)

        def fetch(k: int, index: Any) -> Any:
            return jax.device_put(_slice(xs[k], index), _DEVICE)

        def iterate(state: Any, x: list[Any], is_last: bool) -> tuple[Any, list[Any], list[Any]]:
            index, carry, made, held = state
            sent = [k for k in moves.sent if not (is_last and k in moves.kept)]
            found, fetch_index, carry = dict(zip(moves.ahead, held, strict=True)), index, list(carry)
            if fetched:
                fetch_index, carry[waiting] = lax.optimization_barrier((index, carry[waiting]))
            for k in moves.now:
                fetch_index, found[k] = lax.optimization_barrier((fetch_index, fetch(k, fetch_index)))
            remaining = iter(x)
            slices = [found[k] if k in fetched else next(remaining) for k in range(len(xs))]
            carry, ys, kept = self.body(consts, carry, slices)
            next_fetch, ahead = self.after(fetch_index), held if is_last else []
            for k in moves.ahead if not is_last else ():
                next_fetch, one = lax.optimization_barrier((next_fetch, fetch(k, next_fetch)))
                ahead.append(jnp.where(next_fetch >= 0, one, jnp.zeros_like(one)))
            made = {k: _updated(stack, ys[k], index) if k in sent else stack for k, stack in made.items()}
            if sent:
                made, carry[waiting] = lax.optimization_barrier((made, carry[waiting]))
            others = [y for k, y in enumerate(ys) if k not in moves.sent]
            # Without a bound, XLA sees that the number grows by one, and lets sends run beside the next iteration.
            following = self.after(index) if self.how["reverse"] else index + 1
            return (following, carry, made, ahead), others, kept

        here = dict(zip(moves.ready, ready, strict=True))
        state = (
            first,
            init,
            {k: self.empty(k) for k in moves.sent},
            [here[k] if k in here else fetch(k, first) for k in moves.ahead],
        )
        numbers = [k for k in range(len(self.results)) if k not in moves.sent]
        rest = [x for k, x in enumerate(xs) if k not in fetched]
        if moves.kept:
            (_, carry, made, _), others, kept = self.with_last_apart(iterate, state, rest, numbers)
        else:
            (_, carry, made, _), others = lax.scan(lambda s, x: iterate(s, x, False)[:2], state, rest, **self.how)
            kept = []
        stacks = {**made, **dict(zip(numbers, others, strict=True))}
        return carry, [stacks[k] for k in range(len(self.results))], kept

    def with_last_apart(
        self, iterate: Callable[..., Any], state: Any, xs: list[Any], numbers: list[int]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Return (state, stacks, what is kept) of a loop, and of another one with its last iteration.

        Args:
            iterate: computes an iteration.
            state: the initial state; its first entry is the number of the iteration.
            xs: the stacks that the loop slices itself.
            numbers: the results that it stacks itself.
        """

        def step(state: Any, stacks: list[Any], is_last: bool) -> tuple[Any, list[Any], list[Any]]:
            after, ys, kept = iterate(state, [_slice(x, state[0]) for x in xs], is_last)
            unsent = self.moves.kept if is_last else ()
            stacks = [
                stack if k in unsent else _updated(stack, y, state[0])
                for k, stack, y in zip(numbers, stacks, ys, strict=True)
            ]
            return after, stacks, kept

        length, unroll = self.how["length"] - 1, self.how["unroll"]
        initial = (state, [self.empty(k) for k in numbers])
        (state, stacks), _ = lax.scan(
            lambda outer, _: (step(*outer, False)[:2], None), initial, None, length=length, unroll=min(unroll, length)
        )
        count, state = lax.optimization_barrier((jnp.asarray(0, jnp.int32), state))
        kept = [_compat.empty_array(self.results[k].shape, self.results[k].dtype) for k in self.moves.kept]
        _, state, stacks, kept = lax.while_loop(
            lambda outer: outer[0] < 1,
            lambda outer: (outer[0] + 1, *step(outer[1], outer[2], True)),
            (count, state, stacks, kept),
        )
        return state, stacks, kept

    def empty(self, k: int) -> Any:
        """An array for the stack of a result."""
        aval = self.results[k]
        return _compat.empty_array((self.how["length"], *aval.shape), aval.dtype, on_host=_compat.is_on_host(aval))


def _slice(stack: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


def _updated(stack: Any, value: Any, index: Any) -> Any:
    return lax.dynamic_update_index_in_dim(stack, value, index, 0)


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
