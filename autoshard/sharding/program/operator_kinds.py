"""Kinds of operators that planning treats in the same way: contractions, reductions, indexed ones, inlined calls."""

from __future__ import annotations

from autoshard import _compat
from autoshard.sharding.program.array_sizes import is_float, is_integer
from autoshard.sharding.program.partitioner_faults import MISPARTITIONED
from autoshard.spmdrules.core.rule import POSITIONS
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from autoshard.spmdrules.families.cudnn import KERNELS
from autoshard.spmdrules.families.stacked import EXCHANGES
from autoshard.spmdrules.families.stacked.stages import STAGE_OPERATORS
from autoshard.spmdrules.families.weight_gathers import OUTSIDE_LOOPS, whole_p
from autoshard.spmdrules.ir.program import Op
from autoshard.spmdrules.reference.coverage import runs_on_host

CONVOLUTION = "conv_general_dilated"
CONTRACTIONS = ("dot_general", CONVOLUTION, "ragged_dot_general")
REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", *POSITIONS,
)  # fmt: skip
INDEXED = ("gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
# Operators whose operands must be gathered, although XLA does not gather them by itself. With sharded operands, the
# compiled program fails, or adds an initial value once per shard.
NEEDS_GATHERED = ("fft", "reduce", "reduce_window", whole_p.name)
# Operators that sort along a dimension. If it is sharded, XLA reshards the operands by itself. The layout decides how,
# so that the estimate counts these collectives. `top_k` is among `MISPARTITIONED`.
SORTS = ("sort", "approx_top_k")
# Operators that unpack codes, or convert them.
_DECODING = ("convert_element_type", "and", "shift_right_logical", "shift_right_arithmetic")
_TILED_DIMS = 2  # number of minor dimensions that a TPU stores in tiles, as in XLA's layouts `T(8,128)`
# Calls that only group operators. XLA inlines them, so their operators are lowered where the call is.
INLINED_CALLS = frozenset({"call", "closed_call", "eval_jaxpr", "jit"})

_CONSTRAINED = frozenset(
    (*CONTRACTIONS, *INDEXED, *NEEDS_GATHERED, *SORTS, *REDUCTIONS, *KERNELS, *EXCHANGES, *OUTSIDE_LOOPS)
)


def is_decision_point(op: Op) -> bool:
    """Whether the layout decides how to shard an operator. A reduction over dimensions of size 1 is only a reshape."""
    if op.rule is None:
        return False
    if op.name in REDUCTIONS:
        return any(f.kind == "reduce" and f.size != 1 for f in op.rule.factors)
    return constrained(op) or op.name in MISPARTITIONED or op.name in STAGE_OPERATORS or is_declared(op)


def constrained(op: Op) -> bool:
    """Whether the operands and results of an operator get sharding constraints, so that XLA shards it as planned."""
    return op.name in _CONSTRAINED or is_unknown(op) or decodes(op)


def decodes(op: Op) -> bool:
    """Whether an operator starts to decode a quantized weight: it unpacks integers of 8 bits, or makes floats of them.

    A stored weight is gathered before that, because its codes have fewer bytes.
    """
    if op.name not in _DECODING:
        return False
    before, after = op.eqn.invars[0].aval, op.eqn.outvars[0].aval
    is_code = is_integer(before) and before.dtype.itemsize == 1 and before.ndim > 1
    return is_code and (op.name != "convert_element_type" or is_float(after))


def is_unknown(op: Op) -> bool:
    """Whether the operator has no rule and runs on the devices: its operands are gathered, and every device runs it.

    Operators of mutable arrays do not count, because their references have no sharding of their own.
    """
    if op.rule is None or not op.rule.is_unknown or runs_on_host(op.name):
        return False
    return all(_compat.is_array_type(v.aval) for v in (*op.eqn.invars, *op.eqn.outvars))


def is_declared(op: Op) -> bool:
    """Whether the operator is opaque code with a declared rule, which XLA cannot partition."""
    return is_operator(op.eqn.primitive)


def is_strided_move(op: Op) -> bool:
    """Whether an operator takes every n-th element of a tiled dimension, or puts gaps between elements.

    On TPU it is a kernel of its own, which reads from memory and writes its result. The last two dimensions
    of an array are tiled; XLA fuses strided slices along the others. Compiled for v5e (libtpu 0.0.42), forward and
    backward passes of `lax.associative_scan` with float32 and bfloat16 do so (`benchmarks/scans.py`).
    """
    params = op.eqn.params
    if op.name == "slice":
        return any(stride > 1 for stride in (params["strides"] or ())[-_TILED_DIMS:])
    return op.name == "pad" and any(gap > 0 for _, _, gap in params["padding_config"])
