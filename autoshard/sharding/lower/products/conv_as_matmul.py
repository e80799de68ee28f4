"""Convolutions that are matrix products, because their window has only one position.

An example is the gradient of a 1 x 1 kernel. They are lowered as matrix products, because XLA's partitioner
reduce-scatters the partial sums of a matrix product, but all-reduces those of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax import lax

from autoshard.sharding.program.operator_kinds import CONVOLUTION
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Op


def is_matmul(op: Op) -> bool:
    """Whether an operator is a convolution whose window has one position, without groups or padding."""
    if op.name != CONVOLUTION:
        return False
    params, (lhs, rhs), out = op.eqn.params, (v.aval for v in op.eqn.invars), op.eqn.outvars[0].aval
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1 or set(params["lhs_dilation"]) - {1}:
        return False
    one_position = all(out.shape[dim] == 1 for dim in params["dimension_numbers"].out_spec[2:])
    return one_position and all(0 <= start and end <= lhs.shape[dim] for dim, start, end, _ in _slices(params, rhs))


def matmul(op: Op, lhs: Any, rhs: Any) -> Any:
    """Return the result of such a convolution without its window dimensions: batch and features, in the same order."""
    params = op.eqn.params
    numbers = params["dimension_numbers"]
    starts, ends, steps = [0] * lhs.ndim, list(lhs.shape), [1] * lhs.ndim
    for dim, start, end, step in _slices(params, rhs):
        starts[dim], ends[dim], steps[dim] = start, end, step
    result = lax.dot_general(
        lax.slice(lhs, starts, ends, steps),
        rhs,
        ((numbers.lhs_spec[1:], numbers.rhs_spec[1:]), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return result if numbers.out_spec[0] < numbers.out_spec[1] else result.T


def _slices(params: Mapping[str, Any], rhs: Any) -> Iterator[tuple[int, int, int, int]]:
    """Yield the slice of `lhs` that the window covers, as (dimension of `lhs`, start, end, step)."""
    numbers = params["dimension_numbers"]
    window = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], params["padding"], params["rhs_dilation"], strict=True)
    for dim, rhs_dim, (low, _), step in window:
        yield dim, -low, -low + (rhs.shape[rhs_dim] - 1) * step + 1, step


def add_window_dims(op: Op, result: Any) -> Any:
    """Return the result of `matmul` with the window dimensions of the convolution."""
    return lax.expand_dims(result, sorted(op.eqn.params["dimension_numbers"].out_spec[2:]))


def drop_window_dims(op: Op, spec: Spec) -> Spec:
    """Return the sharding of the result of `matmul`, given that of the convolution's result."""
    window = op.eqn.params["dimension_numbers"].out_spec[2:]
    return tuple(axes for dim, axes in enumerate(spec) if dim not in window)
