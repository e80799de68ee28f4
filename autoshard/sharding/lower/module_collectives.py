"""Collectives that are written out at some operators, as `overlap=` requests (`overlap.marks`).

A collective beside which no product may run gets a scheduling group of its own. XLA's schedulers keep the instructions
of a group together, so the collective ends before anything else starts. No dependence is added to other instructions.
Unlike a barrier, a group is an attribute of the instruction, and no option removes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec, sharded_factors, transposed_order
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.lower.constants import FIRST_SCHEDULING_GROUP
from autoshard.sharding.lower.products.ring_products import ring_product
from autoshard.sharding.overlap.marks import Marks, Ring, gathered_axes, marks_of
from autoshard.sharding.overlap.module_times import scope_of
from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.spmdrules.core.placement import Spec, to_partition_spec
from autoshard.spmdrules.custom_ops.sharded_execution import body_of, run_on_shards
from autoshard.spmdrules.ir.program import Op


class ModuleCollectives:
    """The explicit collectives of one program.

    Args:
        layout: the layout.
        mesh: the mesh of devices.
        overlap: the words of `overlap=`.
    """

    def __init__(self, layout: Layout, mesh: Any, overlap: ModuleOverlap):
        self.layout, self.mesh, self.overlap = layout, mesh, overlap
        self._groups = FIRST_SCHEDULING_GROUP

    def marks(self, op: Op, chosen: OperatorStrategy) -> Marks:
        """Return what changes at an operator."""
        return marks_of(self.overlap, self.layout, op, chosen)

    def alone(self, is_alone: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose collectives run alone."""
        if not is_alone:
            return contextlib.nullcontext()
        self._groups += 1
        return set_xla_metadata(_scheduling_group_id=str(self._groups))

    def scope(self, op: Op, array: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context that names the module of what an operator moves, so that an audit finds its collective."""
        name = scope_of(self.overlap, op, array)
        return jax.named_scope(name) if name else contextlib.nullcontext()

    def gathered(self, x: Any, stored: Spec, wanted: Spec, is_alone: bool) -> Any:
        """Return an array with the wanted sharding, gathered by an explicit collective."""

        def gather(shard: jax.Array) -> jax.Array:
            for dim, axes in gathered_axes(stored, wanted):
                with self.alone(is_alone):
                    shard = lax.all_gather(shard, axes, axis=dim, tiled=True)
            return shard

        ins, outs = to_partition_spec(stored), to_partition_spec(wanted)
        return jax.shard_map(gather, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)(x)

    def reduced(
        self, op: Op, chosen: OperatorStrategy, wants: Sequence[Spec], args: Sequence[Any], is_alone: bool
    ) -> list[Any]:
        """Return the results of an operator on shards; explicit collectives reduce them, which may have to run alone.

        A result that is only transposed is reduced in its transposed form. Otherwise XLA would transpose it before the
        collective, which then loses its attributes.
        """
        order = transposed_order(self.layout, op)
        return on_shards(self.layout, self.mesh, op, chosen, wants, args, order, lambda: self.alone(is_alone))

    def in_parts(self, op: Op, ring: Ring, chosen: OperatorStrategy, want: Spec, args: Sequence[Any]) -> Any:
        """Return the result of a product in parts."""
        rule = op.rule
        assert rule is not None
        specs = [chosen.spec(dims) for dims in rule.operands]
        if ring.array >= 0:
            specs[ring.array] = operand_spec(self.layout, op.operands[ring.array])
        result = want if ring.array < 0 else chosen.spec(rule.results[0])
        return ring_product(op, ring, self.mesh, args, specs, result)


def on_shards(
    layout: Layout,
    mesh: Any,
    op: Op,
    chosen: OperatorStrategy,
    wants: Sequence[Spec],
    args: Sequence[Any],
    order: tuple[int, ...] | None = None,
    reducing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[Any]:
    """Return the results of an operator on shards; explicit collectives reduce them.

    Args:
        layout: the layout.
        mesh: the mesh of devices.
        op: the operator.
        chosen: its strategy.
        wants: the wanted shardings of its results.
        args: its operands.
        order: the order of dimensions in which its only result is reduced; None keeps that of the result.
        reducing: makes the context of the collectives.
    """
    rule = op.rule
    assert rule is not None
    factors, body, avals = sharded_factors(chosen, layout.mesh), body_of(op.eqn, rule), [v.aval for v in op.eqn.outvars]
    if order is None or list(order) == sorted(order):
        return run_on_shards(rule, body, avals, mesh, factors, wants, *args, reducing=reducing)
    transposed = replace(rule, results=(tuple(rule.results[0][d] for d in order),))
    shape = jax.ShapeDtypeStruct(tuple(avals[0].shape[d] for d in order), avals[0].dtype)
    (result,) = run_on_shards(
        transposed, lambda shard, *shards: [lax.transpose(body(shard, *shards)[0], order)], [shape],
        mesh, factors, [tuple(wants[0][d] for d in order)], *args, reducing=reducing,
    )  # fmt: skip
    return [lax.transpose(result, [order.index(d) for d in range(len(order))])]


def scope(modules: ModuleCollectives | None, op: Op, array: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context that names the module of what an operator moves, if there is a table of `overlap=`."""
    return contextlib.nullcontext() if modules is None else modules.scope(op, array)


def before_loop(lowering: Any, x: Any, value: int) -> Any:
    """Return a stack of parameters, gathered before the loop over it.

    Args:
        lowering: the `Lowering` of the program.
        x: the stack.
        value: its number.
    """
    stored, wanted, modules = operand_spec(lowering.layout, value), lowering.layout.spec(value), lowering.modules
    if modules is not None and modules.overlap.gathers_alone(value) and gathered_axes(stored, wanted):
        return modules.gathered(x, stored, wanted, True)
    return lowering.constrain(x, wanted)
