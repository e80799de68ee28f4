"""Counts the FLOPs of one operator on whole, unsharded operands.

A contraction counts 2 x (elements of one operand) x (sizes of the result's dimensions that this operand lacks). For a
convolution this operand is the kernel, so that taps on padding count too. Of a grouped product (`lax.ragged_dot`), XLA
makes one masked product of all rows for each group; on TPUs of the gradient of the matrices only, on other platforms
always (`masked_groups`). A vendor's kernel counts the products that it computes (`spmdrules.families.cudnn`). A
declared operator counts the FLOPs that it declares, else the contractions inside it. Every other operator, and a
declared one without contractions, counts one FLOP for each element of its results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.program.array_sizes import itemsize
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, CONVOLUTION
from autoshard.spmdrules.core.rule import Dims
from autoshard.spmdrules.custom_ops.kernel_cost import declared_costs
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator, returning_list
from autoshard.spmdrules.families.cudnn import KERNELS, kernel_flops
from autoshard.spmdrules.ir.program import Op, Program, build

Shapes = tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of each operand


def flops_of(op: Op) -> float:
    """FLOPs of one operator on whole operands, of a grouped product those on a TPU."""
    if op.rule is None:
        return 0.0
    found = sum(matmul_flops(op).values())
    return found if found or op.name in CONTRACTIONS else float(sum(math.prod(v.aval.shape) for v in op.eqn.outvars))


@shown
class ElementType(NamedTuple):
    """What a product multiplies: bytes per element, and whether the elements are integers."""

    itemsize: int
    integer: bool = False


_known: WeakKeyDictionary[Op, dict[str, Mapping[ElementType, float]]] = WeakKeyDictionary()


def matmul_flops(op: Op, platform: str = "tpu") -> Mapping[ElementType, float]:
    """FLOPs of the contractions in an operator on a platform: what they multiply -> FLOPs."""
    known = _known.setdefault(op, {})
    if platform not in known:
        known[platform] = _matmul_flops(op, platform)
    return known[platform]


def _matmul_flops(op: Op, platform: str) -> Mapping[ElementType, float]:
    if op.name in CONTRACTIONS:
        return {_multiplied(*(v.aval for v in op.eqn.invars[:2])): _contraction_flops(op, platform)}
    if op.name in KERNELS:
        avals = [v.aval for v in op.eqn.invars]
        return {ElementType(itemsize(avals[0])): kernel_flops(op.name, avals, op.eqn.params)}
    if not is_operator(op.eqn.primitive):
        return {}
    operands = [v.aval for v in op.eqn.invars]
    if costs := declared_costs(op.eqn, operands):
        sizes = {cost.itemsize for cost in costs}
        return {ElementType(size): sum(cost.flops for cost in costs if cost.itemsize == size) for size in sizes}
    return _inner_matmul_flops(op.eqn.params["fn"], tuple((x.shape, x.dtype) for x in operands), platform)


def masked_groups(op: Op, platform: str) -> tuple[int, int]:
    """How XLA computes a grouped product: by masked products of all rows, one for each group.

    Returns:
        The number of products, and the number of operands of which it stores a masked copy for each group: 1 and 0 if
        it masks none. On TPUs the masks are applied inside the product.
    """
    dims = op.eqn.params.get("ragged_dot_dimension_numbers")
    if dims is None:
        return 1, 0
    (contracted, _), (batch, _) = dims.dot_dimension_numbers
    ragged, groups = set(dims.lhs_ragged_dimensions), op.eqn.invars[2].aval.shape[-1]
    if ragged <= set(contracted):
        return groups, 0 if platform == "tpu" else 2
    return (1, 0) if platform == "tpu" or ragged <= set(batch) else (groups, 1)


def _multiplied(x: Any, y: Any) -> ElementType:
    """What a product of two operands multiplies: elements like those of the narrower operand.

    XLA converts an 8-bit operand to the dtype of a wider one.
    """
    narrow, wide = sorted((x, y), key=itemsize)
    size = itemsize(narrow) if itemsize(narrow) > 1 else itemsize(wide)
    return ElementType(size, all(jnp.issubdtype(each.dtype, jnp.integer) for each in (x, y)))


@functools.lru_cache(maxsize=256)
def _inner_matmul_flops(fn: Callable[..., Any], operands: Shapes, platform: str) -> Mapping[ElementType, float]:
    total: dict[ElementType, float] = {}
    program = inner_program(fn, operands)
    for op in program.ops() if program is not None else ():
        if op.rule is not None:
            for multiplied, flops in matmul_flops(op, platform).items():
                total[multiplied] = total.get(multiplied, 0.0) + flops * op.trips
    return total


def inner_program(fn: Callable[..., Any], operands: Shapes) -> Program | None:
    """The program inside a declared operator for operands of these shapes and dtypes.

    The shapes are those of whole operands, of shards or of a padded axis.

    Returns:
        The program; None if the function raises for these shapes. The error is reported where the operator runs.
    """
    with _compat.unchecked_varying():
        try:
            traced = jax.make_jaxpr(returning_list(fn))(*(jax.ShapeDtypeStruct(*each) for each in operands))
        except Exception:  # user code may raise any error
            return None
    return build(_compat.dce(traced))


def _contraction_flops(op: Op, platform: str) -> float:
    rule = op.rule
    assert rule is not None
    is_convolution = op.name == CONVOLUTION
    first, other = map(_factors, reversed(rule.operands[:2]) if is_convolution else rule.operands[:2])
    free = [f for f in _factors(rule.results[0]) if f not in first and (is_convolution or f in other)]
    products, _ = masked_groups(op, platform)
    return 2.0 * math.prod(rule.factor(f).size or 1 for f in (*first, *free)) * products


def _factors(dims: Dims) -> list[str]:
    return [f for dim in dims for f in dim]
