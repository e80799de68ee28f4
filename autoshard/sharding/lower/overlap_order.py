"""Collectives that compute does not hide, as `overlap=` asks with "off" for a parameter.

An operator that gathers such a parameter, or that computes its gradient, starts after all earlier products have ended,
and no later product starts before it has ended. So nothing but elementwise operators is left to run beside its
collectives. As in `gather_order`, the order is a dependence of the data, which no compiler option removes: an operand
is combined with one element of earlier results, without a change of its bits.

For each value the products that it depends on are known, as a set of bits. An operand waits for the fewest results that
depend on all others, and only if it does not depend on them anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec, result_spec, strategy_in_layout
from autoshard.sharding.lower.gather_order import _BITS, _has_bits
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.sharding.plan.overlap_words import GATHER, OFF, REDUCE
from autoshard.sharding.program.operator_kinds import REDUCTIONS, is_decision_point
from autoshard.spmdrules.core.placement import Spec, to_partition_spec
from autoshard.spmdrules.ir.program import IMPLEMENTATION, Op

_INLINED = ("jit", "call", "closed_call", "eval_jaxpr")  # their operators are evaluated one by one
Evaluate = Callable[[Op, list[Any]], list[Any]]


@shown
@dataclass(frozen=True)
class Work:
    """A product, or a loop or call, that was evaluated.

    Attributes:
        result: one of its results.
        spec: the sharding of that result.
        bit: the bit that stands for it.
        needs: the bits of what it depends on, and its own.
    """

    result: Any
    spec: Spec
    bit: int
    needs: int


@dataclass
class Trace:
    """What was evaluated under one trace.

    Attributes:
        works: in order.
        needs: id of a value -> the value, and the bits of the works that it depends on.
        last: the last work that nothing may run beside.
    """

    works: list[Work] = field(default_factory=list)
    needs: dict[int, tuple[Any, int]] = field(default_factory=dict)
    last: Work | None = None

    def of(self, x: Any) -> int:
        """The bits of the works that a value depends on."""
        return self.needs[id(x)][1] if id(x) in self.needs else 0

    def uncovered(self, covered: int) -> list[Work]:
        """The fewest works that depend on all works without these."""
        found = []
        for work in reversed(self.works):
            if not work.bit & covered:
                found.append(work)
                covered |= work.needs
        return found


class OverlapOrder:
    """Evaluates the operators of a program such that compute does not hide the collectives of some parameters.

    Args:
        layout: the layout.
        mesh: the mesh of devices.
        link_prices: what bytes on the links of the target cost.
        overlap: the words of `overlap=`.
    """

    def __init__(self, layout: Layout, mesh: Any, link_prices: LinkPrices, overlap: ModuleOverlap):
        self.layout, self.mesh, self.link_prices, self.overlap = layout, mesh, link_prices, overlap
        self._trace = Trace()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Keep a body that has a trace of its own separate: values of another trace cannot be used."""
        outside, self._trace = self._trace, Trace()
        try:
            yield
        finally:
            self._trace = outside

    def run(self, evaluate: Evaluate, op: Op, args: list[Any]) -> list[Any]:
        """Return the results of an operator, which `evaluate` computes."""
        if op.blocks and op.name in _INLINED and op.blocks[0].param != IMPLEMENTATION:
            return evaluate(op, args)
        trace, needs = self._trace, 0
        for x in args:
            needs |= trace.of(x)
        is_work = bool(op.blocks) or (is_decision_point(op) and op.name not in REDUCTIONS)
        alone = self._alone(op)
        if alone:
            args = self._after_all(op, args, alone)
            needs = (1 << len(trace.works)) - 1
        elif is_work and trace.last is not None and not trace.last.bit & needs:
            args = self._after(op, args, [trace.last])
            needs |= trace.last.needs
        results = evaluate(op, args)
        found = next((i for i, x in enumerate(results) if _has_bits(x)), None)
        if (is_work or alone) and found is not None:
            bit = 1 << len(trace.works)
            needs |= bit
            trace.works.append(Work(results[found], self._result_spec(op, op.results[found]), bit, needs))
            trace.last = trace.works[-1] if alone else trace.last
        trace.needs.update((id(x), (x, needs)) for x in results)
        return results

    def _alone(self, op: Op) -> list[int]:
        """The operands that must wait until all earlier works have ended, if nothing may run beside an operator."""
        if op.name == "scan":
            gathered = self.overlap.operands(op, GATHER, OFF)
            return [i for i in gathered if self.layout.is_gathered_before_loop(op.operands[i])]
        if op.blocks or not is_decision_point(op):
            return []
        gathered, reduced = self.overlap.operands(op, GATHER, OFF), self.overlap.results(op, REDUCE, OFF)
        if not gathered and not reduced:
            return []
        moved = {move.array for move in strategy_in_layout(self.layout, op, self.link_prices).moves}
        found = [i for i in gathered if i in moved]
        return found or (self._smallest(op) if any(-1 - i in moved for i in reduced) else [])

    def _smallest(self, op: Op) -> list[int]:
        """The smallest operand that is computed, rather than an input; a list without elements if there is none."""
        values, aliases = self.layout.axes.program, self.layout.axes.parameter_aliases
        computed = [i for i, v in enumerate(op.operands) if v >= 0 and v not in aliases and v not in values.inputs]
        usable = [i for i in computed if _has_bits(op.eqn.invars[i].aval)]
        return sorted(usable, key=lambda i: op.eqn.invars[i].aval.size)[:1]

    def _after_all(self, op: Op, args: list[Any], positions: Sequence[int]) -> list[Any]:
        """Return the operands; some of them wait for the other operands and for all earlier works."""
        trace, args, others = self._trace, list(args), []
        covered = 0
        for i, (x, v) in enumerate(zip(args, op.operands, strict=True)):
            if i not in positions and v >= 0 and _has_bits(x) and self.overlap.source(v) == v:
                others.append((x, operand_spec(self.layout, v)))
                covered |= trace.of(x)
        others += [(work.result, work.spec) for work in trace.uncovered(covered)]
        for i in positions:
            args[i] = self._waiting(args[i], operand_spec(self.layout, op.operands[i]), others)
        return args

    def _after(self, op: Op, args: list[Any], works: Sequence[Work]) -> list[Any]:
        """Return the operands; one of them waits for these works."""
        args = list(args)
        for i in self._smallest(op):
            others = [(work.result, work.spec) for work in works]
            args[i] = self._waiting(args[i], operand_spec(self.layout, op.operands[i]), others)
        return args

    def _result_spec(self, op: Op, value: int) -> Spec:
        return result_spec(self.layout, op, value) if is_decision_point(op) else operand_spec(self.layout, value)

    def _waiting(self, x: Any, spec: Spec, others: Sequence[tuple[Any, Spec]]) -> Any:
        if not others or not _has_bits(x) or _compat.is_on_host(x):
            return x
        stored, specs = to_partition_spec(spec), [to_partition_spec(other) for _, other in others]
        return jax.shard_map(
            _after_elements, mesh=self.mesh, in_specs=(stored, *specs), out_specs=stored, check_vma=False
        )(x, *(other for other, _ in others))  # fmt: skip


def _after_elements(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Return `x`, computed from one element of each of the others too: the xor with t (t + 1) mod 2, which is 0."""
    t = jnp.uint32(0)
    for other in others:
        element = lax.slice(other, (0,) * other.ndim, (1,) * other.ndim).reshape(())
        t = t ^ lax.bitcast_convert_type(element, _BITS[element.dtype.itemsize]).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])
    return lax.bitcast_convert_type(bits ^ ((t * (t + 1)) & 1).astype(bits.dtype), x.dtype)
