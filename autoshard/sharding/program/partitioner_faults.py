"""Strategies that are right and that the installed partitioner spoils, each found by the oracle on CPU devices.

The oracle does not report them again, a test checks that they are still there, and a plan runs such an operator on
shards, as its rule says, instead of leaving it to the partitioner.

One more is no property of what is cut but of where the result goes from there: see `decide.comes_out_as`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.families.indexing import is_window

Effect = Literal["wrong", "crash", "fail", "dear"]
When = Callable[["Cut"], bool]


@dataclass(frozen=True)
class Cut:
    """An application of an operator, some factors of whose rule are cut."""

    avals: Sequence[Any]
    params: Mapping[str, Any]
    rule: Rule
    factors: Sequence[str]

    def kinds(self) -> set[str]:
        """The kinds of the factors that are cut."""
        return {self.rule.factor(f).kind for f in self.factors}

    def touches(self, operand: int, dims: Iterable[int]) -> bool:
        """Whether one of the factors stands in one of these dimensions of an operand."""
        return any(f in self.rule.operands[operand][d] for d in dims for f in self.factors)


@dataclass(frozen=True)
class Fault:
    """Something that the partitioner makes of an operator.

    Attributes:
        primitives: the operators' names.
        effect: the program is silently `wrong`, the compiler ends the process (`crash`) or raises an error (`fail`),
            or there are collectives, and often work done on every device, that the rule does not need (`dear`).
        reason: what happens.
        when: whether it concerns this application of the operator.
        least_axes: the fewest axes of a mesh on which it happens, those that cut nothing among them.
        avoided: whether a plan runs the operator on shards instead.
    """

    primitives: tuple[str, ...]
    effect: Effect
    reason: str
    when: When = lambda cut: True
    least_axes: int = 2
    avoided: bool = True


def _batch_groups(cut: Cut) -> bool:
    return cut.params["batch_group_count"] > 1


def _batch_groups_contracted(cut: Cut) -> bool:
    return _batch_groups(cut) and "reduce" in cut.kinds()


def _feature_groups(cut: Cut) -> bool:
    return cut.params["feature_group_count"] > 1


def _space_and_features(cut: Cut) -> bool:
    image, kernel, _ = cut.params["dimension_numbers"]
    steps = zip(*(cut.params[name] for name in ("window_strides", "lhs_dilation", "rhs_dilation")), strict=True)
    moved = [any(n > 1 for n in step) for step in steps]  # right is only what the window leaves as it is
    windows = [d for d, k, m in zip(image[2:], kernel[2:], moved, strict=True) if m or cut.rule.operands[1][k]]
    return cut.touches(0, windows) and cut.touches(1, kernel[:1])


def _summed_patches(cut: Cut) -> bool:
    image, *_ = cut.params["dimension_numbers"]
    spread = [d for d, n in zip(image[2:], cut.params["rhs_dilation"], strict=True) if n > 1]
    return "reduce" in cut.kinds() and cut.touches(0, spread)


def _grouped_pixels(cut: Cut) -> bool:
    image, kernel, _ = cut.params["dimension_numbers"]
    single = all(cut.avals[1].shape[k] == 1 for k in kernel[2:])
    return _feature_groups(cut) and single and cut.touches(0, image[1:2])


def _groups_and_features(cut: Cut) -> bool:
    made = cut.rule.operands[1][cut.params["dimension_numbers"][1][0]]
    return _feature_groups(cut) and sum(f in cut.factors for f in made) > 1


def _grouped_rows(cut: Cut) -> bool:
    return cut.rule.body is not None and bool({"offset", "index"} & cut.kinds())


def _in_windows(cut: Cut) -> bool:
    return any(is_window(f) for f in cut.factors)


def _indexed(cut: Cut) -> bool:
    return "index" in cut.kinds()


def _reduced(cut: Cut) -> bool:
    return "reduce" in cut.kinds()


def _reduced_bits(cut: Cut) -> bool:
    return _reduced(cut) and cut.avals[0].dtype != bool


def _right_hand_sides(cut: Cut) -> bool:
    return cut.touches(-1, (-2, -1))


KNOWN_PARTITIONER_FAULTS: tuple[Fault, ...] = (
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "The gradient of a grouped or depthwise kernel (a convolution with batch groups), its contracted batch cut "
        "on one axis of a mesh that has two: the result is too large by the size of the other axis.",
        _batch_groups_contracted,
        least_axes=1,
    ),
    Fault(
        ("conv_general_dilated",),
        "crash",
        "A convolution with batch groups, the groups on one mesh axis and the output channels on another, or channels "
        "alone: the partitioner fails a check (convolution_handler.cc) and ends the process.",
        _batch_groups,
        least_axes=1,
    ),
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "An image dimension with a window, a stride or a dilation (patches) on one mesh axis and the output channels "
        "on another: pieces of the image are added up that do not belong together.",
        _space_and_features,
    ),
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "The gradient of a kernel of patches (a dilated kernel as large as the image), its patches cut on one axis of "
        "a mesh that has two: the result is too large by the size of the other axis.",
        _summed_patches,
    ),
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "A grouped convolution of single pixels, its groups cut: what is computed are other groups' features; with one "
        "feature each and another mesh axis, the process ends.",
        _grouped_pixels,
        least_axes=1,
    ),
    Fault(
        ("conv_general_dilated",),
        "wrong",
        "A grouped convolution, its groups on one mesh axis and the features of each on another.",
        _groups_and_features,
        least_axes=1,
    ),
    Fault(
        ("conv_general_dilated",),
        "dear",
        "A grouped convolution with its batch or its groups cut: operands are gathered, each device does all.",
        _feature_groups,
        least_axes=1,
    ),
    Fault(
        ("dynamic_slice", "dynamic_update_slice"),
        "dear",
        "The dimension of a position known at run time only is cut: the operand is gathered.",
        _indexed,
        least_axes=1,
    ),
    Fault(
        ("gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        "dear",
        "A dimension is cut of which windows are taken or written at positions known at run time only: the operand is "
        "gathered.",
        _in_windows,
        least_axes=1,
    ),
    Fault(
        ("ragged_dot_general",),
        "dear",
        "Rows or groups are cut: on accelerators all rows and the matrices of all groups are gathered, on the CPU by "
        "jax 0.10 the operands of a result whose groups are cut.",
        _grouped_rows,
        least_axes=1,
    ),
    Fault(
        ("scatter-sub",),
        "dear",
        "Cut along the updates: they are gathered, where those of an addition are not.",
        _reduced,
        least_axes=1,
    ),
    Fault(
        ("triangular_solve", "tridiagonal_solve", "ormqr"),
        "dear",
        "Cut along the right-hand sides: they are gathered, only a batch of problems stays cut.",
        _right_hand_sides,
        least_axes=1,
    ),
    Fault(("fft",), "dear", "Cut along the batch: jax 0.10 gathers the operand, 0.12 does not.", least_axes=1),
    Fault(("top_k",), "dear", "Cut along the batch: the operand is gathered, each device does all.", least_axes=1),
    Fault(
        ("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta", "random_gamma"),
        "dear",
        "They are loops until all elements have converged: each round's test is an all-reduce of one truth value.",
        avoided=False,
    ),
    Fault(("mulhi",), "fail", "Unable to convert MHLO to StableHLO.", avoided=False),
    Fault(("reduce_xor",), "fail", "XLA:CPU has no all-reduce of this operation.", _reduced, least_axes=1),
    Fault(
        ("reduce_and", "reduce_or"), "fail", "XLA:CPU has none of the bits of integers.", _reduced_bits, least_axes=1
    ),
)


MISPARTITIONED = frozenset(name for fault in KNOWN_PARTITIONER_FAULTS if fault.avoided for name in fault.primitives)


def known_fault(primitive: str, cut: Cut, *effects: Effect, axes: int = 2) -> Fault | None:
    """The known fault of an operator some factors of whose rule are cut, None where there is none.

    Args:
        primitive: the operator's name.
        cut: how it is applied and what is cut.
        *effects: look for faults with one of these effects only; none for all.
        axes: how many axes the mesh has, of more than one device each.
    """
    for fault in KNOWN_PARTITIONER_FAULTS:
        concerned = primitive in fault.primitives and axes >= fault.least_axes
        if concerned and (not effects or fault.effect in effects) and fault.when(cut):
            return fault
    return None
