"""Operators that mark where collectives run. They return their operand.

A weight is gathered before a loop, and a sum is reduced after it. Rows of a batch are gathered before they are split.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.core.rule_builder import pass_through, replace_dim

gather_p = Primitive("gather_once")
before_loop_p = Primitive("gather_before_loop")
after_loop_p = Primitive("reduce_after_loop")
for _primitive in (gather_p, before_loop_p, after_loop_p):
    _primitive.def_impl(lambda x: x)
    _primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(_primitive, lambda _, x: [x])

whole_p = Primitive("gather_rows")
whole_p.def_impl(lambda x, *, dim: x)
whole_p.def_abstract_eval(lambda x, *, dim: x)
mlir.register_lowering(whole_p, lambda _, x, *, dim: [x])

AROUND_LOOPS = frozenset({before_loop_p.name, after_loop_p.name})
OUTSIDE_LOOPS = AROUND_LOOPS | {gather_p.name}


def gather_once(weights: Any) -> Any:
    """Returns weights as they are. On a mesh, the result has the sharding in which operators use the weights.

    An operator gathers a weight that is stored in shards where it uses it: in a loop, in every iteration. The result of
    `gather_once` counts as a computed value, not as a stored weight. So it is gathered here, before the loop, and each
    device holds it until the loop has ended. The stages of a pipeline gather their layers this way.

    Args:
        weights: `[...]`, of any type.

    Returns:
        `[...]`.

    Example:
        >>> import jax.numpy as jnp
        >>> gather_once(jnp.arange(3)).tolist()
        [0, 1, 2]
    """
    return gather_p.bind(weights)


def gather_before_loop(weight: Any) -> Any:
    """Returns a weight as it is, like `gather_once`, for a loop that uses the same weight in every iteration.

    Args:
        weight: `[...]`, of any type.

    Returns:
        `[...]`.

    Example:
        >>> import jax.numpy as jnp
        >>> gather_before_loop(jnp.arange(3)).tolist()
        [0, 1, 2]
    """
    return before_loop_p.bind(weight)


def reduce_after_loop(total: Any) -> Any:
    """Returns a sum as it is. On a mesh, it is reduced over the devices here, and not in each iteration of its loop.

    In the loop, the sum has the sharding in which it is computed. The result has that of a stored gradient.

    Args:
        total: `[...]`, of any type: what a loop over time has added up.

    Returns:
        `[...]`.

    Example:
        >>> import jax.numpy as jnp
        >>> reduce_after_loop(jnp.arange(3)).tolist()
        [0, 1, 2]
    """
    return after_loop_p.bind(total)


@rule(gather_p, before_loop_p, after_loop_p)
def _outside_rule(array: Any) -> Rule:
    """``a b -> a b; linear 0``: each shard has its part of the array."""
    build, dims = pass_through(array.shape)
    return build.rule([dims], [dims], linear=((0,),))


def gather_rows(array: Any, dim: int) -> Any:
    """Returns its operand. On a mesh, one dimension of the operand is gathered first, and gets a new logical axis.

    If a reshape splits the rows of a batch, both parts are logical axes in all values with these rows. The batch then
    has at most as many shards as the first part has elements. With this operator before the reshape, the batch stays
    one axis.

    Args:
        array: `[...]`, of any type.
        dim: the dimension.

    Returns:
        `[...]`.

    Example:
        >>> import jax.numpy as jnp
        >>> gather_rows(jnp.arange(3), 0).tolist()
        [0, 1, 2]
    """
    return whole_p.bind(array, dim=dim)


@rule(whole_p)
def _whole_rule(array: Any, *, dim: int) -> Rule:
    """``w b -> w1 b; whole w w1; linear 0; moves 0``: the results' dimension is not that of the operand."""
    build, dims = pass_through(array.shape)
    own, other = build.whole(array.shape[dim]), build.whole(array.shape[dim])
    return build.rule([replace_dim(dims, dim, own)], [replace_dim(dims, dim, other)], linear=((0,),), moves=(0,))
