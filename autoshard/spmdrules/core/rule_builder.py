"""Functions that the families share: they name the factors of dimensions, and rewrite parameters for a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import dtypes

from autoshard.spmdrules.core.rule import Body, Dims, Factor, Kind, LocalParams, Reduction, Rule, Shard

Dim = tuple[str, ...]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

GROUPS = "v"  # the factor of the groups of a grouped matmul, except in the array of group sizes


class RuleBuilder:
    """Creates the factors of one rule and gives each a unique name."""

    def __init__(self) -> None:
        self.factors: dict[str, Factor] = {}
        self.letter_count = 0

    def dim(self, stem: str, size: int, kind: Kind = "pass", op: Reduction | None = None) -> Dim:
        """Creates a dimension of one factor, named `stem`, or `stem1`, `stem2`, ... if that is taken.

        A dimension of size 1 has no factor. A dimension of size 0 cannot be sharded, so its kind is `whole`.
        """
        if size == 1:
            return ()
        if size == 0:
            kind, op = "whole", None
        name, tries = stem, 0
        while name in self.factors:
            tries += 1
            name = f"{stem}{tries}"
        self.factors[name] = Factor(name, size, kind, op)
        return (name,)

    def whole(self, size: int, stem: str = "w") -> Dim:
        """Creates a dimension that the operator needs whole."""
        return self.dim(stem, size, "whole")

    def next(self, size: int, kind: Kind = "pass") -> Dim:
        """Creates a dimension named by the next free letter."""
        dim = self.dim(_LETTERS[self.letter_count % 26], size, kind)
        self.letter_count += len(dim)
        return dim

    def dims(self, shape: Sequence[int]) -> Dims:
        """Creates pass-through dimensions for a shape, named by letters in order."""
        return tuple(self.next(size) for size in shape)

    def rule(
        self,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        linear: Sequence[tuple[int, ...]] = (),
        moves: tuple[int, ...] = (),
        local: LocalParams | None = None,
        body: Body | None = None,
    ) -> Rule:
        """Builds the rule over these dimensions, with its factors in order of first appearance."""
        arrays = (*operands, *results)
        names = dict.fromkeys(f for array in arrays for dim in array for f in dim)
        factors = tuple(self.factors[name] for name in names)
        return Rule(tuple(operands), tuple(results), factors, tuple(linear), moves, local, body)


def pass_through(shape: Sequence[int]) -> tuple[RuleBuilder, Dims]:
    """Returns a builder and pass-through dimensions for `shape`."""
    build = RuleBuilder()
    return build, build.dims(shape)


def with_kind(
    shape: Sequence[int], axes: Sequence[int], kind: Kind, op: Reduction | None = None
) -> tuple[RuleBuilder, Dims]:
    """Returns a builder and dimensions for `shape`: those at `axes` are of the given kind, the others pass through."""
    build = RuleBuilder()
    stem = "r" if kind == "reduce" else "w"
    rest = iter(build.dims([n for d, n in enumerate(shape) if d not in axes]))
    return build, tuple(build.dim(stem, n, kind, op) if d in axes else next(rest) for d, n in enumerate(shape))


def replace_dim(dims: Dims, axis: int, dim: Dim) -> Dims:
    """Returns `dims` with the dimension at `axis` replaced."""
    return (*dims[:axis], dim, *dims[axis + 1 :])


def without_sharding(params: Mapping[str, Any], shard: Shard) -> Mapping[str, Any]:
    """Removes the sharding of the global result from the parameters: it does not apply to a shard."""
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}


def drops_sharding(*shardings: Any) -> LocalParams | None:
    """Returns `without_sharding` if a sharding is set, else None."""
    return without_sharding if any(s is not None for s in shardings) else None


def is_numeric(dtype: Any) -> bool:
    """Whether arrays of this type can be added: booleans and random keys cannot."""
    return not jnp.issubdtype(dtype, dtypes.extended) and jnp.issubdtype(dtype, jnp.number)
