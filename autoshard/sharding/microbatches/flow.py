"""Finds which part of every value of a step a microbatch has, by the rules of the operators.

The batch is split at the inputs. Each operator passes the split on as its rule says: a contraction over the batch makes
its result partial, an operator that is linear in a partial value keeps it partial. Where neither is possible, the
operator needs the whole batch. Then

- values that are cheap to compute from the batch, such as the number of tokens that count, are computed for the whole
  batch before the loop (`early`);
- other operators run after the loop, on values that were accumulated or collected, such as the update of the optimizer;
- the step cannot be cut if an operator of the loop needs a value that is known only after the loop, such as a mean over
  the batch in a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.microbatches.states import (
    WHOLE,
    After,
    Partial,
    Split,
    State,
    Whole,
    factor_at,
    split_of,
)
from autoshard.sharding.microbatches.sum_placement import sum_late
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.core.rule import POSITIONS, Rule, RuleError
from autoshard.spmdrules.ir import program as _rules_registered  # noqa: F401

# Operators that are too expensive to be computed for the whole batch before the loop, and loops.
HEAVY = ("dot_general", "conv_general_dilated", "scan", "while", "remat2", "ragged_dot_general", "sort")
_BODIES = ("remat2", "custom_jvp_call", "custom_vjp_call", "call", "closed_call", "core_call", "jit", "pjit")


class NotCut(Exception):
    """The step cannot be cut into microbatches; the text is the reason."""


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
        inner: the flows of its nested jaxprs.
    """

    phase: str
    operands: list[State]
    results: list[State]
    rule: Rule | None = None
    factor: str | None = None
    inner: list[Flow] = field(default_factory=list)


@shown
@dataclass(eq=False)
class Flow:
    """Which part of each value of one jaxpr a microbatch has.

    Attributes:
        jaxpr: the jaxpr.
        states: variable -> its state: rows, a term of a sum, all of it, or known only after the loop.
        steps: how each equation is computed.
        results: the states of its results.
    """

    jaxpr: Any
    states: dict[Any, State] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    results: list[State] = field(default_factory=list)

    def of(self, atom: Any) -> State:
        """Return the state of an operand."""
        return WHOLE if isinstance(atom, _compat.Literal) else self.states[atom]


class _Restart(Exception):
    """More values are computed before the loop than assumed."""


def find_flow(closed: Any, batch: Mapping[int, Split], count: int) -> Flow:
    """Return how a step is computed in microbatches.

    Args:
        closed: its closed jaxpr, with calls inlined.
        batch: input -> where it has the rows of the batch.
        count: number of microbatches.

    Raises:
        NotCut: a microbatch would need a value of the whole batch.
    """
    jaxpr = _compat.open_jaxpr(closed)
    inputs: list[State] = [batch.get(i, WHOLE) for i in range(len(jaxpr.invars))]
    early: set[Any] = set()
    while True:
        try:
            return _Finder(count, early).root(jaxpr, inputs)
        except _Restart:
            continue


class _Finder:
    def __init__(self, count: int, early: set[Any]):
        self.count, self.early = count, early
        self.made: dict[Any, Any] = {}  # variable of the step -> the equation that makes it
        self.effects_later = False  # whether an equation with side effects runs after the loop

    def root(self, jaxpr: Any, inputs: Sequence[State]) -> Flow:
        self.made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        flow = self.frame(jaxpr, inputs, is_root=True)
        sum_late(flow)
        return flow

    def frame(self, jaxpr: Any, inputs: Sequence[State], is_root: bool = False) -> Flow:
        flow = Flow(jaxpr)
        flow.states |= dict.fromkeys(jaxpr.constvars, WHOLE) | dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            if is_root and self.early.intersection(eqn.outvars):
                step = _whole(eqn)
            else:
                step = self.equation(eqn, [flow.of(atom) for atom in eqn.invars], is_root)
            flow.steps.append(step)
            flow.states |= zip(eqn.outvars, step.results, strict=True)
        flow.results = [flow.of(atom) for atom in jaxpr.outvars]
        return flow

    def equation(self, eqn: Any, states: list[State], is_root: bool) -> Step:
        if eqn.effects and not is_root:
            raise NotCut(f"{_place(eqn)} has side effects, which each microbatch would repeat")
        if eqn.effects and self.effects_later:  # side effects keep their order, such as a read that follows a write
            return self.outside(eqn, states, None)
        if all(isinstance(s, Whole) for s in states):
            return _whole(eqn)
        reason = None
        if not any(isinstance(s, After) for s in states):
            try:
                step = self.in_loop(eqn, states)
                if not is_root or step.inner or not _masks(step, states):
                    return step
            except NotCut as refused:
                reason = str(refused)
                if not is_root:
                    raise
        return self.outside(eqn, states, reason)

    def outside(self, eqn: Any, states: list[State], reason: str | None) -> Step:
        """Compute an equation of the step before or after the loop.

        Raises:
            NotCut: it would compute most of the step after the loop.
        """
        if reason is not None:
            sums, rows = ([a for a, s in zip(eqn.invars, states, strict=True) if isinstance(s, kind)]
                          for kind in (Partial, Split))  # fmt: skip
            # First try its cheap sums alone: often the equation can then stay in the loop. Else the whole equation.
            if cheap := {a for a in sums if self.are_cheap([a])}:
                self.early |= cheap
                raise _Restart
            if self.are_cheap([*sums, *rows]) and eqn.primitive.name not in HEAVY and not eqn.effects:
                self.early |= {*eqn.outvars}
                raise _Restart
        reasons = [s.reason for s in states if isinstance(s, After) and s.reason]
        if any(isinstance(s, Split) for s in states):
            reasons.append(reason or f"{_place(eqn)} takes each row together with a value of the whole batch")
        if reasons and eqn.primitive.name in HEAVY:
            itself = reason is not None and reason.startswith(_place(eqn))
            raise NotCut(reason if itself else f"{reasons[0]}, and {_place(eqn)} needs the result")
        self.effects_later |= bool(eqn.effects)
        state = After(reasons[0] if reasons else None)
        return Step("after", [state] * len(states), [state] * len(eqn.outvars))

    def are_cheap(self, atoms: Iterable[Any]) -> bool:
        """Whether variables of the step are computed from its inputs by cheap operators only."""
        todo, seen = [*atoms], set()
        while todo:
            var = todo.pop()
            if isinstance(var, _compat.Literal) or var in seen or var not in self.made:
                continue
            seen.add(var)
            eqn = self.made[var]
            if eqn.primitive.name in HEAVY or eqn.effects:
                return False
            todo += eqn.invars
        return True

    def in_loop(self, eqn: Any, states: list[State]) -> Step:
        """Compute an equation for one microbatch.

        Raises:
            NotCut: it needs the whole batch.
        """
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, states)
        if name in _BODIES:
            inner = next((v for v in eqn.params.values() if _compat.is_jaxpr(v)), None)
            if inner is not None and len(_compat.open_jaxpr(inner).invars) == len(states):
                flow = self.frame(_compat.open_jaxpr(inner), states)
                return Step("each", states, flow.results, inner=[flow])
        if name == "cond":
            return self.cond(eqn, states)
        if name == "while":
            raise NotCut(f"{_place(eqn)} takes the batch, and the number of its iterations may depend on all rows")
        if eqn.effects:
            raise NotCut(f"{_place(eqn)} has side effects")
        avals = tuple(_compat.shape_dtype_of(a) for a in eqn.invars)
        try:
            rule = rule_for(eqn.primitive, avals, eqn.params)
        except RuleError as error:
            raise NotCut(str(error)) from error
        if rule is None:
            raise NotCut(f"{_place(eqn)} has no rule")
        return _by_rule(eqn, rule, states, self.count)

    def scan(self, eqn: Any, states: list[State]) -> Step:
        n_consts, n_carry = _compat.scan_arity(eqn.params)
        first = n_consts + n_carry
        consts, carry = states[:n_consts], states[n_consts:first]
        slices = []
        for state in states[first:]:
            if isinstance(state, Split) and state.dim == 0:
                raise NotCut(f"{_place(eqn)} runs over the rows of the batch")
            slices.append(Split(state.dim - 1, state.stride) if isinstance(state, Split) else state)
        body = _compat.open_jaxpr(eqn.params["jaxpr"])
        while True:
            flow = self.frame(body, [*consts, *carry, *slices])
            after = [_joined(a, b, eqn) for a, b in zip(carry, flow.results[:n_carry], strict=True)]
            if after == carry:
                break
            carry = after
        stacks = [Split(s.dim + 1, s.stride) if isinstance(s, Split) else s for s in flow.results[n_carry:]]
        return Step("each", [*consts, *carry, *states[first:]], [*carry, *stacks], inner=[flow])

    def cond(self, eqn: Any, states: list[State]) -> Step:
        if not isinstance(states[0], Whole):
            raise NotCut(f"{_place(eqn)} depends on the batch")
        flows = [self.frame(_compat.open_jaxpr(each), states[1:]) for each in eqn.params["branches"]]
        results = flows[0].results
        for flow in flows[1:]:
            results = [_joined(a, b, eqn) for a, b in zip(results, flow.results, strict=True)]
        return Step("each", states, results, inner=flows)


def _joined(a: State, b: State, eqn: Any) -> State:
    """Return the common state of two values in one place, such as the carry of a loop before and after its body."""
    if a == b or isinstance(b, Whole):
        return a
    if isinstance(a, Whole):
        return b
    raise NotCut(f"{_place(eqn)} carries a value that starts as rows of the batch and becomes a sum over the batch")


def _by_rule(eqn: Any, rule: Rule, states: list[State], count: int) -> Step:
    found = {}
    for number, state in enumerate(states):
        if isinstance(state, Split):
            at = factor_at(rule, rule.operands[number], state, count)
            if at is None:
                raise NotCut(f"{_place(eqn)} mixes the rows of the batch with another dimension")
            found[at] = number
    if len(found) > 1:
        raise NotCut(f"{_place(eqn)} compares each row of the batch with other rows")
    terms = {n for n, state in enumerate(states) if isinstance(state, Partial)}
    if not found:
        return _keeping_partial(eqn, rule, states, terms)
    if terms:
        raise NotCut(f"{_place(eqn)} needs a sum over the whole batch for each row")
    [(name, stride)] = found
    kind = rule.factor(name)
    if kind.kind not in ("pass", "reduce") or kind.op in POSITIONS:
        raise NotCut(f"{_place(eqn)} needs all rows of the batch at once")
    operands: list[State] = [split_of(rule, dims, name, stride) or WHOLE for dims in rule.operands]
    for number, state in enumerate(states):
        if isinstance(state, Split) and operands[number] != state:
            raise NotCut(f"{_place(eqn)} mixes the rows of the batch with another dimension")
    results: list[State] = []
    for number, dims in enumerate(rule.results):
        op = rule.partial(name, number)
        split = split_of(rule, dims, name, stride)
        if split is None and op is None:
            raise NotCut(f"{_place(eqn)} has a result that would differ between microbatches")
        results.append(split or Partial(op or "sum"))
    return Step("each", operands, results, rule, name)


def _keeping_partial(eqn: Any, rule: Rule, states: list[State], terms: set[int]) -> Step:
    """Compute an operator on terms of sums, if it is linear in them or only moves their elements."""
    [op, *others] = {states[n] for n in terms}
    groups = [*([set(g) for g in rule.linear] if op == Partial("sum") else []), {*rule.moves}]
    if _is_float_cast(eqn):  # linear up to rounding; the terms are rounded in place of their sum
        groups.append({0})
    for group in groups:
        # A whole operand in the group counts once: it is a term of the first microbatch, and zero in the others.
        if not others and terms <= group and (terms == group or op == Partial("sum")):
            return Step("each", [op if n in group else s for n, s in enumerate(states)], [op] * len(rule.results), rule)
    raise NotCut(f"{_place(eqn)} needs a sum over the whole batch")


def _is_float_cast(eqn: Any) -> bool:
    """Whether an equation casts a float to one of at least 16 bits. Narrower ones have a scale of the whole value."""
    if eqn.primitive.name != "convert_element_type":
        return False
    dtypes = [a.aval.dtype for a in (*eqn.invars, *eqn.outvars)]
    return all(map(_compat.is_floating, dtypes)) and dtypes[1].itemsize >= 2


def _masks(step: Step, states: list[State]) -> bool:
    """Whether a step turns a whole operand into a term of a sum, which is not needed after the loop."""
    return any(isinstance(a, Whole) and isinstance(b, Partial) for a, b in zip(states, step.operands, strict=True))


def _whole(eqn: Any) -> Step:
    return Step("whole", [WHOLE] * len(eqn.invars), [WHOLE] * len(eqn.outvars))


def _place(eqn: Any) -> str:
    line = _compat.program_line(eqn)
    return f"'{eqn.primitive.name}'{' at ' + line if line else ''}"
