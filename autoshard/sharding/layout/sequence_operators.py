"""The operators of a program that compute attention, and whether a layout can run them as its words say."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoshard import _compat
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.sequence_strategy import RING, ULYSSES
from autoshard.spmdrules.custom_ops.sequence_forms import SequenceForms, sequence_forms_of
from autoshard.spmdrules.ir.program import Op


def sequence_operators(axes: LogicalAxes) -> Iterator[tuple[Op, SequenceForms]]:
    """The operators of attention that keys may reach in several ways, with their forms."""
    for op in axes.program.ops():
        if op.rule is not None:
            forms = sequence_forms_of(op.eqn.params, [v.aval for v in op.eqn.invars])
            if forms is not None:
                yield op, forms


def usable_heads(axes: LogicalAxes, size: int, taken: int) -> list[int]:
    """Over how many of `size` devices the heads of each attention can be sharded, where `tp` takes `taken` devices."""
    return list(dict.fromkeys(math.gcd(size, heads) for _, heads in _heads_left(axes, taken)))


def _heads_left(axes: LogicalAxes, taken: int) -> Iterator[tuple[list[int], int]]:
    """For each attention, the sizes of its factors of heads, and the heads that each device of `tp` has of the first."""
    for op, forms in sequence_operators(axes):
        assert op.rule is not None
        sizes = [op.rule.factor(name).size or 1 for name in forms.heads if name in op.rule.by_name]
        if sizes:
            yield sizes, sizes[0] // math.gcd(sizes[0], taken)


def sequence_problems(layout: Layout, strategy_of: object) -> list[str]:
    """Why a layout cannot run attention as its words say, with what would do; empty if it can.

    Args:
        layout: the layout.
        strategy_of: returns the strategy of an operator under the layout.
    """
    wanted = {a: way for a, way in layout.sequence.items() if layout.mesh[a] > 1}
    if not wanted:
        return []
    words = {a: f"{way}:{layout.mesh[a]}" for a, way in wanted.items()}
    operators = list(sequence_operators(layout.axes))
    if not operators:
        return [
            f"{' and '.join(words.values())}: the program has no attention that was recognised, so no keys can move. "
            "Use cp, which gathers what operators need"
        ]
    problems: dict[str, None] = {}
    for op, forms in operators:
        chosen = strategy_of(op)  # pyright: ignore[reportCallIssue]
        place = f"attention at {_compat.source_line(op.eqn)}"
        assert op.rule is not None
        for axis, way in wanted.items():
            factor = chosen.factors.get(axis)
            if way == RING and factor == forms.sequence and forms.ring is None:
                problems.setdefault(f"{words[axis]}: {place} has no ring: {forms.no_ring}. Use gather or ulysses")
            elif way == RING and factor != forms.sequence:
                length = op.eqn.invars[0].aval.shape
                problems.setdefault(
                    f"{words[axis]}: the sequence of {place}, {_sequence_text(op, forms)}, does not divide into that "
                    f"many shards (queries {list(length)}). Pad the sequence, or use fewer devices"
                )
            elif way == ULYSSES and factor not in forms.heads:
                names = [name for name in forms.heads if name in op.rule.by_name]
                sizes = [op.rule.factor(name).size or 1 for name in names]
                others = math.prod(
                    layout.mesh[a] for a, f in chosen.factors.items() if f in names and a not in layout.sequence
                )
                most = max(math.prod(sizes) // others, 1)
                fits = max(d for d in range(1, layout.mesh[axis] + 1) if layout.mesh[axis] % d == 0 and most % d == 0)
                rest = layout.mesh[axis] // fits
                would = f"'ulysses:{fits} ring:{rest}'" if fits > 1 else f"'ring:{rest}'"
                problems.setdefault(
                    f"{words[axis]}: {place} has {' x '.join(map(str, sizes))} heads"
                    + (f", of which other mesh axes shard {others}" if others > 1 else "")
                    + f"; they do not divide over {layout.mesh[axis]} devices. Use {would} instead"
                )
    return list(problems)
