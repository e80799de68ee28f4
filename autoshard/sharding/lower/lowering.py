"""Writes a layout into a program: the jaxpr evaluated again, with constraints where the layout decides something.

Constraints stand on the operands and results of contractions, gathers, scatters and reductions, and on a stored
parameter after its cast to the compute type (before it, where that is the wider one), so that the narrow type is
gathered. Everything between them follows by XLA's own propagation; constraints on every value would turn gathered
activations into residuals. Loops, branches and calls are rewritten in place; source lines and name scopes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from autoshard import _compat
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import (
    comes_straight,
    cut_of,
    operand_spec,
    result_spec,
    runs_on_shards,
    strategy,
)
from autoshard.sharding.lower.conv_as_matmul import folded, is_product, product, unfolded
from autoshard.sharding.program.operator_kinds import ADDRESSED, REDUCTIONS, constrained, declared, is_decision_point
from autoshard.spmdrules.core.placement import Spec, to_partition_spec
from autoshard.spmdrules.custom_ops.operator import run_sharded
from autoshard.spmdrules.custom_ops.sharded_execution import body_of, run_on_shards
from autoshard.spmdrules.ir.program import Block, Op

# Calls whose jaxpr holds no constants: they are the first operands, and this parameter counts them.
_COUNTED = {"linear_call": "num_callee_consts", "remat_opt": "num_consts"}


class Lowering:
    """Evaluates a program with the constraints of a layout over a mesh of devices."""

    def __init__(self, layout: Layout, mesh: Any, flops_per_byte: float):
        self.layout = layout
        self.mesh = mesh
        self.flops_per_byte = flops_per_byte
        self.constraints = 0
        self._around: dict[int, tuple[Op, Any]] = {}  # a parameter turned around -> how, and what it was

    def __call__(self, *args: Any) -> list[Any]:
        """The program's flat results from its flat inputs."""
        return self.block(self.layout.axes.program.block, args)

    def constrain(self, x: Any, spec: Spec) -> Any:
        """`x` with the sharding `spec`; arrays without dimensions and typed keys as they are."""
        if not getattr(x, "ndim", 0) or _compat.is_extended(x.dtype):
            return x
        self.constraints += 1
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, to_partition_spec(spec)))

    def moved(self, x: Any, spec: Spec, value: int) -> Any:
        """An operand taken to `spec`: a parameter that was cast to a wider type in the one that it was cast from.

        One that was turned around (a kernel, for the gradient of its convolution) is so behind the move, which others
        of its convolutions share then.
        """
        narrow = self.layout.axes.transfer_dtype.get(value)
        if operand_spec(self.layout, value) == spec:
            return self.constrain(x, spec)
        if value in self._around:
            op, before = self._around[value]
            return _compat.bind(op.eqn, op.eqn.params, self.moved(before, spec, op.operands[0]))[0]
        if narrow is None:
            return self.constrain(x, spec)
        return self.constrain(x.astype(narrow), spec).astype(x.dtype)

    def block(self, block: Block, args: Sequence[Any]) -> list[Any]:
        """The results of a block."""
        jaxpr = _compat.open_jaxpr(block.jaxpr)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, _compat.constants(block.jaxpr), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _compat.Literal) else env[atom]

        for op in block.ops:
            with _compat.source_of(op.eqn):
                results = self.op(op, [read(a) for a in op.eqn.invars])
            env.update(zip(op.eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def op(self, op: Op, args: list[Any]) -> list[Any]:
        """The results of one operator."""
        if op.blocks:
            return self.nested(op, args)
        if op.name == "sharding_constraint":
            return self.own_constraint(op, args[0])
        if not is_decision_point(op):
            if op.name == "rev" and op.results[0] in self.layout.held:
                self._around[op.results[0]] = op, args[0]
            results = _compat.bind(op.eqn, op.eqn.params, *args)
            return self.near_state(op, results)
        rule = op.rule
        assert rule is not None
        plan = strategy(self.layout, op, self.flops_per_byte)
        wants = [result_spec(self.layout, op, v) for v in op.results]
        if declared(op):
            return run_sharded(op.eqn.params, self.mesh, [plan.spec(d) for d in rule.operands], wants, *args)
        if runs_on_shards(op, plan, self.layout.mesh):
            cut, avals = cut_of(plan, self.layout.mesh), [v.aval for v in op.eqn.outvars]
            return run_on_shards(rule, body_of(op.eqn, rule), avals, self.mesh, cut, wants, *args)
        if not constrained(op):
            return self.near_state(op, _compat.bind(op.eqn, op.eqn.params, *args))
        if op.name in ADDRESSED and args[1].dtype.itemsize < 4:
            args = [args[0], args[1].astype("int32"), *args[2:]]  # XLA's partitioner aborts on narrower indices
        if op.name not in REDUCTIONS:
            args = [self.moved(x, plan.spec(d), v) for x, d, v in zip(args, rule.operands, op.operands, strict=True)]
        if is_product(op) and wants[0] != plan.spec(rule.results[0]):
            return [unfolded(op, self.constrain(product(op, *args), folded(op, wants[0])))]
        results = _compat.bind(op.eqn, op.eqn.params, *args)
        if op.name not in REDUCTIONS:
            results = [
                x if comes_straight(self.layout, op, plan, r, want) else self.constrain(x, plan.spec(rule.results[r]))
                for r, (x, want) in enumerate(zip(results, wants, strict=True))
            ]
        return [self.constrain(x, w) for x, w in zip(results, wants, strict=True)]

    def own_constraint(self, op: Op, x: Any) -> list[Any]:
        """A constraint that the program brought along, on this mesh."""
        return [self.as_written(x, op.eqn.params["sharding"])]

    def as_written(self, x: Any, sharding: Any) -> Any:
        """`x` with a sharding that the program wrote on it, on this mesh; as it is where nothing was written."""
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, sharding.spec))

    def near_state(self, op: Op, results: list[Any]) -> list[Any]:
        """Keeps a stored parameter where it is stored through its cast to the compute type.

        One that was gathered before its loop stays so when it gets more dimensions: XLA would cut it again.
        """
        layout = self.layout
        if op.name == "convert_element_type" and op.results[0] in layout.held:
            return [self.constrain(results[0], operand_spec(layout, op.results[0]))]
        if op.name in ("broadcast_in_dim", "reshape"):
            taken = op.operands[0]
            if taken in layout.held and layout.early(taken):
                return [self.constrain(results[0], layout.spec(op.results[0]))]
        return results

    def nested(self, op: Op, args: list[Any]) -> list[Any]:
        """The results of control flow or of a call."""
        params, name = op.eqn.params, op.name
        if name == "scan":
            return self.scan(op, args)
        if name == "while":
            return self.loop(op, args)
        if name == "cond":
            return lax.switch(args[0], [self.function(b) for b in op.blocks], *args[1:])
        if name == "jit":
            args = list(map(self.as_written, args, params["in_shardings"]))
            return list(map(self.as_written, self.block(op.blocks[0], args), params["out_shardings"]))
        if name in ("call", "closed_call", "eval_jaxpr"):
            return self.block(op.blocks[0], args)
        if name == "custom_linear_solve":
            return self.solve(op, args)
        if name == "call_hi_primitive":
            return list(_compat.differentiated_as(op.eqn, self.function(op.blocks[0]))(*args))
        inner = op.blocks[0]
        traced = jax.make_jaxpr(self.function(inner))(*args)
        if name in ("remat2", *_COUNTED):
            bare, consts = _compat.split_constants(traced)
            if name in _COUNTED:
                params = {**params, _COUNTED[name]: params[_COUNTED[name]] + len(consts)}
                bare = _compat.close(bare, [])
            return _compat.bind(op.eqn, {**params, inner.param: bare}, *consts, *args)
        return _compat.bind(op.eqn, {**params, inner.param: traced}, *args)

    def function(self, block: Block) -> Callable[..., list[Any]]:
        """A block as a function of its inputs."""
        return lambda *args: self.block(block, args)

    def solve(self, op: Op, args: list[Any]) -> list[Any]:
        """A linear solve with its solver rewritten; the products by which it is differentiated stay as they are."""
        taken = _compat.solve_operands(op.eqn)

        def solver(*some: Any) -> list[Any]:
            given = dict(zip(taken, some, strict=True))
            return self.block(op.blocks[0], [given.get(i, x) for i, x in enumerate(args)])

        jaxprs = op.eqn.params["jaxprs"]._replace(solve=jax.make_jaxpr(solver)(*(args[i] for i in taken)))
        return _compat.bind(op.eqn, {**op.eqn.params, "jaxprs": jaxprs}, *args)

    def scan(self, op: Op, args: list[Any]) -> list[Any]:
        """A scan with its body rewritten."""
        params = op.eqn.params
        n_consts, n_carry = _compat.scan_arity(params)
        consts, init = args[:n_consts], args[n_consts : n_consts + n_carry]
        xs = [
            self.constrain(x, self.layout.spec(v)) if self.layout.early(v) else x
            for x, v in zip(args[n_consts + n_carry :], op.operands[n_consts + n_carry :], strict=True)
        ]

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = self.block(op.blocks[0], [*consts, *carry, *x])
            return out[:n_carry], out[n_carry:]

        rest = {k: params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, init, xs, **rest)
        return [*carry, *ys]

    def loop(self, op: Op, args: list[Any]) -> list[Any]:
        """A while loop with its test and body rewritten.

        Bound again, not built by `lax.while_loop`: that refuses the test of a loop under `vmap`, one truth value a row.
        """
        params = op.eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        (test, of_test), (body, of_body) = map(self.rewritten, op.blocks)
        changed = {
            "cond_jaxpr": test, "cond_nconsts": n_cond + len(of_test),
            "body_jaxpr": body, "body_nconsts": n_body + len(of_body),
        }  # fmt: skip
        operands = [*of_test, *args[:n_cond], *of_body, *args[n_cond:]]
        return _compat.bind(op.eqn, {**params, **changed}, *operands)

    def rewritten(self, block: Block) -> tuple[Any, list[Any]]:
        """The closed jaxpr of a block with its constraints, and the constants that are its first inputs."""
        inputs = map(_compat.stand_in, _compat.open_jaxpr(block.jaxpr).invars)
        bare, consts = _compat.split_constants(jax.make_jaxpr(self.function(block))(*inputs))
        return _compat.close(bare, []), consts
