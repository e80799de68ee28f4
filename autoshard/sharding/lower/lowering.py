"""Writes a layout into a program: evaluates its jaxpr again and adds sharding constraints at decision points.

Operands and results of contractions, gathers, scatters and reductions are constrained. Some activations are also
constrained to their own shardings before an operator reshards them (`pinned_operands`), and some parameters to those in
which an elementwise operator uses them (`gathered_operands`). A stored parameter is constrained in the narrower of its
stored and its compute dtype: after a cast to bfloat16, before one to float32. XLA propagates shardings to all other
values. With more constraints, it would keep gathered activations for the gradients. Loops, branches and calls are
rewritten in place. Source lines and name scopes are kept. On TPUs, some values wait for gradients (`tpu.barriers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from autoshard import _compat
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.loop_gathers import OPEN_CALLS, Gather, is_parameter
from autoshard.sharding.layout.operator_sharding import (
    can_constrain_at_once,
    operand_spec,
    order_of_scatter,
    pinned_operands,
    runs_on_shards,
    strategy_in_layout,
    written_spec,
)
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.lower.activation_spread import operand_path, reduced_spec, with_planned_rows
from autoshard.sharding.lower.declared_operators import run_declared
from autoshard.sharding.lower.gathers.gather_order import GatherOrder
from autoshard.sharding.lower.gathers.operand_gathers import gathered_operands
from autoshard.sharding.lower.gathers.prefetched_layers import LayerPrefetch
from autoshard.sharding.lower.gathers.prefetched_scan import early_gathers, prefetched_scan
from autoshard.sharding.lower.gathers.scattered_rows import ScatteredRows
from autoshard.sharding.lower.layer_exchange import exchanged_layers
from autoshard.sharding.lower.merged_rows import reshaped_rows
from autoshard.sharding.lower.module_collectives import ModuleCollectives, before_loop, on_shards, scope
from autoshard.sharding.lower.products.scattered_products import scattered_product
from autoshard.sharding.lower.products.sums_on_shards import sums_on_shards
from autoshard.sharding.lower.tpu.barriers import Barriers
from autoshard.sharding.lower.tpu.host_stacks import scan_with_host_stacks
from autoshard.sharding.lower.tpu.stack_layouts import pinned_results, pinned_slices
from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.overlap.marks import Marks
from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.sharding.plan.gather_words import SEQUENTIAL
from autoshard.sharding.program.operator_kinds import INDEXED, REDUCTIONS, constrained, is_decision_point, is_declared
from autoshard.spmdrules.core.placement import Spec, to_partition_spec
from autoshard.spmdrules.ir.program import IMPLEMENTATION, Block, Op

# Calls that take the constants of their jaxpr as first operands, and the parameter with the number of constants.
_CONSTANT_COUNTS = {"linear_call": "num_callee_consts", "remat_opt": "num_consts"}


class Lowering:
    """Evaluates a program with the sharding constraints of a layout on a mesh of devices.

    Args:
        layout: the layout.
        mesh: the mesh.
        link_prices: what bytes on the links of the target cost.
        gather: the order of gathers of parameters, see `ShardingPlan`.
        early: the parameters that are gathered one layer early (`StepCost.early`).
        overlap: the words of `overlap=`, if there are any.
        tpu: the target's device, if the program is compiled for TPUs.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Any,
        link_prices: LinkPrices,
        *,
        gather: str = "",
        early: frozenset[tuple[int, int]] = frozenset(),
        overlap: ModuleOverlap | None = None,
        tpu: Chip | None = None,
    ):
        self.layout, self.mesh, self.link_prices, self.tpu = layout, mesh, link_prices, tpu
        self.order = GatherOrder(mesh) if gather == SEQUENTIAL else None
        self.early, self.early_values = early, frozenset(v for number, v in early if number >= 0)
        self.layers: LayerPrefetch | None = None
        self.held: dict[Gather, Any] = {}  # the parameters that are gathered already, in the code that is lowered now
        self.kept: dict[int, Any] = {}  # stack in host memory -> its last slice, which stays on the device
        self.overlap, self.modules = overlap, ModuleCollectives(layout, mesh, overlap) if overlap is not None else None
        self.rows, self.barriers, self.constraints = ScatteredRows(self), Barriers(self), 0
        self._reversed: dict[int, tuple[Op, Any]] = {}  # reversed parameter -> its `rev` operator, and the operand

    def __call__(self, *args: Any) -> list[Any]:
        """Return the program's flat results for its flat inputs."""
        block = self.layout.axes.program.block
        if self.early:
            self.layers = LayerPrefetch(self, dict(zip(block.inputs, args, strict=True)))
        return self.block(block, args)

    def constrain(self, x: Any, spec: Spec) -> Any:
        """Return `x` constrained to `spec`; scalars and typed keys stay as they are."""
        if not getattr(x, "ndim", 0) or _compat.is_extended(x.dtype):
            return x
        self.constraints += 1
        return lax.with_sharding_constraint(x, self.sharding(x, to_partition_spec(spec)))

    def sharding(self, x: Any, spec: Any) -> NamedSharding:
        """Return a sharding on this mesh in the memory in which `x` is."""
        return NamedSharding(self.mesh, spec, memory_kind=_compat.memory_kind(x))

    def resharded(self, x: Any, spec: Spec, value: int, alone: bool | None = None) -> Any:
        """Return an operand constrained to `spec`. Scalars stay as they are; a number of Python has no dtype.

        A parameter that was cast to a wider dtype is resharded in the narrower one. A reversed parameter (a kernel in
        the gradient of its convolution) is resharded before it is reversed, so that all its convolutions share one
        gather. With `alone`, an explicit collective gathers it, which may have to run alone (`overlap.marks`).
        """
        narrow = self.layout.axes.transfer_dtype.get(value)
        if not getattr(x, "ndim", 0) or operand_spec(self.layout, value) == spec or Gather(value, spec) in self.held:
            return self.constrain(x, spec)
        if value in self._reversed:
            op, original = self._reversed[value]
            return _compat.bind(op.eqn, op.eqn.params, self.resharded(original, spec, op.operands[0], alone))[0]
        moved, before = x if narrow is None else x.astype(narrow), operand_spec(self.layout, value)
        if alone is not None and self.modules is not None:
            return self.modules.gathered(moved, before, spec, alone).astype(x.dtype)
        for step in operand_path(self.layout, value, spec):
            moved = self.constrain(moved, step)
        return moved.astype(x.dtype)

    def block(self, block: Block, args: Sequence[Any]) -> list[Any]:
        """Return the results of a block."""
        jaxpr = _compat.open_jaxpr(block.jaxpr)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, _compat.constants(block.jaxpr), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _compat.Literal) else env[atom]

        for op in block.ops:
            if self.rows.waits(op):
                continue
            if self.layers is not None:
                self.layers.before(op)
            self.barriers.before(op, env)
            with _compat.source_of(op.eqn):
                for i, spec in pinned_operands(self.layout, op, block, self.link_prices).items():
                    env[op.eqn.invars[i]] = self.constrain(read(op.eqn.invars[i]), spec)
                results = self.rows(op, read) or self.op(op, [read(a) for a in op.eqn.invars])
            if self.layers is not None:
                self.layers.after(op, results)
            env.update(zip(op.eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def op(self, op: Op, args: list[Any]) -> list[Any]:
        """Return the results of one operator."""
        if op.blocks:
            return self.nested(op, args)
        if op.name == "sharding_constraint":
            return [self.with_user_sharding(args[0], op.eqn.params["sharding"])]
        if op.name == "device_put":
            return list(map(_compat.put_in_memory_of, pinned_results(self, op, args), op.eqn.params["devices"]))
        if not is_decision_point(op):
            if op.name == "rev" and op.results[0] in self.layout.aliased_inputs:
                self._reversed[op.results[0]] = op, args[0]
            for i, spec in gathered_operands(self.layout, op).items():
                args[i] = self.resharded(args[i], spec, op.operands[i])
            results = reshaped_rows(self.layout, op, args) or _compat.bind(op.eqn, op.eqn.params, *args)
            if op.name == "convert_element_type":
                self.cast(args[0], results[0])
            return self.constrain_like_parameter(op, results)
        chosen = strategy_in_layout(self.layout, op, self.link_prices)
        wants = [written_spec(self.layout, op, v) for v in op.results]
        specs = [*map(chosen.spec, chosen.rule(op).operands)]
        if self.held and op.name not in REDUCTIONS:
            args = [self.held.get(Gather(v, s), x) for x, v, s in zip(args, op.operands, specs, strict=True)]
        if self.order is None or op.name in REDUCTIONS:
            return self.decision_point(op, args, chosen, wants)
        gathered = [self.is_gather(v, s) for v, s in zip(op.operands, specs, strict=True)]
        args = [
            self.order.after_last_but_one(x, operand_spec(self.layout, v)) if gather else x
            for x, v, gather in zip(args, op.operands, gathered, strict=True)
        ]
        results = self.decision_point(op, args, chosen, wants)
        if any(gathered):
            self.order.used(results, wants)
        return results

    def cast(self, before: Any, after: Any) -> None:
        """Let gathers that wait for a result wait for its cast instead (`GatherOrder.cast`)."""
        if self.order is not None:
            self.order.cast(before, after)
        if self.layers is not None:
            self.layers.cast(before, after)

    def is_gather(self, value: int, spec: Spec) -> bool:
        """Whether an operand that needs this sharding is a parameter that is stored in another one."""
        return self.is_parameter(value) and operand_spec(self.layout, value) != spec

    def is_parameter(self, value: int) -> bool:
        """Whether a value is a parameter, or a slice or a cast of one, whose gathers have an order."""
        is_free = self.overlap is not None and self.overlap.source(value) in self.overlap.free
        return is_parameter(self.layout.axes, self.layout.roles, value) and not is_free

    def computed(self, ops: Sequence[Op], values: dict[int, Any]) -> dict[int, Any]:
        """Return values by their numbers, with the results of these operators."""
        values = {**values}
        for op in ops:
            atoms = zip(op.eqn.invars, op.operands, strict=True)
            args = [atom.val if isinstance(atom, _compat.Literal) else values[v] for atom, v in atoms]
            with _compat.source_of(op.eqn):
                values.update(zip(op.results, self.op(op, args), strict=True))
        return values

    def gathered(self, x: Any, gather: Gather) -> Any:
        """Return a stored parameter, gathered, in the type in which collectives move it."""
        narrow = self.layout.axes.transfer_dtype.get(gather.value)
        if narrow is None or gather.value in self._reversed:
            return self.resharded(x, gather.spec, gather.value)
        return self.constrain(x.astype(narrow), gather.spec)

    @contextlib.contextmanager
    def holding(self, held: Mapping[Gather, Any]) -> Iterator[None]:
        """Use these gathered parameters in the code that is lowered in this context, and no others."""
        outside, self.held = self.held, {**held}
        try:
            yield
        finally:
            self.held = outside

    def decision_point(self, op: Op, args: list[Any], chosen: OperatorStrategy, wants: Sequence[Spec]) -> list[Any]:
        """Return the results of an operator for which the layout has a strategy, with their wanted shardings."""
        assert (rule := op.rule) is not None
        marks = self.modules.marks(op, chosen) if self.modules is not None else Marks()
        for i, alone in marks.gathers.items():
            with scope(self.modules, op, i):
                args[i] = self.resharded(args[i], chosen.spec(rule.operands[i]), op.operands[i], alone)
        with scope(self.modules if constrained(op) else None, op, marks.ring_array):
            return self.product(op, args, chosen, wants, marks)

    def product(self, op: Op, args: list[Any], chosen: OperatorStrategy, wants: Sequence[Spec], marks: Marks) -> Any:
        """Return the results of an operator for which the layout has a strategy; `marks` says what is gathered."""
        assert (rule := op.rule) is not None
        if is_declared(op):
            return run_declared(self, op, chosen, wants, args)
        if runs_on_shards(op, chosen, self.layout.mesh):
            return on_shards(self.layout, self.mesh, op, chosen, wants, args)
        if (layers := exchanged_layers(self.layout, op, chosen, args, wants, self.constrain)) is not None:
            return layers
        if not constrained(op):
            return self.constrain_like_parameter(op, _compat.bind(op.eqn, op.eqn.params, *args))
        if op.name in INDEXED and args[1].dtype.itemsize < 4:
            args = [args[0], args[1].astype("int32"), *args[2:]]  # XLA's partitioner aborts on narrower indices
        if op.name not in REDUCTIONS:
            for i, (x, d, v) in enumerate(zip(args, rule.operands, op.operands, strict=True)):
                if i not in marks.gathers and i != marks.ring_array:
                    with scope(self.modules, op, i):
                        args[i] = self.resharded(x, chosen.spec(d), v)
        elif (spec := reduced_spec(self.layout, op, wants[0])) is not None:
            args[0] = self.constrain(args[0], spec)
        if self.modules is not None and marks.reduces:
            return self.modules.reduced(op, chosen, wants, args, marks.alone)
        order = order_of_scatter(self.layout, op, chosen, wants[0])
        if order is not None or sums_on_shards(self.layout, op, chosen):
            return on_shards(self.layout, self.mesh, op, chosen, wants, args, order)
        if self.modules is not None and marks.ring is not None:
            return [self.constrain(self.modules.in_parts(op, marks.ring, chosen, wants[0], args), wants[0])]
        if (product := scattered_product(self.layout, op, args, chosen, wants[0], self.constrain)) is not None:
            return [product]
        results = _compat.bind(op.eqn, op.eqn.params, *args)
        if op.name not in REDUCTIONS:
            results = [
                x if can_constrain_at_once(self.layout, op, chosen, r, want) else self.constrain(x, chosen.spec(dims))
                for r, (x, want, dims) in enumerate(zip(results, wants, rule.results, strict=True))
            ]
        return [self.constrain(x, w) for x, w in zip(results, wants, strict=True)]

    def with_user_sharding(self, x: Any, sharding: Any) -> Any:
        """Return `x` constrained to a sharding that the user's program contains, on this mesh."""
        is_placed = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
        return lax.with_sharding_constraint(x, self.sharding(x, sharding.spec)) if is_placed else x

    def constrain_like_parameter(self, op: Op, results: list[Any]) -> list[Any]:
        """Return the results of an operator; casts and reshapes of parameters are constrained like the parameter.

        A cast keeps the stored sharding, and so do joined weights and chunks over which a loop runs. What was gathered
        before its loop stays gathered. A sum that is reduced after its loop keeps its computed sharding; otherwise XLA
        would reduce it in the loop. Other values have no constraint, so that XLA gathers each of them once.
        """
        if (layout := self.layout).roles.loop_sums and op.results and op.results[0] in layout.roles.loop_sums:
            return [self.constrain(results[0], layout.spec(op.results[0]))]
        if op.name == "convert_element_type" or layout.roles.joined.join_of(op) is not None:
            stored = [operand_spec(layout, v) if v in layout.aliased_inputs else None for v in op.results]
            return [x if s is None else self.constrain(x, s) for x, s in zip(results, stored, strict=True)]
        if op.name in ("broadcast_in_dim", "reshape", "transpose"):
            source, result, staged = op.operands[0], op.results[0], layout.axes.layer_dims
            is_alias = result in layout.aliased_inputs and result not in layout.roles.computed_weights
            if is_alias and not layout.is_gathered_before_loop(result):
                return [self.constrain(results[0], operand_spec(layout, result))]
            if layout.is_gathered_before_loop(source) and (source in layout.aliased_inputs or result in staged):
                return [self.constrain(results[0], layout.spec(result))]
        return results

    def nested(self, op: Op, args: list[Any]) -> list[Any]:
        """Return the results of control flow or of a call."""
        params, name = op.eqn.params, op.name
        if (own := {"scan": self.scan, "while": self.loop, "custom_linear_solve": self.solve}.get(name)) is not None:
            return own(op, args)
        if name == "cond":
            return lax.switch(args[0], [self.function(b) for b in op.blocks], *args[1:])
        if name == "jit":
            args = list(map(self.with_user_sharding, args, params["in_shardings"]))
            return list(map(self.with_user_sharding, self.block(op.blocks[0], args), params["out_shardings"]))
        if name in ("call", "closed_call", "eval_jaxpr"):
            return self.block(op.blocks[0], args)
        if name == "call_hi_primitive":
            return list(_compat.with_derivative_of(op.eqn, self.function(op.blocks[0]))(*args))
        inner = op.blocks[0]
        if inner.param == IMPLEMENTATION:  # its library defines how it is differentiated and mapped, so it is kept
            return _compat.bind(op.eqn, params, *args)
        args = self.after_uses(op, args)
        with self.holding(self.held if name in OPEN_CALLS else {}):
            traced = jax.make_jaxpr(self.function(inner))(*args)
        if name in ("remat2", *_CONSTANT_COUNTS):
            bare, consts = _compat.split_constants(traced)
            if name in _CONSTANT_COUNTS:
                params = {**params, _CONSTANT_COUNTS[name]: params[_CONSTANT_COUNTS[name]] + len(consts)}
                bare = _compat.close(bare, [])
            return _compat.bind(op.eqn, {**params, inner.param: bare}, *consts, *args)
        return _compat.bind(op.eqn, {**params, inner.param: traced}, *args)

    def after_uses(self, op: Op, args: list[Any]) -> list[Any]:
        """Return the operands of a body. Stored parameters among them wait for the last use before the body."""
        if self.order is None or not self.order.has_uses:
            return args
        return [
            self.order.after_last(x, operand_spec(self.layout, v)) if self.is_parameter(v) else x
            for x, v in zip(args, op.operands, strict=True)
        ]

    def function(self, block: Block) -> Callable[..., list[Any]]:
        """Return a block as a function of its inputs, for a trace of its own."""
        apart = self.order.apart if self.order is not None else contextlib.nullcontext

        def run(*args: Any) -> list[Any]:
            with apart():
                return self.block(block, args)

        return run

    def solve(self, op: Op, args: list[Any]) -> list[Any]:
        """Return the results of a linear solve with a rewritten solver. Products for its gradients do not change."""
        solver_operands = _compat.solve_operands(op.eqn)

        def solver(*operands: Any) -> list[Any]:
            replaced = dict(zip(solver_operands, operands, strict=True))
            return self.function(op.blocks[0])(*(replaced.get(i, x) for i, x in enumerate(args)))

        jaxprs = op.eqn.params["jaxprs"]._replace(solve=jax.make_jaxpr(solver)(*(args[i] for i in solver_operands)))
        return _compat.bind(op.eqn, {**op.eqn.params, "jaxprs": jaxprs}, *args)

    def scan(self, op: Op, args: list[Any]) -> list[Any]:
        """Return the results of a scan with a rewritten body."""
        n_consts, n_carry = _compat.scan_arity(op.eqn.params)
        consts, init = args[:n_consts], args[n_consts : n_consts + n_carry]
        xs = [
            before_loop(self, x, v) if self.layout.is_gathered_before_loop(v) else x
            for x, v in zip(args[n_consts + n_carry :], op.operands[n_consts + n_carry :], strict=True)
        ]
        if self.early and (found := early_gathers(self.layout, op, self.link_prices, self.early_values)).gathers:
            return prefetched_scan(self, op, found, consts, init, xs)

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            x = pinned_slices(self, op, n_consts + n_carry, x)
            carry = with_planned_rows(self.layout, op.operands[n_consts:], carry, self.constrain)
            out = self.function(op.blocks[0])(*consts, *carry, *x)
            return out[:n_carry], out[n_carry:]

        return [part for parts in scan_with_host_stacks(self, op, body, init, xs) for part in parts]

    def loop(self, op: Op, args: list[Any]) -> list[Any]:
        """Return the results of a while loop. `lax.while_loop` would refuse a condition with a value for each row."""
        params = op.eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        (cond, cond_consts), (body, body_consts) = map(self.rewritten, op.blocks)
        changed = {
            "cond_jaxpr": cond, "cond_nconsts": n_cond + len(cond_consts),
            "body_jaxpr": body, "body_nconsts": n_body + len(body_consts),
        }  # fmt: skip
        return _compat.bind(op.eqn, {**params, **changed}, *cond_consts, *args[:n_cond], *body_consts, *args[n_cond:])

    def rewritten(self, block: Block) -> tuple[Any, list[Any]]:
        """Return the closed jaxpr of a block with constraints, and the constants that are its first inputs."""
        inputs = map(_compat.shape_dtype_of, _compat.open_jaxpr(block.jaxpr).invars)
        bare, consts = _compat.split_constants(jax.make_jaxpr(self.function(block))(*inputs))
        return _compat.close(bare, []), consts
