"""Convolutions that are matrix products: one position of the window, and all of it is summed.

The gradient of a kernel of 1 x 1 is such a one. XLA's partitioner reduces it whole on every device; the sum of the
product it scatters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax import lax

from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Op


def is_product(op: Op) -> bool:
    """Whether an operator is a convolution whose window has one position, without groups or padding."""
    if op.name != "conv_general_dilated":
        return False
    params, (lhs, rhs), out = op.eqn.params, (v.aval for v in op.eqn.invars), op.eqn.outvars[0].aval
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1 or set(params["lhs_dilation"]) - {1}:
        return False
    one_position = all(out.shape[dim] == 1 for dim in params["dimension_numbers"].out_spec[2:])
    return one_position and all(0 <= start and end <= lhs.shape[dim] for dim, start, end, _ in _taken(params, rhs))


def product(op: Op, lhs: Any, rhs: Any) -> Any:
    """What such a convolution computes, without the dimensions of its window: two dimensions in their order."""
    params = op.eqn.params
    numbers = params["dimension_numbers"]
    starts, ends, steps = [0] * lhs.ndim, list(lhs.shape), [1] * lhs.ndim
    for dim, *what in _taken(params, rhs):
        starts[dim], ends[dim], steps[dim] = what
    found = lax.dot_general(
        lax.slice(lhs, starts, ends, steps),
        rhs,
        ((numbers.lhs_spec[1:], numbers.rhs_spec[1:]), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return found if numbers.out_spec[0] < numbers.out_spec[1] else found.T


def _taken(params: Mapping[str, Any], rhs: Any) -> Iterator[tuple[int, int, int, int]]:
    """What a window's one position takes of each of its dimensions: (dimension of `lhs`, start, end, step)."""
    numbers = params["dimension_numbers"]
    window = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], params["padding"], params["rhs_dilation"], strict=True)
    for dim, of_rhs, (low, _), step in window:
        yield dim, -low, -low + (rhs.shape[of_rhs] - 1) * step + 1, step


def unfolded(op: Op, found: Any) -> Any:
    """The result of `product` with the dimensions of its window."""
    return lax.expand_dims(found, sorted(op.eqn.params["dimension_numbers"].out_spec[2:]))


def folded(op: Op, spec: Spec) -> Spec:
    """The sharding of the result of `product`, from that of the convolution's."""
    window = op.eqn.params["dimension_numbers"].out_spec[2:]
    return tuple(over for dim, over in enumerate(spec) if dim not in window)
