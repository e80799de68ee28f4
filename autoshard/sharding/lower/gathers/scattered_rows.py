"""Joined sums of rows of the data (`axes.weights.joined_sums`), such as those of both ends of the edges of each node.

Their scatters run on shards, which add their partial sums. One collective reduces the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax import lax

from autoshard import _compat
from autoshard.sharding.axes.weights.joined_sums import JoinedSum, joined_sums
from autoshard.sharding.layout.operator_sharding import sharded_factors, strategy_in_layout, written_spec
from autoshard.spmdrules.core.rule import Shard
from autoshard.spmdrules.custom_ops.sharded_execution import body_of, run_on_shards
from autoshard.spmdrules.ir.program import Op


class ScatteredRows:
    """The scatters of rows of one program.

    Args:
        lowering: the `Lowering` of the program.
    """

    def __init__(self, lowering: Any):
        self.lowering, self.layout = lowering, lowering.layout
        found = joined_sums(self.layout.axes, self.layout.roles.rows) if lowering.overlap is None else []
        self._sums = {id(each.additions[-1]): each for each in found}
        self._waiting = {id(op) for each in found for op in (*each.scatters, *each.additions[:-1])}

    def waits(self, op: Op) -> bool:
        """Whether an operator is a term of a joined sum, which runs with the last addition of the sum."""
        return id(op) in self._waiting

    def __call__(self, op: Op, read: Callable[[Any], Any]) -> list[Any] | None:
        """Return the result of a joined sum, if the operator is its last addition; else None.

        Args:
            op: the operator.
            read: returns the value of a variable or literal of the block.
        """
        found = self._sums.get(id(op))
        if found is None:
            return None
        total = self._joined(found, read)
        others = [read(eqn.invars[i]) for eqn, i in found.others]
        return [lax.add(functools.reduce(lax.add, others), total) if others else total]

    def _joined(self, found: JoinedSum, read: Callable[[Any], Any]) -> Any:
        """Return the sum of the scatters."""
        first, last, lowering = found.scatters[0], found.scatters[-1], self.lowering
        assert (rule := first.rule) is not None
        chosen = strategy_in_layout(self.layout, first, lowering.link_prices)
        factors = sharded_factors(chosen, self.layout.mesh)
        if all(rule.partial(factor, 0) is None for factor in factors.values()):
            terms = [lowering.op(each, [read(v) for v in each.eqn.invars])[0] for each in found.scatters]
            return functools.reduce(lax.add, terms)
        with _compat.source_of(last.eqn):
            args = [
                lowering.resharded(read(atom), chosen.spec(dims), v)
                for each in found.scatters
                for atom, dims, v in zip(each.eqn.invars, rule.operands, each.operands, strict=True)
            ]
            bodies = [body_of(each.eqn, rule) for each in found.scatters]
            count = len(rule.operands)

            def run(shard: Shard, *shards: Any) -> Any:
                terms = [body(shard, *shards[n * count : (n + 1) * count]) for n, body in enumerate(bodies)]
                return functools.reduce(lax.add, terms)

            joint = replace(rule, operands=rule.operands * len(bodies), body=run)
            want, aval = written_spec(self.layout, last, last.results[0]), last.eqn.outvars[0].aval
            return run_on_shards(joint, run, [aval], lowering.mesh, factors, [want], *args)[0]
