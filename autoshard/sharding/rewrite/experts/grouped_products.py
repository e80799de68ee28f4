"""Grouped products in a program, `ragged_dot_general`, as the operators of `kernels.grouped`.

    rows      m k, v k n -> m n    each row times the matrix of its group: the product, and its gradient of the rows
    matrices  m k, m n -> v k n    the sum over each group's rows: its gradient of the matrices

Which dimension of an operand is which is read from the dimension numbers. The reading is proven: both definitions are
evaluated on small arrays in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard._shown import shown
from autoshard.kernels.grouped.call import GroupedCall
from autoshard.kernels.grouped.matmul import (
    grouped_product,
    grouped_rows,
    grouped_rows_gradient,
    grouped_weights_gradient,
)
from autoshard.sharding.rewrite.constants import PROOF_TOLERANCE
from autoshard.sharding.rewrite.slices import Refused

RAGGED_DOT = "ragged_dot_general"
_PRECISIONS = (None, lax.Precision.DEFAULT)


@shown
@dataclass(frozen=True)
class GroupedProduct:
    """How a `ragged_dot_general` is computed by a kernel.

    Attributes:
        kind: `rows` or `matrices`.
        first: the dimensions of its first operand in the kernel's order: rows, then the contracted or free dimension.
        second: those of its second operand: groups, contracted, free; or rows, free.
        groups: the number of groups.
    """

    kind: Literal["rows", "matrices"]
    first: tuple[int, ...]
    second: tuple[int, ...]
    groups: int

    @property
    def is_transposed(self) -> bool:
        """Whether the kernel takes the matrices as they are, `[groups, free, contracted]`."""
        return self.kind == "rows" and self.second[1] > self.second[2]

    def compute(self, call: GroupedCall, x: jax.Array, y: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        """Return the result by the operators, for programs that are differentiated already."""
        own = lax.iota(jnp.int32, self.groups)
        x, sizes = jnp.transpose(x, self.first), sizes.astype(jnp.int32)
        positions = lax.iota(jnp.int32, x.shape[0])
        if self.kind == "matrices":
            y = jnp.transpose(y, self.second)
            return [grouped_weights_gradient(x, y, sizes, own, positions, call=call)]
        y = jnp.moveaxis(y, self.second[0], 0)
        if not self.is_transposed:
            return [grouped_rows(x, y, sizes, own, positions, call=call)]
        return [grouped_rows_gradient(x, y, sizes, own, positions, call=replace(call, transposed=True))]

    def differentiable(self, call: GroupedCall, x: jax.Array, y: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        """Return the result of `rows`, for programs that are differentiated later."""
        own = lax.iota(jnp.int32, self.groups)
        x, y = jnp.transpose(x, self.first), jnp.transpose(y, self.second)
        return [grouped_product(call, x, y, sizes.astype(jnp.int32), own)]

    def by_definition(self, x: np.ndarray, y: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the result as the kernel defines it."""
        x, y = np.transpose(x, self.first), np.transpose(y, self.second)
        ends = np.cumsum(sizes)
        parts = [slice(int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True)]
        if self.kind == "matrices":
            return np.stack([x[part].T @ y[part] for part in parts])
        out = np.zeros((x.shape[0], y.shape[2]))
        for group, part in enumerate(parts):
            out[part] = x[part] @ y[group]
        return out


def grouped_product_of(eqn: Any, dtypes: Sequence[jax.typing.DTypeLike]) -> GroupedProduct:
    """Read a `ragged_dot_general`, and prove the reading.

    Args:
        eqn: the equation.
        dtypes: the dtypes that the kernel takes.

    Raises:
        Refused: the kernel does not compute it.
    """
    x, y, sizes = (v.aval for v in eqn.invars[:3])
    params = eqn.params
    numbers = params["ragged_dot_dimension_numbers"]
    (x_contract, y_contract), batch = numbers.dot_dimension_numbers
    if any(batch) or len(sizes.shape) != 1 or len(numbers.lhs_ragged_dimensions) != 1:
        raise Refused("it has batch dimensions, which the kernel has not")
    if params.get("group_offset") is not None or len(eqn.invars) != 3:
        raise Refused("it starts at a group other than the first, which the kernel does not")
    if params["precision"] not in (*_PRECISIONS, (lax.Precision.DEFAULT, lax.Precision.DEFAULT)):
        raise Refused(f"it has precision {params['precision']}; the kernel has the default one")
    (out,) = eqn.outvars
    names = " or ".join(jnp.dtype(each).name for each in dtypes)
    if not (x.dtype == y.dtype == out.aval.dtype and x.dtype in dtypes):
        raise Refused(
            f"the kernel takes rows and matrices of one dtype, {names}, and returns it; not "
            f"{x.dtype} and {y.dtype} to {out.aval.dtype}"
        )
    (ragged,) = numbers.lhs_ragged_dimensions
    groups = numbers.rhs_group_dimensions
    if len(x_contract) != 1 or len(x.shape) != 2 or len(y.shape) != 2 + len(groups):
        raise Refused(f"the kernel takes rows [m, k] and matrices [groups, k, n], not {x.shape} and {y.shape}")
    free = next(d for d in range(2) if d != x_contract[0])
    if ragged == x_contract[0]:
        found = GroupedProduct("matrices", (ragged, free), (y_contract[0], 1 - y_contract[0]), sizes.shape[0])
    else:
        left = next(d for d in range(3) if d not in (*groups, *y_contract))
        found = GroupedProduct("rows", (ragged, x_contract[0]), (*groups, y_contract[0], left), sizes.shape[0])
    _prove(found, x_contract[0], y_contract[0], ragged, groups)
    return found


def _prove(found: GroupedProduct, x_contract: int, y_contract: int, ragged: int, groups: Sequence[int]) -> None:
    """Compare the kernel's definition with that of `ragged_dot_general` on small arrays in float64.

    Raises:
        Refused: they differ.
    """
    rng = np.random.default_rng(0)
    rows, contracted, columns, sizes = 9, 4, 5, np.array([3, 0, 4])  # the last rows are in no group
    of_x = {ragged: rows, 1 - ragged: contracted}
    if groups:
        of_y = {groups[0]: len(sizes), y_contract: contracted}
    else:
        of_y = {y_contract: rows}
    rank = 2 + len(groups)
    x = rng.standard_normal([of_x[d] for d in range(2)])
    y = rng.standard_normal([of_y.get(d, columns) for d in range(rank)])
    ends, position = np.cumsum(sizes), np.arange(rows).reshape([-1 if d == ragged else 1 for d in range(2)])
    parts = []
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        of_group = np.where((position >= end - size) & (position < end), x, 0.0)
        matrix = np.take(y, group, groups[0]) if groups else y
        contract = y_contract - (1 if groups and groups[0] < y_contract else 0)
        parts.append(np.tensordot(of_group, matrix, (x_contract, contract)))
    expected = np.sum(parts, axis=0) if groups else np.stack(parts)
    made = found.by_definition(x, y, sizes)
    if made.shape != expected.shape or np.max(np.abs(made - expected)) > PROOF_TOLERANCE * np.max(np.abs(expected)):
        raise Refused("the proof failed: on small arrays the program differs from a grouped product")
