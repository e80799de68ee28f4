"""Correct strategies that the installed XLA partitioner implements wrongly or at a needless cost.

The oracle found each of these faults on CPU devices and no longer reports them. A test checks that each still exists.
A plan runs an affected operator on shards, by its rule, instead of leaving it to the partitioner.

Two more faults depend on other operators. See `writes_one_row`, and `extends_computed_spec` in
`sharding/layout/operator_sharding.py`, for a fault that depends on the sharding that the result is used with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from autoshard._shown import shown
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.families.indexing import is_window

Effect = Literal["wrong", "crash", "fail", "costly"]
When = Callable[["ShardedOperator"], bool]


@shown
@dataclass(frozen=True)
class ShardedOperator:
    """One application of an operator, with the factors of its rule that are sharded."""

    avals: Sequence[Any]
    params: Mapping[str, Any]
    rule: Rule
    factors: Sequence[str]

    def kinds(self) -> set[str]:
        """The kinds of the sharded factors."""
        return {self.rule.factor(f).kind for f in self.factors}

    def touches(self, operand: int, dims: Iterable[int]) -> bool:
        """Whether a sharded factor is in one of these dimensions of an operand."""
        return any(f in self.rule.operands[operand][d] for d in dims for f in self.factors)


@shown
@dataclass(frozen=True)
class Fault:
    """One fault of the partitioner.

    Attributes:
        primitives: the names of the affected operators.
        effect: the program is silently `wrong`, the compiler ends the process (`crash`) or raises an error (`fail`),
            or the program has collectives, and often repeated work, that the rule does not need (`costly`).
        reason: when it happens and what happens.
        when: whether an application of the operator is affected.
        least_axes: the fewest mesh axes with which it happens, including axes that shard nothing here.
        avoided: whether a plan runs the operator on shards instead.
    """

    primitives: tuple[str, ...]
    effect: Effect
    reason: str
    when: When = lambda op: True
    least_axes: int = 2
    avoided: bool = True


def _batch_groups(op: ShardedOperator) -> bool:
    return op.params["batch_group_count"] > 1


def _batch_groups_contracted(op: ShardedOperator) -> bool:
    return _batch_groups(op) and "reduce" in op.kinds()


def _feature_groups(op: ShardedOperator) -> bool:
    return op.params["feature_group_count"] > 1


def _windows_and_features(op: ShardedOperator) -> bool:
    image, kernel, _ = op.params["dimension_numbers"]
    steps = zip(*(op.params[name] for name in ("window_strides", "lhs_dilation", "rhs_dilation")), strict=True)
    spaced = [any(n > 1 for n in step) for step in steps]  # has a stride or a dilation
    # Only dimensions without window, stride and dilation are partitioned correctly.
    windows = [d for d, k, s in zip(image[2:], kernel[2:], spaced, strict=True) if s or op.rule.operands[1][k]]
    return op.touches(0, windows) and op.touches(1, kernel[:1])


def _summed_patches(op: ShardedOperator) -> bool:
    image, *_ = op.params["dimension_numbers"]
    dilated = [d for d, n in zip(image[2:], op.params["rhs_dilation"], strict=True) if n > 1]
    return "reduce" in op.kinds() and op.touches(0, dilated)


def _grouped_pixels(op: ShardedOperator) -> bool:
    image, kernel, _ = op.params["dimension_numbers"]
    single = all(op.avals[1].shape[k] == 1 for k in kernel[2:])
    return _feature_groups(op) and single and op.touches(0, image[1:2])


def _groups_and_features(op: ShardedOperator) -> bool:
    features = op.rule.operands[1][op.params["dimension_numbers"][1][0]]
    return _feature_groups(op) and sum(f in op.factors for f in features) > 1


def _grouped_rows(op: ShardedOperator) -> bool:
    return op.rule.body is not None and bool({"offset", "index"} & op.kinds())


def _split_windows(op: ShardedOperator) -> bool:
    return any(is_window(f) for f in op.factors)


def _indexed(op: ShardedOperator) -> bool:
    return "index" in op.kinds()


def _reduced(op: ShardedOperator) -> bool:
    return "reduce" in op.kinds()


def _reduced_bits(op: ShardedOperator) -> bool:
    return _reduced(op) and op.avals[0].dtype != bool


def _right_hand_sides(op: ShardedOperator) -> bool:
    return op.touches(-1, (-2, -1))


KNOWN_PARTITIONER_FAULTS: tuple[Fault, ...] = (
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "The gradient of a grouped or depthwise kernel (a convolution with batch groups), with the contracted batch "
        "sharded on one axis of a mesh that has two: the result is too large by a factor of the other axis's size.",
        _batch_groups_contracted,
        least_axes=1,
    ),
    Fault(
        ("conv_general_dilated",),
        "crash",
        "A convolution with batch groups, with the groups on one mesh axis and the output channels on another, or with "
        "the channels alone sharded: the partitioner fails a check (convolution_handler.cc) and ends the process.",
        _batch_groups,
        least_axes=1,
    ),
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "An image dimension with a window, a stride or a dilation (patches) on one mesh axis and the output channels "
        "on another: unrelated pieces of the image are added.",
        _windows_and_features,
    ),
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "The gradient of a patch kernel (a dilated kernel as large as the image), with the patches sharded on one axis "
        "of a mesh that has two: the result is too large by a factor of the other axis's size.",
        _summed_patches,
    ),
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "A grouped pointwise convolution with sharded groups: features of other groups are computed. With one feature "
        "per group and a second mesh axis, the process ends.",
        _grouped_pixels,
        least_axes=1,
    ),
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "A grouped convolution, with its groups on one mesh axis and the features of each group on another: the result "
        "is wrong.",
        _groups_and_features,
        least_axes=1,
    ),
    Fault(
        ("conv_general_dilated",),
        "costly",
        "A grouped convolution with a sharded batch or sharded groups: operands are gathered, and each device does all "
        "the work.",
        _feature_groups,
        least_axes=1,
    ),
    Fault(
        ("dynamic_slice", "dynamic_update_slice"),
        "costly",
        "A dimension with a run-time start index is sharded: the operand is gathered.",
        _indexed,
        least_axes=1,
    ),
    Fault(
        ("gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        "costly",
        "A dimension in which windows are read or written at run-time indices is sharded: the operand is gathered.",
        _split_windows,
        least_axes=1,
    ),
    Fault(
        ("ragged_dot_general",),
        "costly",
        "Rows or groups are sharded: on accelerators, all rows and the matrices of all groups are gathered; on the CPU "
        "with jax 0.10, the operands are gathered if the groups of the result are sharded.",
        _grouped_rows,
        least_axes=1,
    ),
    Fault(
        ("scatter-sub",),
        "costly",
        "The updates are sharded: they are gathered, unlike those of scatter-add.",
        _reduced,
        least_axes=1,
    ),
    Fault(
        ("triangular_solve", "tridiagonal_solve", "ormqr"),
        "costly",
        "The right-hand sides are sharded: they are gathered. Only a batch of problems stays sharded.",
        _right_hand_sides,
        least_axes=1,
    ),
    Fault(("fft",), "costly", "The batch is sharded: jax 0.10 gathers the operand, 0.12 does not.", least_axes=1),
    Fault(("top_k",), "costly", "The batch is sharded: the operand is gathered.", least_axes=1),
    Fault(
        ("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta", "random_gamma"),
        "costly",
        "Loops until all elements have converged: the test of each iteration is an all-reduce of one boolean.",
        avoided=False,
    ),
    Fault(("mulhi",), "fail", "Unable to convert MHLO to StableHLO.", avoided=False),
    Fault(("reduce_xor",), "fail", "XLA:CPU has no all-reduce with xor.", _reduced, least_axes=1),
    Fault(
        ("reduce_and", "reduce_or"),
        "fail",
        "XLA:CPU has no bitwise all-reduce of integers.",
        _reduced_bits,
        least_axes=1,
    ),
)


MISPARTITIONED = frozenset(name for fault in KNOWN_PARTITIONER_FAULTS if fault.avoided for name in fault.primitives)


def known_fault(primitive: str, op: ShardedOperator, *effects: Effect, axes: int = 2) -> Fault | None:
    """Returns the first known fault that affects an application of an operator; None if there is none.

    Args:
        primitive: the operator's name.
        op: the application, with the factors that are sharded.
        *effects: only faults with one of these effects are considered; all faults if empty.
        axes: the number of mesh axes with more than one device.
    """
    for fault in KNOWN_PARTITIONER_FAULTS:
        affected = primitive in fault.primitives and axes >= fault.least_axes
        if affected and (not effects or fault.effect in effects) and fault.when(op):
            return fault
    return None


def writes_one_row(primitive: str, op: ShardedOperator, devices: int) -> bool:
    """Whether a device may write a single row into a sharded dimension. XLA may then change another row, too.

    The partitioner subtracts the start of the shard from the row's position. XLA then rewrites the scatter: it reads
    the row at this position, selects the update or the row that it has read, and writes the result. Each position is
    clamped to the shard. But if the operand is itself a slice, as after a reshard, XLA adds the two positions before it
    clamps the sum, and reads another row of the array that was sliced. XLA of JAX 0.12 does not.

    Args:
        primitive: the name of the operator.
        op: its application.
        devices: the number of devices. If the rows are sharded, a device may have one of that many rows.
    """
    if not primitive.startswith("scatter") or "index" not in op.kinds():
        return False
    rows = op.avals[1].shape[:-1]
    return prod(rows) <= (devices if op.touches(1, range(len(rows))) else 1)
