"""Strategies that are right and that the installed partitioner spoils. Each was found by the oracle, on CPU devices.

The oracle does not report them again, a test checks that they are still there, and a planner has to keep those that
are `wrong` or `crash` out of its plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoshard.spmdrules.rule import Rule


@dataclass(frozen=True)
class Fault:
    """Something that the partitioner makes of one operator.

    Attributes:
        primitive: the operator's name.
        effect: the program is silently `wrong`, the compiler ends the process (`crash`), or operands are gathered
            and the work is done on every device (`dear`).
        when: whether it concerns an application with these parameters.
        kinds: the kinds of factors that it concerns; it is there if any factor cut is of one of them.
        reason: what happens.
    """

    primitive: str
    effect: Literal["wrong", "crash", "dear"]
    when: Callable[[Mapping[str, Any]], bool]
    kinds: tuple[str, ...]
    reason: str


_ANY = ("pass", "reduce", "index", "halo", "offset")


def _has_batch_groups(params: Mapping[str, Any]) -> bool:
    return params["batch_group_count"] > 1


def _has_feature_groups(params: Mapping[str, Any]) -> bool:
    return params["feature_group_count"] > 1


KNOWN_PARTITIONER_FAULTS: tuple[Fault, ...] = (
    Fault(
        "conv_general_dilated",
        "wrong",
        _has_batch_groups,
        ("reduce",),
        "The gradient of a grouped or depthwise kernel (a convolution with batch groups), its contracted batch cut on "
        "one axis of a mesh with two: the result is too large by the size of the axis that is not used.",
    ),
    Fault(
        "conv_general_dilated",
        "crash",
        _has_batch_groups,
        ("pass",),
        "A convolution with batch groups, the groups on one mesh axis and the output channels on another: the "
        "partitioner fails a check (convolution_handler.cc) and ends the process. The groups and the input channels "
        "are gathered.",
    ),
    Fault(
        "conv_general_dilated",
        "dear",
        _has_feature_groups,
        _ANY,
        "A grouped convolution with its batch or its groups cut: operands are gathered, each device does all.",
    ),
)


def known_fault(
    primitive: str, params: Mapping[str, Any], rule: Rule, factors: Iterable[str], *effects: str
) -> Fault | None:
    """The known fault of an operator whose `factors` are cut, None where there is none.

    Args:
        primitive: the operator's name.
        params: its parameters.
        rule: its rule.
        factors: the factors that are cut.
        *effects: look for faults with one of these effects only; none for all.
    """
    kinds = {rule.factor(f).kind for f in factors}
    for fault in KNOWN_PARTITIONER_FAULTS:
        if fault.primitive == primitive and (not effects or fault.effect in effects):
            if kinds & set(fault.kinds) and fault.when(params):
                return fault
    return None
