"""The values of one microbatch that are computed from its rows and from what all microbatches share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard.sharding.pipeline.stage_cut import StageCut

Env = dict[Any, Any]


class MicrobatchValues:
    """Computes values of a program that is cut at its layers.

    Args:
        cut: the program of one microbatch.
        rows: for each of the microbatch's inputs after the first, which is its number, the rows of all microbatches
            `[M, ...]`.
        whole: the program's other inputs.
    """

    def __init__(self, cut: StageCut, rows: Sequence[Any], whole: Sequence[Any]):
        self.cut, self.rows = cut, rows
        self.shared: Env = dict(zip(cut.whole, whole, strict=True))
        shared = cut.shared
        self.shared |= zip(shared, self.computed(shared, {}), strict=True)

    def inputs_of(self, number: Any) -> Env:
        """Return the inputs of one microbatch; those of the first one for a negative number."""
        number = jnp.maximum(number, 0)
        first, *others = self.cut.rows
        rows = [lax.dynamic_index_in_dim(stack, number, 0, keepdims=False) for stack in self.rows]
        return {first: number.astype(first.aval.dtype), **dict(zip(others, rows, strict=True))}

    def of_shared(self, atom: Any) -> Any:
        """Return a value that all microbatches share."""
        return self.computed([atom], {})[0]

    def computed(self, atoms: Iterable[Any], known: Env) -> list[Any]:
        """Compute variables from known ones and from those that all microbatches share."""
        atoms, env = [*atoms], {**self.shared, **known}
        needed = {a for a in atoms if not isinstance(a, _compat.Literal) and a not in env}
        eqns = []
        for eqn in reversed(self.cut.jaxpr.eqns):
            if needed.intersection(eqn.outvars):
                eqns.append(eqn)
                needed.difference_update(eqn.outvars)
                needed |= {a for a in eqn.invars if not isinstance(a, _compat.Literal) and a not in env}
        assert not needed, f"a part of the pipeline lacks {needed}"
        for eqn in reversed(eqns):
            operands = [a.val if isinstance(a, _compat.Literal) else env[a] for a in eqn.invars]
            with _compat.source_of(eqn):
                results = _compat.bind(eqn, eqn.params, *operands)
            env |= {v: x for v, x in zip(eqn.outvars, results, strict=True) if v not in env}
        return [a.val if isinstance(a, _compat.Literal) else env[a] for a in atoms]

    def on_stages(self, variables: Sequence[Any], numbers: Any) -> list[Any]:
        """Compute variables at each stage, for its microbatch."""
        if not variables:
            return []
        numbers = jnp.maximum(numbers, 0)
        taken = [jnp.take(stack, numbers, axis=0, mode="clip") for stack in self.rows]
        first, *others = self.cut.rows
        return jax.vmap(
            lambda number, rows: self.computed(variables, {first: number, **dict(zip(others, rows, strict=True))})
        )(numbers.astype(first.aval.dtype), taken)
