"""Kinds of operators by how XLA compiles them: as kernels of their own, or as a part of other kernels."""

from __future__ import annotations

from autoshard import _compat
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.sharding.program.operator_kinds import decodes, is_decision_point, is_declared
from autoshard.spmdrules.families.stages import layer_p, write_p
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


def is_backward(op: Op) -> bool:
    """Whether an operator is in a backward pass, and does not recompute a value of the forward pass there."""
    eqns = (op.eqn, *op.around)
    return any(map(_compat.is_transposed, eqns)) and not any(map(_compat.is_recomputed, eqns))
