"""Gradients of a weight that the program uses several times, such as a network that runs on two batches.

    gradient = product(x.T, dy) + product(x'.T, dy')

If the rows are sharded, each term is a partial sum on each device. XLA adds the terms on each device first, so that one
collective reduces their sum. But if a term is cast before it is added, XLA reduces it by itself. Compiled for v5e:2x4
(libtpu 0.0.42.1) and for h100:8 (jaxlib 0.10.2).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.weights.joined_sums import sums_of
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op, inlined

_MOVES = ("transpose", "reshape", "squeeze")


def joined_gradients(axes: LogicalAxes, rows: frozenset[int]) -> list[tuple[Op, ...]]:
    """Return the products and scatters whose results are added before they are reduced, each group in program order.

    The operators of a group have equal names and logical axes, so that every layout shards them alike. XLA also adds a
    product to a scatter, and a sum over one kind of rows to a sum over another kind. Such terms are not returned: a
    layout may shard them in different ways, and reduce only one of them.

    Args:
        axes: the program's logical axes.
        rows: the axes of rows (`Roles.rows`).
    """
    found, blocks = list[tuple[Op, ...]](), [axes.program.block]
    while blocks:
        block = blocks.pop()
        ops = list(inlined(block))
        blocks += [inner for op in ops for inner in op.blocks]
        uses = Counter(v for op in ops for v in op.operands)
        uses.update(block.outputs)
        made = {op.results[0]: op for op in ops if len(op.results) == 1}
        position = {id(op): n for n, op in enumerate(ops)}
        for _, terms in sums_of(ops, uses):
            alike = defaultdict[Any, list[Op]](list)
            for addition, i in terms:
                v = addition.operands[i]
                term = made.get(v)
                while term is not None and term.name in _MOVES and uses[term.results[0]] == 1:
                    term = made.get(term.operands[0])
                if term is not None and uses[term.results[0]] == 1 and _is_gradient(term, axes, rows):
                    key = term.name, *(axes.of_value[v] for v in (*term.operands, *term.results) if v >= 0)
                    alike[key].append(term)
            groups = (sorted(group, key=lambda op: position[id(op)]) for group in alike.values())
            found += [tuple(group) for group in groups if len(group) > 1]
    return found


def _is_gradient(op: Op, axes: LogicalAxes, rows: frozenset[int]) -> bool:
    """Whether an operator sums over rows: a product, or a scatter of rows into an array without rows."""
    if op.name == "scatter-add":
        summed = op.operands[2:]
    elif op.name in CONTRACTIONS:
        summed = op.operands[:2]
    else:
        return False

    def have_rows(v: int) -> bool:
        return v >= 0 and any(not rows.isdisjoint(dim) for dim in axes.of_value[v])

    return not have_rows(op.results[0]) and all(map(have_rows, summed))
