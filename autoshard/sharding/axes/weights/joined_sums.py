"""Sums of several scatters of rows, such as the gradient of a value that is read at both ends of each edge.

    gradient = other + scatter(zeros, senders, a) + scatter(zeros, receivers, b)

Each scatter gives a partial result if its rows are sharded. All these terms are added on each device first, so that
one collective reduces their sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.weights.loop_sums import ADDITIONS
from autoshard.spmdrules.ir.program import Block, Op


@shown
@dataclass(frozen=True, eq=False)
class JoinedSum:
    """A sum of which several terms are scatters with the same sharding under every layout.

    Attributes:
        scatters: these terms, in the order of the program.
        additions: the additions that make up the sum. The last one comes after all terms.
        others: the other terms, each as the equation that takes it and the number of the operand.
    """

    scatters: tuple[Op, ...]
    additions: tuple[Op, ...]
    others: tuple[tuple[Any, int], ...]


def joined_sums(axes: LogicalAxes, rows: frozenset[int]) -> list[JoinedSum]:
    """Return the joined sums of a program whose data has several axes of rows.

    Only the sum uses its scatters and its partial sums. The scatters have equal rules, logical axes and types.

    Args:
        axes: the program's logical axes.
        rows: the axes of rows (`Roles.rows`). With a single one, such as the batch, there are no joined sums.
    """
    if len(rows) < 2:
        return []
    blocks = [axes.program.block, *(inner for op in axes.program.ops() for inner in op.blocks)]
    uses = Counter(v for op in axes.program.ops() for v in op.operands)
    uses.update(v for block in blocks for v in block.outputs)
    return [found for block in blocks for found in _sums_of(block, axes, rows, uses)]


def _sums_of(block: Block, axes: LogicalAxes, rows: frozenset[int], uses: Counter[int]) -> Iterator[JoinedSum]:
    made = {op.results[0]: op for op in block.ops if len(op.results) == 1}
    position = {id(op): n for n, op in enumerate(block.ops)}
    for additions, terms in sums_of(block.ops, uses):
        alike = defaultdict[Any, list[Op]](list)
        for eqn_op, i in terms:
            term = made.get(eqn_op.operands[i])
            if term is not None and uses[term.results[0]] == 1 and _is_scatter_of_rows(term, axes, rows):
                key = id(term.rule), *(axes.of_value[v] if v >= 0 else None for v in (*term.operands, *term.results))
                alike[key, term.eqn.outvars[0].aval.dtype].append(term)
        scatters = max(alike.values(), key=len, default=[])
        if len(scatters) > 1:
            joined = {each.results[0] for each in scatters}
            others = tuple((each.eqn, i) for each, i in terms if each.operands[i] not in joined)
            in_order = sorted(scatters, key=lambda each: position[id(each)])
            yield JoinedSum(tuple(in_order), tuple(additions), others)


def sums_of(ops: Sequence[Op], uses: Mapping[int, int]) -> Iterator[tuple[Sequence[Op], list[tuple[Op, int]]]]:
    """Yield each sum of arrays: its additions, the last one last; and its terms, each with the addition that takes it.

    Args:
        ops: the operators among which sums are looked for.
        uses: value -> how often it is used.
    """
    made = {op.results[0]: op for op in ops if len(op.results) == 1}
    is_inner = {
        v for op in ops if _is_addition(op) for v in op.operands if v in made and uses[v] == 1 and _is_addition(made[v])
    }
    for op in ops:
        if _is_addition(op) and op.results[0] not in is_inner:
            yield _tree(op, made, is_inner)


def _is_addition(op: Op) -> bool:
    """Whether an operator adds two arrays of equal shapes."""
    return op.name in ADDITIONS and all(v >= 0 for v in op.operands) and bool(op.eqn.outvars[0].aval.shape)


def _is_scatter_of_rows(op: Op, axes: LogicalAxes, rows: frozenset[int]) -> bool:
    has_rows = any(not rows.isdisjoint(dim) for dim in axes.of_value[op.results[0]])
    return op.name == "scatter-add" and op.rule is not None and has_rows


def _tree(root: Op, made: dict[int, Op], is_inner: Collection[int]) -> tuple[Sequence[Op], list[tuple[Op, int]]]:
    """Return the additions of a sum, the last one last; and its terms, each with the addition that takes it."""
    additions, terms, pending = [], [], [(root, 1), (root, 0)]
    while pending:
        op, i = pending.pop()
        if op.operands[i] in is_inner:
            inner = made[op.operands[i]]
            additions.append(inner)
            pending += [(inner, 1), (inner, 0)]
        else:
            terms.append((op, i))
    return [*reversed(additions), root], terms
