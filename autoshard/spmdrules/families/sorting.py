"""Operators that sort the elements along one dimension, which they need whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax

from autoshard._compat import primitives
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.core.rule_builder import replace_dim, with_kind


@rule(lax.sort_p)
def sort(*xs: Any, dimension: int, **_: Any) -> Rule:
    """``a w -> a w; whole w``: keys and values sorted along one dimension.

    https://openxla.org/stablehlo/spec#sort
    """
    build, dims = with_kind(xs[0].shape, (dimension % len(xs[0].shape),), "whole")
    return build.rule([dims] * len(xs), [dims] * len(xs))


@rule(lax.top_k_p)
def top_k(x: Any, *, k: int, axis: int = -1, **_: Any) -> Rule:
    """``a w -> a w1, a w1; whole w w1``: the largest elements along one dimension, and their positions.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.top_k.html
    """
    return _picked(x.shape, axis, k)


@rule(*primitives("approx_top_k"))
def approx_top_k(
    x: Any, *operands: Any, k: int, reduction_dimension: int, aggregate_to_topk: bool = True,
    recall_target: float = 0.95, reduction_input_size_override: int = -1, **_: Any
) -> Rule:  # fmt: skip
    """``a w -> a w1, a w1; whole w w1``: approximately the largest elements along one dimension, and their positions.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.approx_max_k.html
    """
    if aggregate_to_topk:
        return _picked(x.shape, reduction_dimension, k)
    approximate = functools.partial(
        lax.approx_max_k, k=k, reduction_dimension=reduction_dimension, recall_target=recall_target,
        reduction_input_size_override=reduction_input_size_override, aggregate_to_topk=False,
    )  # fmt: skip
    values, _positions = jax.eval_shape(approximate, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return _picked(x.shape, reduction_dimension, values.shape[reduction_dimension])


def _picked(shape: tuple[int, ...], axis: int, count: int) -> Rule:
    axis %= len(shape)
    build, dims = with_kind(shape, (axis,), "whole")
    picked = replace_dim(dims, axis, build.whole(count))
    return build.rule([dims], [picked, picked])
