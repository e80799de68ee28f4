"""Finds, for every value of a step, the part that one microbatch has. The rules of the operators decide it.

The batch is split at the inputs. Each operator passes the split on as its rule says: a contraction over the batch makes
its result partial, an operator that is linear in a partial value keeps it partial. If neither is possible, the operator
needs the whole batch. Then

- values that are cheap to compute from the batch, such as the number of tokens that are not masked, are computed for
  the whole batch before the loop (`early`);
- other operators run after the loop, on values that were accumulated or collected, such as the update of the optimizer;
- the step cannot be cut if an operator of the loop needs a value that is known only after the loop, such as a mean over
  the batch in a layer. With `numerics`, such an operator takes the microbatch's own sum in place of that of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.microbatches.operator_steps import (
    ESTIMATED,
    NotCut,
    Step,
    place_of,
    step_by_rule,
    whole_step,
)
from autoshard.sharding.microbatches.states import (
    OWN,
    WHOLE,
    After,
    Own,
    Partial,
    Split,
    State,
    Whole,
)
from autoshard.sharding.microbatches.sum_placement import sum_late
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.core.rule import RuleError
from autoshard.spmdrules.ir import program as _rules_registered  # noqa: F401

# Operators that are too expensive to be computed for the whole batch before the loop, and loops.
HEAVY = ("dot_general", "conv_general_dilated", "scan", "while", "remat2", "ragged_dot_general", "sort")
_BODIES = (
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
    "call",
    "closed_call",
    "core_call",
    "eval_jaxpr",
    "jit",
    "pjit",
)
_OPERATIONS = {"sum": "sum", "max": "maximum", "min": "minimum", "and": "logical and", "or": "logical or"}


@shown
@dataclass(eq=False)
class Flow:
    """For each value of one jaxpr, the part that one microbatch has.

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


def find_flow(
    closed: Any, batch: Mapping[int, Split], count: int, *, numerics: bool = False, rows: int | None = None
) -> Flow:
    """Return how a step is computed in microbatches.

    Args:
        closed: its closed jaxpr, with calls inlined.
        batch: input -> where it has the rows of the batch.
        count: number of microbatches.
        numerics: whether an operator that needs a sum over the whole batch may take that of each microbatch instead.
        rows: the number of all rows, if pieces have consecutive ones (`factor_at`).

    Raises:
        NotCut: a microbatch would need a value of the whole batch.
    """
    jaxpr = _compat.open_jaxpr(closed)
    inputs: list[State] = [batch.get(i, WHOLE) for i in range(len(jaxpr.invars))]
    early: set[Any] = set()
    own = _OwnSums() if numerics else None
    while True:
        try:
            return _Finder(count, early, own, rows).root(jaxpr, inputs)
        except _Restart:
            continue


def own_sums(flow: Flow) -> list[str]:
    """Return the operators, with their lines, that take the microbatch's own sum in place of that of the batch.

    Each text also says what it takes, such as `'eq' at model.py:8 takes the maximum`.
    """
    found: dict[str, None] = {}
    for eqn, step in zip(flow.jaxpr.eqns, flow.steps, strict=True):
        for inner in step.inner:
            found |= dict.fromkeys(own_sums(inner))
        operands = zip(eqn.invars, step.operands, strict=True)
        states = [flow.of(a) for a, s in operands if isinstance(s, (Own, Split))]
        ops = [_OPERATIONS[s.op] for s in states if isinstance(s, Partial)]
        if ops and not step.inner:
            found[f"{place_of(eqn)} takes the {ops[0]}"] = None
    return [*found]


@shown
@dataclass(eq=False)
class _OwnSums:
    """Where operators of the loop take the microbatch's own sums.

    Attributes:
        variables: the sums of the step. Operators take the microbatch's own sums instead of these.
        bodies: the results of equations with bodies in which operators take such sums.
        extremes: whether an operator in a body takes the microbatch's own maximum or the like. The mean of the maxima
            is not the maximum of the batch. So all operators then take the microbatch's own, as the gradients do.
    """

    variables: set[Any] = field(default_factory=set)
    bodies: set[Any] = field(default_factory=set)
    extremes: bool = False


class _Finder:
    def __init__(self, count: int, early: set[Any], own: _OwnSums | None, rows: int | None):
        self.count, self.early, self.own, self.rows = count, early, own, rows
        self.inside_own = False  # whether operators of the body that is visited take own sums
        self.made: dict[Any, Any] = {}  # variable of the step -> the equation that makes it
        self.effects_later = False  # whether an equation with side effects runs after the loop

    def root(self, jaxpr: Any, inputs: Sequence[State]) -> Flow:
        self.made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        flow = self.frame(jaxpr, inputs, is_root=True)
        sum_late(flow)
        return flow

    def frame(self, jaxpr: Any, inputs: Sequence[State], is_root: bool = False) -> Flow:
        flow = Flow(jaxpr)
        if is_root:
            self.root_flow = flow
        flow.states |= dict.fromkeys(jaxpr.constvars, WHOLE) | dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            if is_root and self.early.intersection(eqn.outvars):
                step = whole_step(eqn)
            else:
                step = self.equation(eqn, [self.seen(flow, atom, is_root) for atom in eqn.invars], is_root)
            flow.steps.append(step)
            flow.states |= zip(eqn.outvars, step.results, strict=True)
        flow.results = [flow.of(atom) for atom in jaxpr.outvars]
        return flow

    def equation(self, eqn: Any, states: list[State], is_root: bool) -> Step:
        if eqn.effects and not is_root:
            raise NotCut(f"{place_of(eqn)} has side effects, which each microbatch would repeat")
        if eqn.effects and self.effects_later:  # side effects keep their order, such as a read that follows a write
            return self.outside(eqn, states, None)
        if all(isinstance(s, Whole) for s in states):
            return whole_step(eqn)
        if all(isinstance(s, (Whole, Own)) for s in states) and not eqn.effects:
            return Step("each", states, [OWN] * len(eqn.outvars))
        reason = None
        if not any(isinstance(s, After) for s in states):
            outer = self.inside_own
            if is_root and self.own is not None:
                self.inside_own = not self.own.bodies.isdisjoint(eqn.outvars)
            try:
                step = self.in_loop(eqn, states)
                if not is_root or step.inner or not _masks(step, states):
                    return step
            except NotCut as refused:
                reason = str(refused)
                if not is_root:
                    raise
            finally:
                self.inside_own = outer
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
            later = [a for a, s in zip(eqn.invars, states, strict=True) if isinstance(s, After)]
            if cheap := self.cheap_among(later):  # such as the number of tokens, and one more
                self.early |= cheap
                raise _Restart
            reasons.append(reason or f"{place_of(eqn)} takes each row together with a value of the whole batch")
        if reasons and eqn.primitive.name in HEAVY:
            self.take_own(eqn, states, reason)
            itself = reason is not None and reason.startswith(place_of(eqn))
            raise NotCut(reason if itself else f"{reasons[0]}, and {place_of(eqn)} needs the result")
        self.effects_later |= bool(eqn.effects)
        state = After(reasons[0] if reasons else None)
        return Step("after", [state] * len(states), [state] * len(eqn.outvars))

    def seen(self, flow: Flow, atom: Any, is_root: bool) -> State:
        """Return the state in which operators see an operand."""
        state = flow.of(atom)
        if not is_root or self.own is None or not isinstance(state, Partial):
            return state
        extreme = self.own.extremes and state.op in ESTIMATED[1:] and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
        return OWN if extreme or atom in self.own.variables else state

    def take_own(self, eqn: Any, states: list[State], reason: str | None) -> None:
        """Let an equation of the loop take the microbatch's own sums, if `numerics` permits it, and start again.

        If the equation has bodies, each operator in them takes the sums that it needs. Otherwise the equation takes all
        sums from which its operands are computed.
        """
        if self.own is None:
            return
        if reason is not None and _has_body(eqn) and self.own.bodies.isdisjoint(eqn.outvars):
            self.own.bodies |= {*eqn.outvars}
            raise _Restart
        sums: set[Any] = set()
        todo, visited = [*zip(eqn.invars, states, strict=True)], set()
        while todo:
            atom, state = todo.pop()
            if not isinstance(state, (Partial, After)) or atom in visited:
                continue
            visited.add(atom)
            before = [(a, self.seen(self.root_flow, a, True)) for a in self.made[atom].invars]
            # For a multiple of a sum, go back to the sum: all users of the sum then take the microbatch's own sum.
            multiple = not _has_body(self.made[atom]) and any(isinstance(s, Partial) for _, s in before)
            if isinstance(state, After) or multiple:
                todo += before
            elif state.op in ESTIMATED:
                sums.add(atom)
        if sums - self.own.variables:
            self.own.variables |= sums
            raise _Restart

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

    def cheap_among(self, later: Sequence[Any]) -> set[Any]:
        """Return the cheap values among some that are known after the loop, and among those that they are made of."""
        found, todo, seen = set(), [*later], set()
        while todo:
            var = todo.pop()
            if isinstance(var, _compat.Literal) or var in seen or not isinstance(self.root_flow.of(var), After):
                continue
            seen.add(var)
            if self.are_cheap([var]):
                found.add(var)
            else:
                todo += self.made[var].invars
        return found

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
            raise NotCut(f"{place_of(eqn)} takes the batch, and the number of its iterations may depend on all rows")
        if eqn.effects:
            raise NotCut(f"{place_of(eqn)} has side effects")
        avals = tuple(_compat.shape_dtype_of(a) for a in eqn.invars)
        try:
            rule = rule_for(eqn.primitive, avals, eqn.params)
        except RuleError as error:
            raise NotCut(str(error)) from error
        if rule is None:
            raise NotCut(f"{place_of(eqn)} has no rule")
        if name == "optimization_barrier":  # each result is one operand: their rows need not be the same
            return Step("each", states, [*states], rule)
        try:
            return step_by_rule(eqn, rule, states, self.count, self.rows)
        except NotCut:
            own: list[State] = [OWN if isinstance(s, Partial) and s.op in ESTIMATED else s for s in states]
            if not self.inside_own or own == states:
                raise
        extremes = any(isinstance(s, Partial) and s.op in ESTIMATED[1:] for s in states)
        if extremes and self.own is not None and not self.own.extremes:
            self.own.extremes = True
            raise _Restart
        if all(isinstance(s, (Whole, Own)) for s in own):
            return Step("each", own, [OWN] * len(eqn.outvars))
        return step_by_rule(eqn, rule, own, self.count, self.rows)

    def scan(self, eqn: Any, states: list[State]) -> Step:
        n_consts, n_carry = _compat.scan_arity(eqn.params)
        first = n_consts + n_carry
        consts, carry = states[:n_consts], states[n_consts:first]
        slices = []
        for state in states[first:]:
            if isinstance(state, Split) and state.dim == 0:
                raise NotCut(f"{place_of(eqn)} runs over the rows of the batch")
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
        if not isinstance(states[0], (Whole, Own)):
            raise NotCut(f"{place_of(eqn)} depends on the batch")
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
    if isinstance(a, Own) or isinstance(b, Own):
        return b if isinstance(a, Own) else a
    raise NotCut(f"{place_of(eqn)} carries a value that starts as rows of the batch and becomes a sum over the batch")


def _has_body(eqn: Any) -> bool:
    return eqn.primitive.name in ("scan", "cond", *_BODIES)


def _masks(step: Step, states: list[State]) -> bool:
    """Whether a step turns a whole operand into a term of a sum, which is not needed after the loop."""
    return any(isinstance(a, Whole) and isinstance(b, Partial) for a, b in zip(states, step.operands, strict=True))
