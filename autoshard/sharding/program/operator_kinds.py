"""Kinds of operators that planning treats alike: contractions, reductions, addressed by values, opaque."""

from __future__ import annotations

from autoshard.sharding.program.partitioner_faults import MISPARTITIONED
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from autoshard.spmdrules.families.cudnn import KERNELS
from autoshard.spmdrules.ir.program import Op

ADDRESSED = ("gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


# XLA does not gather what these need whole: the compiled program fails, or counts an initial value on every shard.
UNABLE = ("fft", "reduce", "reduce_window")


REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")


def is_decision_point(op: Op) -> bool:
    """Whether the layout has something to say at this operator; a sum over dimensions of size 1 is only a reshape."""
    if op.rule is None:
        return False
    if op.name in REDUCTIONS:
        return any(f.kind == "reduce" and f.size != 1 for f in op.rule.factors)
    return constrained(op) or op.name in MISPARTITIONED or declared(op)


def constrained(op: Op) -> bool:
    """Whether constraints stand on the operands and the results of an operator, so that XLA cuts it as planned."""
    return any(op.name in names for names in (CONTRACTIONS, ADDRESSED, UNABLE, REDUCTIONS, KERNELS))


def declared(op: Op) -> bool:
    """Whether the operator is opaque code with a declared rule, which XLA cannot partition."""
    return is_operator(op.eqn.primitive)


CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
