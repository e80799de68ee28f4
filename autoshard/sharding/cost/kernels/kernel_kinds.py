"""Kinds of operators by how XLA compiles them: as kernels of their own, or as a part of other kernels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autoshard import _compat
from autoshard.sharding.program.array_sizes import itemsize
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.sharding.program.operator_kinds import REDUCTIONS, decodes, is_decision_point, is_declared
from autoshard.spmdrules.families.stacked.stages import layer_p, write_p
from autoshard.spmdrules.ir.program import Op

SLICES = ("slice", "dynamic_slice", layer_p.name)
IN_PLACE = ("dynamic_update_slice", "sliced_slots", write_p.name)
MOVES = ("convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy", "reduce_precision")
_WHOLE = (
    "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "cholesky", "triangular_solve", "lu", "qr", "eigh",
    "svd", "pallas_call", "custom_call", "ffi_call", "rng_bit_generator", "select_and_scatter_add",
)  # fmt: skip


def is_kernel(op: Op) -> bool:
    """Whether an operator is a kernel of its own, not part of the kernels that take its result."""
    if op.rule is None or op.name in SLICES:
        return False
    if decodes(op):  # compilers decode codes in the kernels that read the weight
        return False
    return is_decision_point(op) or op.name in _WHOLE or op.name in IN_PLACE or is_host_transfer(op)


def reads_memory(user: Op) -> bool:
    """Whether an operator reads its operands from memory in any case."""
    reads = user.name in _WHOLE or user.name in ("gather", "scatter", "scatter-add")
    return bool(user.blocks) or reads or is_declared(user) or is_host_transfer(user)


def narrowing_cast(op: Op, users: Mapping[int, Sequence[Op]]) -> Op | None:
    """Return the cast to a narrower type that alone takes the result of a reduction; None for other operators.

    JAX adds values of 16 bits in float32 and casts the sum. XLA:TPU writes the sum in 16 bits (libtpu 0.0.42.1, v5e and
    v6e), unless an operator comes before the cast, as in a mean.
    """
    if op.name not in REDUCTIONS or len(op.results) != 1 or len(taken := users.get(op.results[0], ())) != 1:
        return None
    (cast,) = taken
    if cast.name != "convert_element_type":  # another operator, such as a callback, may have no result
        return None
    return cast if itemsize(cast.eqn.outvars[0].aval) < itemsize(op.eqn.outvars[0].aval) else None


def is_backward(op: Op) -> bool:
    """Whether an operator is in a backward pass, and does not recompute a value of the forward pass there."""
    eqns = (op.eqn, *op.around)
    return any(map(_compat.is_transposed, eqns)) and not any(map(_compat.is_recomputed, eqns))


def is_rearranged(value: int, maker: Mapping[int, Op]) -> bool:
    """Whether a reshape joined parts of dimensions of an array, as for patches of images, so that it has to be copied.

    No order of dimensions in memory avoids the copy. Compiled for v5e (libtpu 0.0.42.1), the patches of a vision
    transformer are written once in 16 bits, and the products of both passes read them.

    Args:
        value: the array.
        maker: value -> the operator that makes it.
    """
    join = transpose = split = None
    while (op := maker.get(value)) is not None and op.name in MOVES:
        if op.name == "reshape" and transpose is None:
            join = op
        elif op.name == "transpose" and join is not None and transpose is None:
            transpose = op
        elif op.name == "reshape":
            split = op
            break
        elif op.name != "convert_element_type":
            return False
        value = op.operands[0]
    if join is None or transpose is None or split is None:
        return False
    return _joins_parts(join, transpose, split)


def _joins_parts(join: Op, transpose: Op, split: Op) -> bool:
    """Whether a reshape joins parts of a dimension with other dimensions, or in another order than before the split."""
    one, other = split.rule, join.rule
    if one is None or other is None or one.is_unknown or other.is_unknown:
        return False
    whole = {f: (dim, n, len(own)) for dim, own in enumerate(one.operands[0]) for n, f in enumerate(own)}
    parts = [[whole[f] for f in one.results[0][dim]] for dim in transpose.eqn.params["permutation"]]
    place = {f: n for n, factors in enumerate(other.operands[0]) for f in factors}
    for factors in other.results[0]:
        joined = [part for n in dict.fromkeys(place[f] for f in factors) for part in parts[n]]
        dims = [[*group] for _, group in itertools.groupby(joined, key=lambda part: part[0])]
        in_order = all(n == group[0][1] + k for group in dims for k, (_, n, _) in enumerate(group))
        if not in_order or (len(dims) > 1 and any(len(group) < group[0][2] for group in dims)):
            return True
    return False
