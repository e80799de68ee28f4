"""A jaxpr and the jaxprs nested in it, as operators over numbered values.

Calls (`jit`, `remat`, `custom_jvp_call`, ...) are transparent: their inner values are the outer ones. Loops and
branches have their own values, and edges join these to the outer ones: `LoopEdge(outer, inner, stacked=True)` means
that the outer value is the inner one with a leading dimension that counts loop iterations. Three patterns are
rewritten so that they can be sharded: gathers and scatters whose index counts along a dimension (`index_batching`), the
gradient of sum pooling (`pooling_gradient`) and collectives under `vmap` (`mapped_collectives`). Every pass
(propagation, logical axes, cost, lowering) walks this structure in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.spmdrules.core.registry import check_fit, has_rule, replicated_rule, rule_for
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.ir.index_batching import ConstantIndices
from autoshard.spmdrules.ir.library_frames import exclude_libraries
from autoshard.spmdrules.ir.mapped_collectives import as_reduction
from autoshard.spmdrules.ir.pooling_gradient import fuse_padding


@shown
@dataclass(frozen=True)
class LoopEdge:
    """Two values that are sharded alike; if `stacked`, the outer one has an extra leading dimension of iterations."""

    outer: int
    inner: int
    stacked: bool = False


@shown
@dataclass(eq=False)
class Op:
    """One equation at one place of the program.

    Attributes:
        eqn: the equation.
        operands: the numbers of its operands; -1 for a literal scalar.
        results: the numbers of its results.
        rule: its rule; None for calls and control flow, which `blocks` and `edges` describe.
        trips: how often it runs each time the whole program runs.
        blocks: the nested programs.
        edges: the edges that join the values of loops and branches to the outer ones.
        around: the equations of the calls, loops and branches that contain it, the outermost first.
        name: the primitive's name.
    """

    eqn: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    trips: float
    blocks: tuple[Block, ...] = ()
    edges: tuple[LoopEdge, ...] = ()
    around: tuple[Any, ...] = field(default=(), repr=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.eqn.primitive.name

    @property
    def line(self) -> str:
        """The user's line that it comes from, `file.py:12 (function)`; empty if unknown.

        Operators of a function that a library puts under `jax.jit`, such as `jnp.sort`, may have no line of their own.
        The line is then that of the call.
        """
        lines = map(_compat.source_line, (self.eqn, *reversed(self.around)))
        return next((line for line in lines if line), "")


@shown
@dataclass(eq=False)
class Block:
    """A jaxpr at one place of the program.

    Attributes:
        jaxpr: the jaxpr.
        param: the name of the equation parameter that holds it; `IMPLEMENTATION` if none does.
        inputs: the numbers of its inputs.
        ops: its operators in order.
        outputs: the numbers of its outputs.
        position: its index within `param`, for branches.
        loop: whether it is the body or the condition of a loop.
    """

    jaxpr: Any
    param: str
    inputs: tuple[int, ...]
    ops: list[Op] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    position: int | None = None
    loop: bool = False


@shown
@dataclass(eq=False)
class Program:
    """A whole program: its outermost block and the aval of every value."""

    block: Block
    avals: list[Any]
    unknown: dict[str, list[str]] = field(default_factory=dict)  # primitive without a rule -> its source lines

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the program's inputs, without constants."""
        return self.block.inputs

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the program's results."""
        return self.block.outputs

    def ops(self) -> Iterator[Op]:
        """Yields every operator, depth first: an operator comes before those nested in it."""
        return iter(self._ops)

    @cached_property
    def _ops(self) -> list[Op]:
        return list(walk(self.block))

    @cached_property
    def filled(self) -> frozenset[int]:
        """Values that repeat one constant, such as zeros. Each device can compute its own shard of them."""
        return frozenset(
            op.results[0] for op in self.ops() if op.name == "broadcast_in_dim" and all(v < 0 for v in op.operands)
        )

    def constants(self) -> list[Any]:
        """The arrays that the program captures, in nested jaxprs too, each once."""
        blocks = (self.block, *(inner for op in self.ops() for inner in op.blocks))
        arrays = (x for block in blocks for x in _compat.constants(block.jaxpr))
        return list({id(x): x for x in arrays if hasattr(x, "nbytes")}.values())


def walk(block: Block) -> Iterator[Op]:
    """Yields every operator of a block, depth first."""
    for op in block.ops:
        yield op
        for inner in op.blocks:
            yield from walk(inner)


def visits(block: Block) -> Iterator[tuple[Op, bool]]:
    """Yields every operator twice: with True before the operators nested in it, and with False after them."""
    for op in block.ops:
        yield op, True
        for inner in op.blocks:
            yield from visits(inner)
        yield op, False


def inlined(block: Block) -> Iterator[Op]:
    """Yields the operators of a block with calls inlined, as XLA inlines them and fuses across them."""
    for op in block.ops:
        if len(op.blocks) == 1 and op.results == op.blocks[0].outputs:
            yield from inlined(op.blocks[0])
        else:
            yield op


def users_of(ops: Iterable[Op]) -> dict[int, list[Op]]:
    """Return the operators that take each value, in their order: value -> operators."""
    users: dict[int, list[Op]] = {}
    for op in ops:
        for v in op.operands:
            users.setdefault(v, []).append(op)
    return users


# Calls compute what their jaxpr computes. `run_state` is not one of them: its jaxpr works on references.
CALLS = frozenset({
    "call", "call_hi_primitive", "closed_call", "composite", "custom_jvp_call", "custom_linear_solve",
    "custom_vjp_call", "custom_vmap_call", "eval_jaxpr", "jit", "linear_call", "remat2", "remat_opt",
    "xla_metadata_call",
})  # fmt: skip
CONTROL = frozenset({"scan", "while", "cond"})
IMPLEMENTATION = ""  # in place of the name of a parameter: the jaxpr of a primitive that another library defines


def build(closed: Any) -> Program:
    """Numbers the values of a closed jaxpr and finds the rule of every equation.

    Args:
        closed: the result of `jax.make_jaxpr`.
    """
    exclude_libraries()
    program = Program(Block(closed, "", ()), [])
    builder = _Builder(program)
    jaxpr = _compat.open_jaxpr(closed)
    env: dict[Any, int] = {}
    inputs = tuple(builder.fresh(v, env) for v in jaxpr.invars)
    program.block.inputs = inputs
    builder.fill(program.block, env, 1.0)
    return program


class _Builder:
    def __init__(self, program: Program):
        self.program = program
        self.constant_indices = ConstantIndices()
        self.around: tuple[Any, ...] = ()  # the equations whose bodies are built now
        self.checked_rules: dict[int, Rule] = {}  # rules already checked against an equation, by id; kept alive here

    def new(self, aval: Any) -> int:
        self.program.avals.append(aval)
        return len(self.program.avals) - 1

    def fresh(self, var: Any, env: dict[Any, int]) -> int:
        env[var] = self.new(var.aval)
        return env[var]

    def fill(self, block: Block, env: dict[Any, int], trips: float) -> None:
        """Adds the operators of `block`, whose inputs already have numbers in `env`."""
        jaxpr = _compat.open_jaxpr(block.jaxpr)
        for var in jaxpr.constvars:
            if var not in env:
                self.fresh(var, env)
        for var, array in zip(jaxpr.constvars, _compat.constants(block.jaxpr), strict=False):  # an open jaxpr has none
            self.constant_indices.add_constant(env[var], array)

        def read(atom: Any) -> int:
            return -1 if isinstance(atom, _compat.Literal) else env[atom]

        for eqn in fuse_padding(jaxpr):
            for each in self.constant_indices.rewrite(as_reduction(eqn), tuple(map(read, eqn.invars))):
                around, self.around = self.around, (*self.around, each)
                op = self.op(each, tuple(map(read, each.invars)), trips)
                op.around = self.around = around
                block.ops.append(op)
                env.update(zip(each.outvars, op.results, strict=True))
                self.constant_indices.add_result(each, op.operands, op.results)
        block.outputs = tuple(self.new(v.aval) if (n := read(v)) < 0 else n for v in jaxpr.outvars)

    def nested(self, closed: Any, param: str, inputs: Sequence[int], trips: float, **place: Any) -> Block:
        """Returns a block over `closed` with these inputs; a literal input becomes a value."""
        jaxpr = _compat.open_jaxpr(closed)
        variables = jaxpr.invars
        numbers = tuple(self.new(v.aval) if n < 0 else n for v, n in zip(variables, inputs, strict=True))
        block = Block(closed, param, numbers, **place)
        self.fill(block, dict(zip(variables, numbers, strict=True)), trips)
        return block

    def op(self, eqn: Any, operands: tuple[int, ...], trips: float) -> Op:
        name = eqn.primitive.name
        if call := called(eqn):
            param, closed = call
            block = self.nested(closed, param, operands, trips)
            return Op(eqn, operands, block.outputs, None, trips, (block,))
        results = tuple(self.new(v.aval) for v in eqn.outvars)
        if name in CONTROL:
            return getattr(self, f"{name}_op")(eqn, operands, results, trips)
        avals = tuple(v.aval for v in eqn.invars)
        rule = rule_for(eqn.primitive, avals, eqn.params)
        if rule is None:
            self.program.unknown.setdefault(name, []).append(_compat.source_line(eqn))
            rule = replicated_rule(avals, tuple(v.aval for v in eqn.outvars))
        elif id(rule) not in self.checked_rules:
            check_fit(eqn.primitive, rule, avals, [v.aval for v in eqn.outvars], _compat.source_line(eqn))
            self.checked_rules[id(rule)] = rule
        return Op(eqn, operands, results, rule, trips)

    def scan_op(self, eqn: Any, operands: tuple[int, ...], results: tuple[int, ...], trips: float) -> Op:
        consts, carry = _compat.scan_arity(eqn.params)
        body = eqn.params["jaxpr"]
        steps = eqn.params["length"]
        inner = (*operands[:consts], *(self.new(v.aval) for v in _compat.open_jaxpr(body).invars[consts:]))
        block = self.nested(body, "jaxpr", inner, trips * steps, loop=True)
        ties = _carry_edges(operands[consts : consts + carry], block.inputs[consts : consts + carry],
                          block.outputs[:carry], results[:carry])  # fmt: skip
        ties += _edges(operands[consts + carry :], block.inputs[consts + carry :], stacked=True)
        ties += _edges(results[carry:], block.outputs[carry:], stacked=True)
        return Op(eqn, operands, results, None, trips, (block,), tuple(ties))

    def while_op(self, eqn: Any, operands: tuple[int, ...], results: tuple[int, ...], trips: float) -> Op:
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        init = operands[cond_consts + body_consts :]
        carry = tuple(self.new(v.aval) for v in _compat.open_jaxpr(body).invars[body_consts:])
        condition = self.nested(cond, "cond_jaxpr", (*operands[:cond_consts], *carry), trips, loop=True)
        block = self.nested(
            body, "body_jaxpr", (*operands[cond_consts : cond_consts + body_consts], *carry), trips, loop=True
        )
        ties = _carry_edges(init, carry, block.outputs, results)
        return Op(eqn, operands, results, None, trips, (condition, block), tuple(ties))

    def cond_op(self, eqn: Any, operands: tuple[int, ...], results: tuple[int, ...], trips: float) -> Op:
        branches = eqn.params["branches"]
        share = trips / len(branches)
        blocks = tuple(
            self.nested(branch, "branches", operands[1:], share, position=i) for i, branch in enumerate(branches)
        )
        ties = [tie for block in blocks for tie in _edges(results, block.outputs)]
        return Op(eqn, operands, results, None, trips, blocks, tuple(ties))


def called(eqn: Any) -> tuple[str, Any] | None:
    """Returns the parameter that holds the jaxpr of a transparent call, and that jaxpr; None for other equations.

    If another library defines a primitive and it has no rule, it counts as a call of its implementation. No parameter
    holds that jaxpr.
    """
    if eqn.primitive.name not in CALLS:
        if has_rule(eqn.primitive) or eqn.primitive.name in CONTROL:
            return None
        expanded = _compat.expand_by_implementation(eqn)
        return None if expanded is None else (IMPLEMENTATION, expanded)
    if eqn.primitive.name == "custom_linear_solve":
        return "jaxprs", _solve_jaxpr(eqn)
    if eqn.primitive.name == "call_hi_primitive":
        expanded = _compat.expand_hijax(eqn)
        return None if expanded is None else ("_prim", expanded)
    for key, value in eqn.params.items():
        if _compat.is_jaxpr(value) and len(_compat.open_jaxpr(value).invars) == len(eqn.invars):
            return key, value
    return None


def _solve_jaxpr(eqn: Any) -> Any:
    """Returns the solve function of a `custom_linear_solve` as a jaxpr that takes all of its operands."""
    solve, used = _compat.jaxpr_as_function(eqn.params["jaxprs"].solve), _compat.solve_operands(eqn)
    return jax.make_jaxpr(lambda *args: solve(*(args[i] for i in used)))(*map(_compat.shape_dtype_of, eqn.invars))


def _edges(outer: Sequence[int], inner: Sequence[int], stacked: bool = False) -> list[LoopEdge]:
    return [LoopEdge(o, i, stacked) for o, i in zip(outer, inner, strict=True) if o >= 0 and i >= 0]


def _carry_edges(
    init: Sequence[int], inside: Sequence[int], out: Sequence[int], results: Sequence[int]
) -> list[LoopEdge]:
    """Joins the initial, inner, next and final value of each carry: no iteration changes a carry's sharding."""
    return [*_edges(init, inside), *_edges(results, inside), *_edges(out, inside)]
