"""Finds weights that a program decodes from quantized codes and their scales.

    (p["codes"].astype(float) - p["zeros"]) * p["scales"][:, None]

Codes have fewer bytes than the weight. So a device gathers the codes first, and decodes the whole weight. It must also
gather scales and zero points first. Otherwise XLA would decode in the shards of the scales, and gather the decoded
weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.program.operator_kinds import decodes, is_decision_point
from autoshard.spmdrules.ir.program import Op, Program, visits


def decoded_weights(
    axes: LogicalAxes,
    parameters: Collection[int],
    computed: Mapping[int, int],
    has_batch: Sequence[bool],
    gradients: Collection[int],
) -> frozenset[int]:
    """Finds the values that are computed from gathered codes, and those computed from scales before they meet codes.

    Args:
        axes: the program's logical axes.
        parameters: the inputs that are parameters.
        computed: the weights that are computed in shards (`computed_weights`).
        has_batch: for each value, whether it has the batch axis.
        gradients: values that are computed from values with the batch, but do not have it.

    Returns:
        Results of operators. Stored operands of these operators are gathered first.
    """
    program = axes.program
    aliases = {v for v, source in axes.parameter_aliases.items() if source in parameters}
    stored = {*parameters, *aliases, *computed}
    apart = [has or v in gradients for v, has in enumerate(has_batch)]
    found: set[int] = set()
    for op, entering in visits(program.block):
        if op.blocks:
            pairs = [(tie.outer, tie.inner) if entering else (tie.inner, tie.outer) for tie in op.edges]
            found.update(after for before, after in pairs if before in found and not apart[after])
        elif (
            entering
            and op.rule is not None
            and (not found.isdisjoint(op.operands) or (decodes(op) and op.operands[0] in stored))
        ):
            found.update(v for v in op.results if not apart[v] and v not in computed)
    return frozenset(found | _scales(program, found, stored, apart))


def _scales(program: Program, decoded: Collection[int], stored: Collection[int], apart: Sequence[bool]) -> set[int]:
    """Values that are computed from stored scales, and needed by operators that return decoded weights."""
    found: set[int] = set()
    results: set[int] = set()
    for op, entering in reversed([*visits(program.block)]):
        if op.blocks:
            pairs = [(tie.inner, tie.outer) if entering else (tie.outer, tie.inner) for tie in op.edges]
            needed = [before for after, before in pairs if after in found]
        elif entering and _is_plain(op) and any(v in decoded or v in found for v in op.results):
            results.update(op.results)
            needed = op.operands
        else:
            continue
        found.update(v for v in needed if v >= 0 and v not in stored and v not in decoded and not apart[v])
    return found & results


def _is_plain(op: Op) -> bool:
    """Whether an operator runs in whatever shards its operands have."""
    return op.rule is not None and not is_decision_point(op)
