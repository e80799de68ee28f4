"""The operators of a program that compute attention, and whether a layout can run them as its words say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from weakref import WeakKeyDictionary

from autoshard import _compat
from autoshard._units import line_text
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.layout.sequence_strategy import GATHER, RING, ULYSSES
from autoshard.spmdrules.custom_ops.sequence_forms import SequenceForms, rule_of_form, sequence_forms_of
from autoshard.spmdrules.ir.program import Op, Program

_known: WeakKeyDictionary[Program, tuple[tuple[Op, SequenceForms], ...]] = WeakKeyDictionary()


def sequence_operators(program: Program) -> tuple[tuple[Op, SequenceForms], ...]:
    """The operators of attention that can run over a sharded sequence in several ways, with their forms."""
    if program not in _known:
        _known[program] = tuple(with_forms(program.ops()))
    return _known[program]


def with_forms(operators: Iterable[Op]) -> Iterator[tuple[Op, SequenceForms]]:
    """Those operators that can run over a sharded sequence in several ways, with their forms."""
    for op in operators:
        if op.rule is not None:
            forms = sequence_forms_of(op.eqn.params, [v.aval for v in op.eqn.invars])
            if forms is not None:
                yield op, forms


def usable_heads(axes: LogicalAxes, size: int, taken: int) -> list[int]:
    """Over how many of `size` devices the heads of each attention can be sharded, where `tp` takes `taken` devices."""
    return list(dict.fromkeys(math.gcd(size, heads) for _, heads in _heads_left(axes, taken)))


def _heads_left(axes: LogicalAxes, taken: int) -> Iterator[tuple[list[int], int]]:
    """For each attention, the sizes of its factors of heads, and the size of the first one after `tp` shards it."""
    for op, forms in sequence_operators(axes.program):
        if sizes := [size for _, size in _heads(op, forms)]:
            yield sizes, sizes[0] // math.gcd(sizes[0], taken)


def _heads(op: Op, forms: SequenceForms) -> list[tuple[str, int]]:
    """The factors of heads and their sizes."""
    assert op.rule is not None
    return [(name, op.rule.by_name[name].size or 1) for name in forms.heads if name in op.rule.by_name]


def sequence_problems(
    layout: Layout,
    strategy_of: Callable[[Op], OperatorStrategy],
    kinds: Mapping[str, str] | None = None,
    operators: Iterable[Op] | None = None,
) -> list[str]:
    """The reasons why a layout cannot run attention as its words say, each with an alternative; empty if it can.

    Args:
        layout: the layout.
        strategy_of: returns the strategy of an operator under the layout.
        kinds: mesh axis -> its word in the plan, if that is not how attention runs (`isp`).
        operators: operators of the program, with at least one of each class of equal ones; all of them by default.
    """
    named = {way: (kinds or {}).get(re.sub(r"_\d+$", "", axis), way) for axis, way in layout.sequence.items()}
    sizes: dict[str, int] = {}  # word -> devices; its mesh axis may have been split
    for axis, way in layout.sequence.items():
        sizes[way] = sizes.get(way, 1) * layout.mesh[axis]
    sizes = {way: n for way, n in sizes.items() if n > 1 and way != GATHER}
    if not sizes:
        return []
    found = list(sequence_operators(layout.axes.program) if operators is None else with_forms(operators))
    if not found:
        words = " ".join(f"{named[way]}:{n}" for way, n in sizes.items())
        return [
            f"'{words}' says how attention runs, but no attention was recognised in the program. Use 'cp', which "
            "gathers what is needed"
        ]
    problems: dict[tuple[str, str], str] = {}  # each once: the forward and the backward pass have the same
    for op, forms in found:
        chosen = strategy_of(op)
        for way, size in sizes.items():
            check = _ring_problem if way == RING else partial(_heads_problem, named[way])
            if problem := check(layout, op, forms, chosen, size):
                source = line_text(_compat.source_line(op.eqn))
                problems.setdefault((way, problem), f"{named[way]}:{size}: attention at {source} {problem}")
    return list(problems.values())


def _ring_problem(layout: Layout, op: Op, forms: SequenceForms, chosen: OperatorStrategy, size: int) -> str:
    axes = {a for a, way in layout.sequence.items() if way == RING and layout.mesh[a] > 1}
    if chosen.form is not None and axes <= {*chosen.form.axes}:
        return ""
    if forms.ring is None:
        return f"cannot run on a ring: {forms.no_ring}. Use gather or ulysses"
    rule = rule_of_form(forms.ring, [v.aval for v in op.eqn.invars])
    dim = next(d for d, dim in enumerate(rule.operands[forms.keys[0]]) if forms.sequence in dim)
    length = op.eqn.invars[forms.keys[0]].aval.shape[dim]
    block = length // (rule.by_name[forms.sequence].size or 1)
    blocks = f" in blocks of {block}" if block > 1 else ""
    return f"has a sequence of {length}{blocks}, which {size} devices do not divide. Pad it, or use fewer devices"


def _heads_problem(word: str, layout: Layout, op: Op, forms: SequenceForms, chosen: OperatorStrategy, size: int) -> str:
    axes = {a for a, way in layout.sequence.items() if way == ULYSSES and layout.mesh[a] > 1}
    if all(chosen.factors.get(a) in forms.heads for a in axes):
        return ""
    heads = dict(_heads(op, forms))
    taken = math.prod(layout.mesh[a] for a, f in chosen.factors.items() if f in heads and a not in axes)
    left = max(math.prod(heads.values()) // taken, 1)
    fitting = max(d for d in range(1, size) if size % d == 0 and left % d == 0)
    would = f"ring:{size // fitting} {word}:{fitting}" if fitting > 1 else f"ring:{size}"
    shared = f", sharded {taken} ways by other mesh axes" if taken > 1 else ""
    kinds = " x ".join(str(n) for n in heads.values() if n > 1)
    return f"has {kinds or 1} heads{shared}; {size} devices do not divide them. Use '{would}' instead"
