"""How one operator is computed for one microbatch, by its rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.microbatches.states import OWN, WHOLE, NotCut, Own, Partial, Split, State, factor_at, split_of
from autoshard.spmdrules.core.rule import POSITIONS, Rule

# Operations of which the rows of a microbatch give an estimate.
ESTIMATED = ("sum", "max", "min", "and", "or")


@shown
@dataclass(eq=False)
class Step:
    """How one equation is computed.

    Attributes:
        phase: `whole`, for all microbatches at once before the loop; `each`, in the loop; `after`, after it.
        operands: the part of each operand that it takes. It is sliced from a larger part where necessary.
        results: the part of each result that it computes.
        rule: its rule, in the loop.
        factor: the factor of the rule that has the rows; None if it only keeps values partial.
        inner: the `Flow`s of its nested jaxprs.
    """

    phase: str
    operands: list[State]
    results: list[State]
    rule: Rule | None = None
    factor: str | None = None
    inner: list[Any] = field(default_factory=list)


def step_by_rule(eqn: Any, rule: Rule, states: list[State], count: int, rows: int | None = None) -> Step:
    """Return how an operator is computed in the loop.

    Args:
        eqn: its equation.
        rule: its rule.
        states: the states of its operands.
        count: number of microbatches.
        rows: see `factor_at`.

    Raises:
        NotCut: it needs the whole batch.
    """
    found = {}
    for number, state in enumerate(states):
        if isinstance(state, Split):
            at = factor_at(rule, rule.operands[number], state, count, rows)
            if at is None:
                raise NotCut(f"{place_of(eqn)} mixes the rows of the batch with another dimension")
            found[at] = number
    if len(found) > 1:
        raise NotCut(f"{place_of(eqn)} compares each row of the batch with other rows")
    terms = {n for n, state in enumerate(states) if isinstance(state, Partial)}
    if not found:
        return _keeping_partial(eqn, rule, states, terms)
    if terms:
        raise NotCut(f"{place_of(eqn)} needs a sum over the whole batch for each row")
    [(name, stride)] = found
    kind = rule.factor(name)
    if kind.kind not in ("pass", "reduce") or kind.op in POSITIONS:
        raise NotCut(f"{place_of(eqn)} needs all rows of the batch at once")
    operands: list[State] = [
        split_of(rule, dims, name, stride) or (OWN if isinstance(state, Own) else WHOLE)
        for dims, state in zip(rule.operands, states, strict=True)
    ]
    for number, state in enumerate(states):
        if isinstance(state, Split) and operands[number] != state:
            raise NotCut(f"{place_of(eqn)} mixes the rows of the batch with another dimension")
    results: list[State] = []
    for number, dims in enumerate(rule.results):
        op = rule.partial(name, number)
        split = split_of(rule, dims, name, stride)
        if split is None and op is None:
            raise NotCut(f"{place_of(eqn)} has a result that would differ between microbatches")
        results.append(split or Partial(op or "sum"))
    return Step("each", operands, results, rule, name)


def _keeping_partial(eqn: Any, rule: Rule, states: list[State], terms: set[int]) -> Step:
    """Compute an operator on terms of sums, if it is linear in them or only moves their elements."""
    [op, *others] = {states[n] for n in terms}
    groups = [*([set(g) for g in rule.linear] if op == Partial("sum") else []), {*rule.moves}]
    if _is_float_cast(eqn):  # linear up to rounding: each term is rounded, instead of their sum
        groups.append({0})
    for group in groups:
        # A whole operand in the group counts once: it is a term of the first microbatch, and zero in the others.
        if not others and terms <= group and (terms == group or op == Partial("sum")):
            return Step("each", [op if n in group else s for n, s in enumerate(states)], [op] * len(rule.results), rule)
    raise NotCut(f"{place_of(eqn)} needs a sum over the whole batch")


def _is_float_cast(eqn: Any) -> bool:
    """Whether an equation casts a float to one of at least 16 bits. Narrower floats are scaled by the whole value."""
    if eqn.primitive.name != "convert_element_type":
        return False
    dtypes = [a.aval.dtype for a in (*eqn.invars, *eqn.outvars)]
    return all(map(_compat.is_floating, dtypes)) and dtypes[1].itemsize >= 2


def whole_step(eqn: Any) -> Step:
    """Return the step of an operator whose operands do not depend on the batch."""
    return Step("whole", [WHOLE] * len(eqn.invars), [WHOLE] * len(eqn.outvars))


def place_of(eqn: Any) -> str:
    """Return an operator and its line, for messages."""
    line = _compat.program_line(eqn)
    return f"'{eqn.primitive.name}'{' at ' + line if line else ''}"
