"""The gather of weights before a loop, as an operator: the loop then takes the gathered weights."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.core.rule_builder import pass_through

gather_p = Primitive("gather_once")
gather_p.def_impl(lambda x: x)
gather_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(gather_p, lambda _, x: [x])


def gather_once(weights: Any) -> Any:
    """Returns weights as they are. On a mesh, the result has the sharding in which operators use the weights.

    An operator gathers a weight that is stored in shards where it uses it: in a loop, in every iteration. The result of
    `gather_once` counts as a computed value, not as a stored weight. So it is gathered here, before the loop, and each
    device holds it until the loop has ended.

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


@rule(gather_p)
def _gather_rule(weights: Any) -> Rule:
    """``a b -> a b; linear 0``: each shard has its part of the weights."""
    build, dims = pass_through(weights.shape)
    return build.rule([dims], [dims], linear=((0,),))
