"""Writes a step as a loop over microbatches, as a `Flow` describes.

Values that do not depend on the batch, or are cheap to compute from it, are computed before the loop. The loop runs the
other operators on one microbatch. It carries sums, and stacks rows that are needed later. Operators that take the sums,
such as the optimizer's update, run after the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.microbatches.flow import Flow
from autoshard.sharding.microbatches.operator_steps import NotCut, Step
from autoshard.sharding.microbatches.repeated_rows import repeated_rows
from autoshard.sharding.microbatches.states import After, Cut, Own, Partial, Split, State, Whole
from autoshard.sharding.rewrite.evaluation import bind_checkpoint, bind_scan
from autoshard.spmdrules.core.rule import Shard
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator, returning_list

COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add, "mul": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum,
    "and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor,
}  # fmt: skip
"""The operations by which terms are combined."""
REDUCE: Mapping[str, Callable[..., Any]] = {
    "sum": jnp.sum, "mul": jnp.prod, "max": jnp.max, "min": jnp.min,
    "and": jnp.bitwise_and.reduce, "or": jnp.bitwise_or.reduce, "xor": jnp.bitwise_xor.reduce,
}  # fmt: skip
"""The same operations over a dimension."""

Terms = tuple[list[Any], list[Any]]
Runner = Callable[[Callable[[Any, list[Any]], Terms], list[Any], list[str]], Terms]
"""Runs all microbatches.

It takes the function of one microbatch, from its number and rows to its terms and results; the rows of all microbatches
`[M, ...]`; and the operations that combine the terms. It returns the combined terms, and all results `[M, ...]`.
"""


def in_microbatches(closed: Any, flow: Flow, cut: Cut, run: Runner | None = None) -> Callable[..., list[Any]]:
    """Return a step in microbatches, as a function from its flat inputs to its flat results.

    Args:
        closed: the step's closed jaxpr, with calls inlined.
        flow: for each value, whether a microbatch has rows of it, a term of a sum, or all of it.
        cut: how rows are cut.
        run: runs the microbatches; one after another for None.
    """
    return lambda *args: _Writer(closed, flow, cut, run or one_after_another).write(args)


def one_after_another(one: Callable[[Any, list[Any]], Terms], rows: list[Any], ops: list[str]) -> Terms:
    """Run the microbatches one after another (`Runner`)."""
    shapes, _ = jax.eval_shape(one, jnp.int32(0), [x[0] for x in rows])

    def step(totals: list[Any], x: tuple[Any, list[Any]]) -> Terms:
        terms, kept = one(*x)
        combined = [COMBINE[op](t, x.astype(t.dtype)) for op, t, x in zip(ops, totals, terms, strict=True)]
        return combined, kept

    start = [neutral(op, x.shape, wide(x.dtype)) for op, x in zip(ops, shapes, strict=True)]
    totals, kept = lax.scan(step, start, (jnp.arange(len(rows[0]), dtype=jnp.int32), rows))
    return [x.astype(shape.dtype) for x, shape in zip(totals, shapes, strict=True)], kept


class _RowsShard(Shard):
    """A shard of one microbatch. Its rows are not consecutive, so the factor of the rows has no offset."""

    def offset(self, name: str) -> Any:
        if name in self.counts:
            raise NotCut("an operator needs the positions of its rows")
        return 0


class _Writer:
    def __init__(self, closed: Any, flow: Flow, cut: Cut, run: Runner):
        self.jaxpr, self.flow, self.cut, self.run = _compat.open_jaxpr(closed), flow, cut, run
        self.known = dict(zip(self.jaxpr.constvars, _compat.constants(closed), strict=True))
        # What scans stack. If there are several replicas, their dimension comes after that of the stack.
        self.stacks = {
            var for eqn in self.jaxpr.eqns if eqn.primitive.name == "scan"
            for var in eqn.outvars[_compat.scan_arity(eqn.params)[1] :]
        }  # fmt: skip

    def write(self, args: Sequence[Any]) -> list[Any]:
        jaxpr, flow = self.jaxpr, self.flow
        known = {**self.known, **dict(zip(jaxpr.invars, args, strict=True))}
        later = [(eqn, step) for eqn, step in zip(jaxpr.eqns, flow.steps, strict=True) if step.phase == "after"]
        ends = [*zip(jaxpr.outvars, flow.results, strict=True)]
        ends += [(a, flow.of(a) if isinstance(s, After) else s) for eqn, step in later
                 for a, s in zip(eqn.invars, step.operands, strict=True)]  # fmt: skip
        ends = [(a, s) for a, s in ends if not isinstance(a, _compat.Literal)]
        self.before(known, self.taken_whole(ends))
        wanted = {
            var: Partial() if isinstance(s, Own) else s for var, s in ends if isinstance(s, (Split, Partial, Own))
        }
        with _compat.line_of(self.first()):
            known |= self.loop(known, wanted)
        for eqn, _ in later:
            with _compat.source_of(eqn):
                results = _compat.bind(eqn, eqn.params, *(_read(known, a) for a in eqn.invars))
            known |= zip(eqn.outvars, results, strict=True)
        return [_read(known, atom) for atom in jaxpr.outvars]

    def taken_whole(self, ends: Iterable[tuple[Any, State]]) -> set[Any]:
        """Return the variables that operators in the loop or after it take whole."""
        found = {var for var, state in ends if isinstance(state, Whole)}
        for eqn, step in zip(self.jaxpr.eqns, self.flow.steps, strict=True):
            if step.phase == "each":
                variables = [a for a in eqn.invars if not isinstance(a, _compat.Literal)]
                found |= {var for var in variables if isinstance(self.flow.of(var), Whole)}
        return found

    def before(self, known: dict[Any, Any], wanted: set[Any]) -> None:
        """Compute the wanted values before the loop. Results of a scan that are not wanted are dead code."""
        needed, positions = set(wanted), []
        for position in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[position]
            if needed & {*eqn.outvars} or (eqn.effects and self.flow.steps[position].phase == "whole"):
                positions.append(position)
                needed |= {a for a in eqn.invars if not isinstance(a, _compat.Literal)}
        for position in reversed(positions):
            eqn = self.jaxpr.eqns[position]
            with _compat.source_of(eqn):
                results = _compat.bind(eqn, eqn.params, *(_read(known, a) for a in eqn.invars))
            known |= zip(eqn.outvars, results, strict=True)

    def loop(self, known: Mapping[Any, Any], wanted: Mapping[Any, State]) -> dict[Any, Any]:
        """Run the loop; return the wanted values of the whole batch."""
        jaxpr, flow, cut = self.jaxpr, self.flow, self.cut
        rows = {var: s for var in jaxpr.invars if isinstance(s := flow.states[var], Split)}
        stacked = [cut.parts(known[var], split) for var, split in rows.items()]
        # Other known values were only needed to compute these. The loop computes them again, for its own rows.
        whole = {var: x for var, x in known.items() if isinstance(flow.states[var], Whole)}
        sums = {var: s for var, s in wanted.items() if isinstance(s, Partial)}
        collected = {var: s for var, s in wanted.items() if isinstance(s, Split)}

        def replica(number: Any, replica: Any, slices: list[Any]) -> Terms:
            batch = _Microbatch(number, replica, cut)
            env = batch.run(flow, {**whole, **dict(zip(rows, slices, strict=True))}, root=True)
            terms = [batch.taken(env[var], flow.states[var], s) for var, s in sums.items()]
            return terms, [env[var] for var in collected]

        def one(number: Any, slices: list[Any]) -> Terms:
            if cut.replicas == 1:
                return replica(number, 0, slices)
            numbers = jnp.arange(cut.replicas, dtype=jnp.int32)
            return jax.vmap(lambda r, own: replica(number, r, own), out_axes=(places, 0))(numbers, slices)

        ops, places = [s.op for s in sums.values()], [int(var in self.stacks) for var in sums]
        totals, kept = self.run(one, stacked, ops)
        made: dict[Any, Any] = {}
        for var, op, x, place in zip(sums, ops, totals, places, strict=True):
            with _compat.line_of(self.maker(var)):
                made[var] = REDUCE[op](x, axis=place) if cut.replicas > 1 else x
        for (var, split), x in zip(collected.items(), kept, strict=True):
            with _compat.line_of(self.maker(var)):
                made[var] = cut.joined(x, split)
        return made

    def maker(self, var: Any) -> Any | None:
        """Return the equation that makes a value, in the body of a loop if it is made there; None for an input."""
        eqn = next((each for each in self.jaxpr.eqns if var in each.outvars), None)
        return None if eqn is None else _compat.innermost(eqn, eqn.outvars.index(var))

    def first(self) -> Any | None:
        """Return the first equation that takes rows. Its line is that of what only the loop adds."""
        steps = zip(self.jaxpr.eqns, self.flow.steps, strict=True)
        return next((eqn for eqn, step in steps if any(isinstance(s, Split) for s in step.operands)), None)


@shown
class Around(NamedTuple):
    """What is known of the values around a nested jaxpr: variable -> value, and variable -> the equation of it."""

    values: Mapping[Any, Any]
    makers: Mapping[Any, Any]

    def __contains__(self, atom: Any) -> bool:
        return not isinstance(atom, _compat.Literal) and atom in self.makers


_NOTHING = Around({}, {})


class _Microbatch:
    """Computes the values of one replica of a microbatch."""

    def __init__(self, number: Any, replica: Any, cut: Cut):
        self.number, self.replica, self.cut, self.count = number, replica, cut, cut.pieces

    def run(
        self, flow: Flow, env: dict[Any, Any], root: bool = False, makers: Mapping[Any, Any] = _NOTHING.makers
    ) -> dict[Any, Any]:
        """Evaluate a jaxpr for this microbatch. `env` holds its inputs and constants, and gets all of its values.

        Args:
            flow: the parts of its values that a microbatch has.
            env: variable -> value. It may have values from outside.
            root: whether it is the step itself.
            makers: the equations that make its inputs, and values from outside.
        """
        makers = {**makers, **{var: eqn for eqn in flow.jaxpr.eqns for var in eqn.outvars}}
        for eqn, step in zip(flow.jaxpr.eqns, flow.steps, strict=True):
            if step.phase == "after" or (root and step.phase == "whole"):
                continue
            with _compat.source_of(eqn):
                operands = [
                    self.operand(flow, env, atom, state, makers)
                    for atom, state in zip(eqn.invars, step.operands, strict=True)
                ]
                results = self.equation(eqn, step, operands, Around(env, makers))
            # A scan in the loop may have results that do not depend on the batch. These are known already.
            env |= {v: x for v, x in zip(eqn.outvars, results, strict=True) if not (root and v in env)}
        return env

    def operand(self, flow: Flow, env: Mapping[Any, Any], atom: Any, state: State, makers: Mapping[Any, Any]) -> Any:
        """Return the part of an operand that a microbatch takes; `makers` has the equations of its jaxpr by result."""
        there = flow.of(atom)
        if isinstance(state, Split) and isinstance(there, (Whole, Own, Partial)) and atom in makers:
            made = repeated_rows(makers[atom], state, self.count, env, {} if isinstance(there, Partial) else makers)
            if made is not None:
                return self.estimate(made, there) if isinstance(there, Partial) else made
        return self.taken(_read(env, atom), there, state)

    def taken(self, x: Any, there: State, wanted: State) -> Any:
        """Return the part of an operand that a microbatch takes."""
        if isinstance(there, Partial) and isinstance(wanted, (Own, Split)):
            x, there = self.estimate(x, there), Own()
        if isinstance(there, Own) and isinstance(wanted, Partial):
            if wanted.op != "sum" or not jnp.issubdtype(x.dtype, jnp.inexact):
                raise NotCut(f"a value of type {x.dtype} that is computed from the sums of each microbatch has no mean "
                             "over the microbatches")  # fmt: skip
            return x / self.count
        if not isinstance(there, (Whole, Own)) or isinstance(wanted, (Whole, After, Own)):
            return x
        if isinstance(wanted, Split):
            return self.cut.part(x, wanted, self.number, self.replica)
        first = self.number == 0 if self.cut.replicas == 1 else (self.number == 0) & (self.replica == 0)
        return jnp.where(first, x, neutral(wanted.op, jnp.shape(x), jnp.result_type(x)))

    def estimate(self, term: Any, there: Partial) -> Any:
        """Return the microbatch's own estimate of a value from its term."""
        return term * self.count if there.op == "sum" else term

    def equation(self, eqn: Any, step: Step, operands: list[Any], around: Around) -> list[Any]:
        name = eqn.primitive.name
        if _are_whole(step):
            return _compat.bind(eqn, eqn.params, *operands)
        if name == "scan":
            return self.scan(eqn, step, operands, around)
        if name == "cond":
            branches = [
                self.frame(closed, flow, step.results)
                for closed, flow in zip(eqn.params["branches"], step.inner, strict=True)
            ]
            return lax.switch(operands[0], branches, *operands[1:])
        if name == "remat2":
            body = self.frame(eqn.params["jaxpr"], step.inner[0], step.results, around, eqn.invars)
            return bind_checkpoint(eqn, body, operands)
        if step.inner:
            inner = next(v for v in eqn.params.values() if _compat.is_jaxpr(v))
            return self.frame(inner, step.inner[0], step.results, around, eqn.invars)(*operands)
        return self.operator(eqn, step, operands)

    def operator(self, eqn: Any, step: Step, operands: list[Any]) -> list[Any]:
        rule, factor = step.rule, step.factor
        assert rule is not None
        if eqn.primitive.name == "device_put":  # its rule leaves values in the memory where they are
            return [_moved(x, *pair) for x, *pair in zip(operands, eqn.invars, eqn.outvars, strict=True)]
        if factor is None or is_operator(eqn.primitive):  # an opaque operator takes operands of any size
            return _compat.bind(eqn, eqn.params, *operands)
        counts = {factor: self.count}
        if rule.body is not None:
            return returning_list(rule.body)(_RowsShard(rule, counts, {factor: self.number}), *operands)
        params = rule.local(eqn.params, Shard(rule, counts, {})) if rule.local is not None else eqn.params
        return _compat.bind(eqn, params, *operands)

    def frame(
        self,
        closed: Any,
        flow: Flow,
        results: Sequence[State],
        around: Around = _NOTHING,
        operands: Sequence[Any] = (),
    ) -> Callable[..., list[Any]]:
        """Return a nested jaxpr as a function of a microbatch's part of its inputs.

        Args:
            closed: the jaxpr.
            flow: the parts of its values that a microbatch has.
            results: the parts of its results that are wanted.
            around: what is known of the values around it.
            operands: the variables around it that its first inputs equal.
        """
        constants = dict(zip(flow.jaxpr.constvars, _compat.constants(closed), strict=True))
        made = {v: around.makers[a] for v, a in zip(flow.jaxpr.invars, operands, strict=False) if a in around}
        values = around.values if made else {}

        def run(*args: Any) -> list[Any]:
            inputs = {**constants, **dict(zip(flow.jaxpr.invars, args, strict=True))}
            env = self.run(flow, {**values, **inputs}, makers={**around.makers, **made} if made else {})
            there = zip(flow.jaxpr.outvars, flow.results, results, strict=True)
            return [self.taken(_read(env, atom), one, wanted) for atom, one, wanted in there]

        return run

    def scan(self, eqn: Any, step: Step, operands: list[Any], around: Around) -> list[Any]:
        n_consts, n_carry = _compat.scan_arity(eqn.params)
        # The states of the body's results: those of the carry, and those of the stacks without the loop's dimension.
        stacks = [Split(s.dim - 1, s.stride) if isinstance(s, Split) else s for s in step.results[n_carry:]]
        wanted = [*step.results[:n_carry], *stacks]
        body = self.frame(eqn.params["jaxpr"], step.inner[0], wanted, around, eqn.invars[:n_consts])
        return bind_scan(eqn, body, operands, unrolls_one=True)


def _are_whole(step: Step) -> bool:
    """Whether an equation takes no rows and no terms."""
    return step.phase == "whole" or all(isinstance(s, (Whole, Own)) for s in step.operands)


def _moved(x: Any, source: Any, result: Any) -> Any:
    """Move a value to the memory of an equation's result, of the device or of its host."""
    there = _compat.is_on_host(result)
    if there == _compat.is_on_host(source):
        return x
    return jax.device_put(x, jax.memory.Space.Host if there else jax.memory.Space.Device)


def _read(env: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, _compat.Literal) else env[atom]


def wide(dtype: Any) -> Any:
    """Return the dtype in which terms are accumulated: float32 for narrower floats, which would lose small terms."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def neutral(op: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array of the identity element of an operation."""
    if op in ("sum", "or", "xor"):
        return jnp.zeros(shape, dtype)
    if op == "mul":
        return jnp.ones(shape, dtype)
    if op == "and":
        return ~jnp.zeros(shape, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.full(shape, op == "min", dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(shape, -jnp.inf if op == "max" else jnp.inf, dtype)
    return jnp.full(shape, jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max, dtype)
