"""Operators that stack matrices, so that each device gets whole ones, and that take the stack apart again.

An optimizer such as Muon multiplies each matrix of a model by itself. If the matrices are stored in shards, every
device gathers all of them and repeats all products. `spread_matrices` stacks matrices of one shape, and the stack is
sharded along its matrices. The exchange of shards is an all-to-all, as for the layers of a pipeline
(`families.stacked.stages`). XLA partitions both operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autoshard import _compat
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.core.rule_builder import RuleBuilder


def _spread(*arrays: Any, places: int, stacked: bool) -> Any:
    stack = jnp.concatenate(arrays) if stacked else jnp.stack(arrays)
    more = places - stack.shape[0]
    return stack if not more else jnp.concatenate([stack, jnp.broadcast_to(stack[:1], (more, *stack.shape[1:]))])


def _collected(stack: Any, *, counts: tuple[int, ...], stacked: bool) -> list[Any]:
    if not stacked:
        return [stack[n] for n in range(len(counts))]
    return [stack[sum(counts[:n]) : sum(counts[: n + 1])] for n in range(len(counts))]


spread_p = Primitive("spread_matrices")
spread_p.def_impl(_spread)
spread_p.def_abstract_eval(
    lambda *arrays, places, stacked: _compat.result_type(
        (places, *arrays[0].shape[1 if stacked else 0 :]), arrays[0].dtype, arrays
    )
)
mlir.register_lowering(spread_p, mlir.lower_fun(_spread, multiple_results=False))
collect_p = Primitive("collect_matrices")
collect_p.multiple_results = True
collect_p.def_impl(_collected)
collect_p.def_abstract_eval(
    lambda stack, counts, stacked: [
        _compat.result_type((*((n,) if stacked else ()), *stack.shape[1:]), stack.dtype, (stack,)) for n in counts
    ]
)
mlir.register_lowering(collect_p, mlir.lower_fun(_collected, multiple_results=True))
MATRIX_STACKS = frozenset({spread_p.name, collect_p.name})
"""The names of these operators."""


def spread_matrices(arrays: Sequence[Any], places: int, *, stacked: bool = False) -> Any:
    """Stacks matrices of one shape and dtype, so that each device can have whole ones.

    Args:
        arrays: matrices `[...]`, N in total.
        places: P >= N, the number of matrices of the result. Copies of the first matrix fill the places after N.
        stacked: whether each array is itself a stack of matrices `[L, ...]`.

    Returns:
        `[P, ...]`.

    Example:
        >>> spread_matrices([jnp.zeros(2), jnp.ones(2)], places=3).tolist()
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    return spread_p.bind(*arrays, places=places, stacked=stacked)


def collect_matrices(stack: Any, counts: Sequence[int], *, stacked: bool = False) -> list[Any]:
    """Takes arrays of matrices from a stack: the inverse of `spread_matrices`.

    Args:
        stack: `[P, ...]`.
        counts: for each array, its number L of matrices.
        stacked: whether each array is a stack `[L, ...]`. If not, each is one matrix `[...]`.

    Returns:
        The arrays.
    """
    return collect_p.bind(stack, counts=tuple(counts), stacked=stacked)


@rule(spread_p)
def _spread_rule(*arrays: Any, places: int, stacked: bool) -> Rule:
    """``a b, a b -> p a b; whole p; linear 0 1``: each shard stacks its part of each matrix.

    With stacks of matrices: ``l a b, m a b -> p a b; whole l m p``.
    """
    build = RuleBuilder()
    dims = tuple(build.next(n) for n in arrays[0].shape[1 if stacked else 0 :])
    place = build.whole(places, "p")
    counts = [(build.whole(x.shape[0], f"l{n}"),) if stacked else () for n, x in enumerate(arrays)]
    return build.rule([(*own, *dims) for own in counts], [(place, *dims)], linear=(tuple(range(len(arrays))),))


@rule(collect_p)
def _collect_rule(stack: Any, *, counts: tuple[int, ...], stacked: bool) -> Rule:
    """``p a b -> a b, a b; whole p; linear 0``: each shard takes its part of each matrix.

    With stacks of matrices: ``p a b -> l a b, m a b; whole p l m``.
    """
    build = RuleBuilder()
    place = build.whole(stack.shape[0], "p")
    dims = tuple(build.next(n) for n in stack.shape[1:])
    own = [(build.whole(count, f"l{n}"),) if stacked else () for n, count in enumerate(counts)]
    return build.rule([(place, *dims)], [(*each, *dims) for each in own], linear=((0,),))
