"""Operators on the stages of a pipeline. Stage n works on element n of an array's stage dimension.

`shift_stages` is the only operator that lets a value move to another stage. On shards it is a collective-permute.
With several chunks of layers a stage, it is a ring: the first stage may get what the last one had.
`read_slots` and `write_slots` use a different slot at each stage, without a gather or scatter over the stages. Slots in
host memory are always written, because nothing can be selected there.
`read_layer` does the same with a stack of weights; products read such a layer in place.
If the layers of a stage are no equal, contiguous part of the stack, `spread_layers` and `collect_layers` are between a
stack of all layers and one with a dimension of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autoshard import _compat
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Rule, RuleError, Shard
from autoshard.spmdrules.core.rule_builder import RuleBuilder

STAGE = "s"  # the factor of the stages in the rules of these operators


def _primitive(name: str, fn: Callable[..., Any], shape_of: Callable[..., tuple[int, ...]]) -> Primitive:
    """Creates a primitive with one result. Its lowering is that of the function `fn`.

    The result has the dtype of its first operand, and is in the same memory.
    """
    made = Primitive(name)
    made.def_impl(lambda *args, **params: jax.jit(fn, static_argnames=tuple(params))(*args, **params))
    made.def_abstract_eval(
        lambda *avals, **params: _compat.result_type(
            shape_of(*avals, **params), avals[0].dtype, avals, avals[0].memory_space
        )
    )
    mlir.register_lowering(made, mlir.lower_fun(fn, multiple_results=False))
    return made


def _shifted(x: Any, *edge: Any, backward: bool) -> Any:
    last = x[0] if backward else x[-1]
    new = _entering(last, *edge)[None]
    return jnp.concatenate([x[1:], new] if backward else [new, x[:-1]])


def _entering(last: Any, edge: Any = None, enters: Any = None) -> Any:
    """The value that the first stage gets: zeros without an edge; in a ring, `last` if `enters` is false."""
    if edge is None:
        return jnp.zeros_like(last)
    return edge if enters is None else jnp.where(enters, edge, last)


def _start(slots: Any, index: Any, stage: int) -> list[Any]:
    """The position of a stage's slot in slots `[S, N, ...]`."""
    return [index[stage], *(jnp.asarray(n, index.dtype) for n in (stage, *[0] * (slots.ndim - 2)))]


def _read(slots: Any, index: Any) -> Any:
    def one(of_stage: Any, at: Any) -> Any:
        return lax.dynamic_index_in_dim(of_stage, jnp.maximum(at, 0), 0, keepdims=False)

    if _compat.is_on_host(slots):
        sizes = (1, 1, *slots.shape[2:])
        taken = [lax.dynamic_slice(slots, _start(slots, index, n), sizes)[0]
                 for n in range(slots.shape[1])]  # fmt: skip
        return taken[0] if len(taken) == 1 else jnp.concatenate(taken)
    if slots.shape[1] == 1:  # a shard with one stage takes a slice, not a gather
        return one(slots[:, 0], index[0])[None]
    return jax.vmap(one, in_axes=(1, 0))(slots, index)


def _written(slots: Any, x: Any, index: Any, *, always: bool) -> Any:
    if always:
        for n in range(slots.shape[1]):
            own = x if slots.shape[1] == 1 else x[n : n + 1]
            slots = lax.dynamic_update_slice(slots, own[None], _start(slots, index, n))
        return slots
    if slots.shape[1] == 1:
        return write_one(slots[:, 0], x[0], index[0])[:, None]
    return jax.vmap(write_one, in_axes=(1, 0, 0), out_axes=1)(slots, x, index)


def write_one(stack: Any, x: Any, index: Any) -> Any:
    """Returns a stack `[S, ...]` with `x` as its element at `index`, or unchanged if `index` is negative."""
    place = jnp.maximum(index, 0)
    kept = lax.dynamic_index_in_dim(stack, place, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(stack, jnp.where(index >= 0, x, kept), place, 0)


def stage_sizes(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage. The first stages have one more, if `stages` does not divide `layers`.

    Example:
        >>> stage_sizes(30, 4)
        (8, 8, 7, 7)
    """
    each, more = divmod(layers, stages)
    return (each + 1,) * more + (each,) * (stages - more)


def _windows(layers: int, chunks: int) -> list[tuple[int, int, int]]:
    """For each chunk, the start and the end of its slots among the layers, and the number of its own layers.

    Its own layers are the last ones. A slot before them has the last layer of the chunk before.
    """
    sizes = stage_sizes(layers, chunks)
    ends = [sum(sizes[: n + 1]) for n in range(chunks)]
    return [(end - sizes[0], end, size) for end, size in zip(ends, sizes, strict=True)]


def _of_stages(by_chunk: Any, stages: int, chunks: int) -> Any:
    """Returns `[N * V, K, ...]`, the slots of each chunk, as `[N, K, ...]` for one chunk, else as `[N, V, K, ...]`."""
    if chunks == 1:
        return by_chunk
    return by_chunk.reshape(chunks, stages, *by_chunk.shape[1:]).swapaxes(0, 1)


def layers_of_slots(layers: int, stages: int, chunks: int = 1) -> np.ndarray:
    """Returns the layer in each slot of each stage, `[N, K]` or `[N, V, K]`, see `spread_layers`."""
    found = np.array([range(start, end) for start, end, _ in _windows(layers, stages * chunks)])
    return _of_stages(found, stages, chunks)


def own_layers(layers: int, stages: int, chunks: int = 1) -> np.ndarray:
    """Returns for each slot, `[N, K]` or `[N, V, K]`, whether it has a layer of its chunk, see `spread_layers`."""
    windows = _windows(layers, stages * chunks)
    found = np.array([np.arange(start, end) >= end - size for start, end, size in windows])
    return _of_stages(found, stages, chunks)


def _spread(stack: Any, *, stages: int, chunks: int) -> Any:
    layers, count = stack.shape[0], stages * chunks
    if layers % count == 0:
        by_chunk = stack.reshape(count, layers // count, *stack.shape[1:])
    else:
        by_chunk = jnp.stack([stack[start:end] for start, end, _ in _windows(layers, count)])
    return _of_stages(by_chunk, stages, chunks)


def _collected(stack: Any, *, layers: int, chunks: int) -> Any:
    by_chunk = stack if chunks == 1 else stack.swapaxes(0, 1).reshape(-1, *stack.shape[2:])
    if layers == by_chunk.shape[0] * by_chunk.shape[1]:
        return by_chunk.reshape(layers, *by_chunk.shape[2:])
    windows = _windows(layers, by_chunk.shape[0])
    return jnp.concatenate([by_chunk[n, end - start - size :] for n, (start, end, size) in enumerate(windows)])


shift_p = _primitive("shift_stages", _shifted, lambda x, *edge, backward: x.shape)
read_p = _primitive("read_slots", _read, lambda slots, index: slots.shape[1:])
layer_p = _primitive("read_layer", _read, lambda stack, index: stack.shape[1:])
write_p = _primitive("write_slots", _written, lambda slots, x, index, always: slots.shape)
stack_p = _primitive("stack_layers", lambda *layers: jnp.stack(layers), lambda *layers: (len(layers), *layers[0].shape))
spread_p = _primitive(
    "spread_layers",
    _spread,
    lambda stack, stages, chunks: (
        stages, *(() if chunks == 1 else (chunks,)), -(-stack.shape[0] // (stages * chunks)), *stack.shape[1:]
    ),
)  # fmt: skip
collect_p = _primitive(
    "collect_layers",
    _collected,
    lambda stack, layers, chunks: (layers, *stack.shape[2 if chunks == 1 else 3 :]),
)
unstack_p = Primitive("unstack_layers")
unstack_p.multiple_results = True
unstack_p.def_impl(lambda stack: list(stack))
unstack_p.def_abstract_eval(
    lambda stack: [_compat.result_type(stack.shape[1:], stack.dtype, (stack,))] * stack.shape[0]
)
mlir.register_lowering(unstack_p, mlir.lower_fun(lambda stack: list(stack), multiple_results=True))
STAGE_OPERATORS = frozenset(p.name for p in (shift_p, read_p, layer_p, write_p))
"""The names of the operators on stages. They run on shards, because XLA's partitioner would gather the stages."""
LAYER_STACKS = frozenset({"stack_layers", "unstack_layers", "spread_layers", "collect_layers"})
"""The names of the operators that exchange the layers of a stack between the stages. XLA partitions them."""
TO_STAGES = frozenset({"stack_layers", "spread_layers"})
"""The names of those that give the stages their layers."""
WITH_ALL_LAYERS = frozenset({"spread_layers", "collect_layers"})
"""The names of those whose other side is a stack of all layers."""


def shift_stages(x: Any, edge: Any = None, enters: Any = None, *, backward: bool = False) -> Any:
    """Moves a value of each stage to the next one.

    Args:
        x: `[N, ...]`, one value for each stage.
        edge: `[...]`, what the first stage gets; with `backward`, the last one. None for zeros.
        enters: for a ring, a bool: whether the first stage gets the edge. If not, it gets what the last one had.
        backward: whether values move to the stage before instead.

    Returns:
        `[N, ...]`. Stage s has what stage s - 1 had.

    Example:
        >>> shift_stages(jnp.arange(3), jnp.array(9)).tolist()
        [9, 0, 1]
    """
    return shift_p.bind(x, *(each for each in (edge, enters) if each is not None), backward=backward)


def read_slots(slots: Any, index: Any) -> Any:
    """Returns one slot of each stage.

    Args:
        slots: `[S, N, ...]`, S slots for each of N stages.
        index: `[N]`, the slot of each stage. A negative number reads the first slot.

    Returns:
        `[N, ...]`.
    """
    return read_p.bind(slots, index)


def read_layer(stack: Any, index: Any) -> Any:
    """Returns one layer of each stage, or one chunk of them. On shards it is a slice, which its users read in place.

    Args:
        stack: `[K, N, ...]`, K layers or chunks for each of N stages.
        index: `[N]`, the number of the layer of each stage. A negative number reads the first one.

    Returns:
        `[N, ...]`.

    Example:
        >>> read_layer(jnp.arange(6).reshape(3, 2), jnp.array([0, 2])).tolist()
        [0, 5]
    """
    return layer_p.bind(stack, index)


def write_slots(slots: Any, x: Any, index: Any, *, always: bool = False) -> Any:
    """Writes one slot of each stage, and returns all slots.

    Args:
        slots: `[S, N, ...]`, S slots for each of N stages.
        x: `[N, ...]`, what each stage writes.
        index: `[N]`, the slot of each stage. A stage with a negative number writes nothing.
        always: whether no number is negative. Nothing is read and selected then.
    """
    return write_p.bind(slots, x, index, always=always)


def stack_layers(*layers: Any) -> Any:
    """Stacks the same value of each layer.

    On shards, each layer may be sharded along any dimension before, and the stack along its layers afterwards. The
    exchange is an all-to-all.

    Args:
        layers: L arrays `[...]`.

    Returns:
        `[L, ...]`.
    """
    return stack_p.bind(*layers)


def unstack_layers(stack: Any) -> list[Any]:
    """Returns the L arrays `[...]` that a stack `[L, ...]` has: the inverse of `stack_layers`."""
    return unstack_p.bind(stack)


def spread_layers(stack: Any, stages: int, chunks: int = 1) -> Any:
    """Gives each stage its layers of a stack, if they are no equal, contiguous part of it.

    The layers are cut into N V chunks. Stage s has the chunks s, N + s, 2 N + s, and so on.

    On shards, the stack may be sharded along any dimension but its layers before, and along the stages afterwards. The
    exchange is an all-to-all.

    Args:
        stack: `[L, ...]`.
        stages: N, the number of stages.
        chunks: V, the number of chunks of a stage. N V is at most L.

    Returns:
        `[N, K, ...]` for one chunk a stage, else `[N, V, K, ...]`, where K is the largest number of layers of a chunk.
        A chunk with a layer less has in its first slot the last layer of the chunk before (`own_layers`).

    Example:
        >>> spread_layers(jnp.arange(4), 3).tolist()
        [[0, 1], [1, 2], [2, 3]]
        >>> spread_layers(jnp.arange(4), 2, 2).tolist()
        [[[0], [2]], [[1], [3]]]
    """
    if _compat.is_extended(stack.dtype):  # random keys
        return _spread(stack, stages=stages, chunks=chunks)
    return spread_p.bind(stack, stages=stages, chunks=chunks)


def collect_layers(stack: Any, layers: int, chunks: int = 1) -> Any:
    """Returns the stack `[L, ...]` of all layers of `[N, K, ...]` or `[N, V, K, ...]`: inverts `spread_layers`."""
    return collect_p.bind(stack, layers=layers, chunks=chunks)


@rule(shift_p)
def _shift_rule(x: Any, *edge: Any, backward: bool) -> Rule:
    """``s a, a -> s a; linear 0 1``: the neighbouring shards exchange the values of their border stages.

    In a ring, so do the last and the first shard; the third operand selects what the first stage gets. Without an edge,
    it gets zeros from the permute.
    """
    build = RuleBuilder()
    stage, dims = build.dim(STAGE, x.shape[0]), tuple(build.next(n) for n in x.shape[1:])
    entering = [dims, ()][: len(edge)]

    def body(shard: Shard, own: Any, *edge: Any) -> Any:
        n = shard.count(STAGE)
        if n == 1:
            return _shifted(own, *edge, backward=backward)
        if STAGE not in shard.axes:
            raise RuleError("'shift_stages' over several mesh axes: shard the stages over one")
        axis, at = shard.axes[STAGE], shard.index[STAGE]
        pairs = [((i + 1) % n, i) if backward else (i, (i + 1) % n) for i in range(n if len(edge) == 2 else n - 1)]
        border = lax.ppermute(own[0] if backward else own[-1], axis, pairs)
        if edge:
            border = jnp.where(at == (n - 1 if backward else 0), _entering(border, *edge), border)
        return _shifted(own, border, backward=backward)

    operands = [(stage, *dims), *entering]
    return build.rule(operands, [(stage, *dims)], linear=(tuple(range(min(len(operands), 2))),), body=body)


@rule(read_p)
def _read_rule(slots: Any, index: Any) -> Rule:
    """``n s a, s -> s a; whole n; linear 0``: every stage reads its own slots."""
    build = RuleBuilder()
    number, stage = build.whole(slots.shape[0], "n"), build.dim(STAGE, slots.shape[1])
    dims = tuple(build.next(n) for n in slots.shape[2:])
    return build.rule([(number, stage, *dims), (stage,)], [(stage, *dims)], linear=((0,),))


@rule(layer_p)
def _layer_rule(stack: Any, index: Any) -> Rule:
    """``n s a, s -> s a; whole n; linear 0``: every stage reads a layer of its own."""
    return _read_rule(stack, index)


@rule(write_p)
def _write_rule(slots: Any, x: Any, index: Any, *, always: bool = False) -> Rule:
    """``n s a, s a, s -> n s a; whole n; linear 0 1``: every stage writes its own slots."""
    build = RuleBuilder()
    number, stage = build.whole(slots.shape[0], "n"), build.dim(STAGE, slots.shape[1])
    dims = tuple(build.next(n) for n in slots.shape[2:])
    operands = [(number, stage, *dims), (stage, *dims), (stage,)]
    return build.rule(operands, [(number, stage, *dims)], linear=((0, 1),))


@rule(stack_p)
def _stack_rule(*layers: Any) -> Rule:
    """``a b, a b, a b -> n a b; whole n; linear 0 1 2``: each shard stacks its part of each layer."""
    build = RuleBuilder()
    dims = tuple(build.next(n) for n in layers[0].shape)
    number = build.whole(len(layers), "n")
    return build.rule([dims] * len(layers), [(number, *dims)], linear=(tuple(range(len(layers))),))


@rule(unstack_p)
def _unstack_rule(stack: Any) -> Rule:
    """``n a b -> a b, a b; whole n; linear 0``: each shard takes its part of each layer."""
    build = RuleBuilder()
    number = build.whole(stack.shape[0], "n")
    dims = tuple(build.next(n) for n in stack.shape[1:])
    return build.rule([(number, *dims)], [dims] * stack.shape[0], linear=((0,),))


@rule(spread_p)
def _spread_rule(stack: Any, *, stages: int, chunks: int) -> Rule:
    """``l a -> s k a; whole l s k; linear 0``: each shard has its part of all layers.

    With several chunks a stage: ``l a -> s v k a``.
    """
    build = RuleBuilder()
    slots = -(-stack.shape[0] // (stages * chunks))
    layers, stage = build.whole(stack.shape[0], "l"), build.whole(stages, "s")
    slot = (*([build.whole(chunks, "v")] if chunks > 1 else []), build.whole(slots, "k"))
    dims = tuple(build.next(n) for n in stack.shape[1:])
    return build.rule([(layers, *dims)], [(stage, *slot, *dims)], linear=((0,),))


@rule(collect_p)
def _collect_rule(stack: Any, *, layers: int, chunks: int) -> Rule:
    """``s k a -> l a; whole s k l; linear 0``: each shard has its part of all layers.

    With several chunks a stage: ``s v k a -> l a``.
    """
    build = RuleBuilder()
    names = ("s", "k") if chunks == 1 else ("s", "v", "k")
    of_stages = tuple(build.whole(n, name) for n, name in zip(stack.shape, names, strict=False))
    layer = build.whole(layers, "l")
    dims = tuple(build.next(n) for n in stack.shape[len(names) :])
    return build.rule([(*of_stages, *dims)], [(layer, *dims)], linear=((0,),))
