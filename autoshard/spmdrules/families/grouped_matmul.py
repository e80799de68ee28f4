"""Grouped matrix products: each group of consecutive rows has its own matrix, as for dropless experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard._compat import bind_primitive, primitive
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Body, Dims, Rule, Shard
from autoshard.spmdrules.core.rule_builder import GROUPS, Dim, RuleBuilder, drops_sharding
from autoshard.spmdrules.families.contraction import EITHER, place_dims

_RAGGED_DOT = primitive("ragged_dot_general")


@rule(_RAGGED_DOT)
def ragged_dot_general(x: Any, y: Any, sizes: Any, **params: Any) -> Rule:
    """``m k, v k n, w -> m n; reduce k; whole w; index v; offset m; linear 0; linear 1``: one matrix per row group.

    A shard of the rows holds some or none of the rows of each group. A shard of the groups gives zeros for rows of
    other groups. If the rows are contracted, the groups are a dimension of the result:
    ``k m, k n, w -> v m n; reduce k; whole w; offset v``. A ragged batch dimension passes. The group sizes are
    whole.

    https://openxla.org/stablehlo/spec#ragged_dot
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (x_contract, y_contract), (x_batch, y_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    build = RuleBuilder()
    batch = [build.dim("b", x.shape[d]) for d in x_batch]
    summed = [build.dim("k", x.shape[d], "reduce", "sum") for d in x_contract]
    placed = [(x_batch, batch), (x_contract, summed)]
    if ragged not in (*x_batch, *x_contract):
        placed.append(([ragged], [build.dim("m", x.shape[ragged], "offset")]))
    lhs, _ = place_dims(build, "m", x.shape, placed)
    free = [dim for d, dim in enumerate(lhs) if d not in (*x_batch, *x_contract)]
    groups = [build.dim(GROUPS, y.shape[d], "index") for d in numbers.rhs_group_dimensions]
    rhs, y_free = place_dims(
        build, "n", y.shape, [(y_batch, batch), (y_contract, summed), (numbers.rhs_group_dimensions, groups)]
    )
    before = [lhs[d] for d in _before_ragged(numbers, len(x.shape))] if len(sizes.shape) > 1 else []
    if ragged in x_batch:  # group sizes have no effect: each batch element has its own matrix
        counts = (*before, build.next(sizes.shape[-1]))
        return build.rule(
            [lhs, rhs, counts], [(*batch, *free, *y_free)], EITHER, local=drops_sharding(params["out_sharding"])
        )
    if ragged in x_contract:
        groups = [build.dim(GROUPS, sizes.shape[-1], "offset")]
        result = (*groups, *batch, *free, *y_free)
    else:
        result = (*batch, *free, *y_free)
    counts = (*before, build.whole(sizes.shape[-1]))
    return build.rule([lhs, rhs, counts], [result], EITHER, body=_body(params, ragged, lhs, groups[0]))


def drawn_group_sizes(rng: np.random.Generator, shape: Sequence[int], rows: int) -> np.ndarray:
    """Returns random sizes of groups, int32 of a shape `[..., groups]`, that add up to `rows` at most.

    Some groups are empty, and some rows are in no group.
    """
    *lead, groups = shape
    ends = np.sort(rng.integers(0, rows + 1, (*lead, groups)), -1)
    return np.diff(ends, axis=-1, prepend=0).astype(np.int32)


def _before_ragged(numbers: Any, rank: int) -> list[int]:
    """Returns the dimensions of the left operand that the group sizes also have: groups may differ along them."""
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    free = [d for d in range(rank) if d not in (*contract, *batch)]
    same_kind = next(list(dims) for dims in (batch, contract, free) if ragged in dims)
    return [*(batch if same_kind != list(batch) else ()), *same_kind[: same_kind.index(ragged)]]


def _body(params: Mapping[str, Any], ragged: int, lhs: Dims, groups: Dim) -> Body:
    """Returns a body that multiplies this shard's rows of this shard's groups.

    Rows of earlier groups are rolled behind the shard's own rows. There they belong to no group and are not computed.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (x_contract, y_contract), (x_batch, y_batch) = numbers.dot_dimension_numbers
    free = [d for d in range(len(lhs)) if d not in (*x_contract, *x_batch)]
    before = _before_ragged(numbers, len(lhs))
    partners = dict(zip((*x_batch, *x_contract), (*y_batch, *y_contract), strict=True))
    in_result = {d: i for i, d in enumerate((*x_batch, *free))}

    def body(shard: Shard, x: Any, y: Any, sizes: Any) -> Any:
        ends = jnp.cumsum(sizes, -1)
        start = shard.offset(lhs[ragged][0]) if lhs[ragged] else 0
        first, last = (jnp.clip(edge - start, 0, x.shape[ragged]) for edge in (ends - sizes, ends))
        here = (last - first).astype(sizes.dtype)
        if not groups or shard.count(groups[0]) == 1:
            return _bind(params, x, y, here)
        own = shard.offset(groups[0]) + jnp.arange(shard.size(groups[0]))
        skipped, here = jnp.take(first, own[0], -1), jnp.take(here, own, -1)
        x = _rolled(x, skipped, before, ragged)
        if ragged in x_contract:
            return _bind(params, x, _rolled(y, skipped, [partners[d] for d in before], partners[ragged]), here)
        out = _bind(params, x, y, here)
        return _rolled(out, -skipped, [in_result[d] for d in before], in_result[ragged])

    return body


def _bind(params: Mapping[str, Any], x: Any, y: Any, sizes: Any) -> Any:
    (out,) = bind_primitive(_RAGGED_DOT, {**params, "out_sharding": None}, x, y, sizes)
    return out


def _rolled(x: Any, by: Any, before: Sequence[int], axis: int) -> Any:
    """Rolls `x` along `axis` so that element `by` comes first; `by` may have the dimensions `before` of x."""
    if not by.ndim:
        return jnp.roll(x, -by, axis)
    at = (by[..., None] + jnp.arange(x.shape[axis])) % x.shape[axis]
    return jnp.take_along_axis(x, _broadcastable(at, (*before, axis), x.ndim), axis)


def _broadcastable(x: Any, where: Sequence[int], rank: int) -> Any:
    """Transposes `x` so that its dimensions are at `where` of an array of `rank` dimensions, the others of size 1."""
    order = sorted(range(len(where)), key=lambda i: where[i])
    return jnp.expand_dims(jnp.transpose(x, order), tuple(d for d in range(rank) if d not in where))
