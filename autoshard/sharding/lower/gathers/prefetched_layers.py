"""Written-out layers that gather parameters while the layer before them computes: `gather="prefetch"`.

Early gathers (`cost.gathers.early_gathers`) are placed outside of rematerialized parts of the program, because such a
part starts only when it has all its operands. Where no loop forces an order, compilers may gather parameters much
earlier than they are needed, and then hold many of them. So the early gathers of a layer have a data dependence
(`gather_order`) on the input of the layer before it, and on nothing later. The compiler schedules all other gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.sharding.layout.loop_gathers import Gather, ancestors, gathers_of, operators
from autoshard.sharding.layout.operator_sharding import operand_spec, result_spec
from autoshard.sharding.layout.unrolled_layers import Stage, stages_of
from autoshard.sharding.lower.body_lowering import BodyLowering
from autoshard.sharding.lower.gathers.gather_order import after, has_bits
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Op


class LayerPrefetch:
    """The layers of a program that is lowered now.

    Args:
        lowering: lowers the program.
        inputs: the inputs of the program by their numbers.
    """

    def __init__(self, lowering: BodyLowering, inputs: dict[int, Any]):
        self.lowering, self.inputs = lowering, inputs
        axes = lowering.layout.axes
        self.stages = stages_of(axes, lowering.layout.roles)
        self._first = {id(stage.sites[0].op): n for n, stage in enumerate(self.stages)}
        self._last = {id(stage.sites[-1].op): n for n, stage in enumerate(self.stages)}
        self._ended: list[tuple[Any, Spec] | None] = []  # for each stage so far, a value that its last operator returns
        self._made = {
            v: (number, op)
            for number, (op, _) in enumerate(operators(axes.program.block))
            if not op.blocks
            for v in op.results
        }

    def before(self, op: Op) -> None:
        """Gather the parameters of the stage that begins with this operator, if one does."""
        number = self._first.get(id(op))
        if number is not None:
            self.lowering.held = self._gathered(self.stages[number], number)

    def after(self, op: Op, results: Sequence[Any]) -> None:
        """Free the gathered parameters of the stage that ends with this operator, if one does."""
        if id(op) not in self._last:
            return
        self.lowering.held = {}
        axes, batch = self.lowering.layout.axes, self.lowering.layout.roles.batch
        found = [(x, v) for x, v in zip(results, op.results, strict=True) if has_bits(x)]
        activations = [(x, v) for x, v in found if any(batch in dim for dim in axes.of_value[v])]
        x, v = next(iter([*activations, *found]), (None, -1))
        self._ended.append(None if x is None else (x, result_spec(self.lowering.layout, op, v)))

    def cast(self, before: Any, after: Any) -> None:
        """Let gathers wait for the cast of a result instead of the result itself (`GatherOrder.cast`)."""
        if self._ended and self._ended[-1] is not None and self._ended[-1][0] is before and has_bits(after):
            self._ended[-1] = after, self._ended[-1][1]

    def _gathered(self, stage: Stage, number: int) -> dict[Gather, Any]:
        """Return the gathered parameters of a stage. They wait until the stage before it has its input."""
        layout, prices = self.lowering.layout, self.lowering.link_prices
        earlier = self._ended[number - 2] if number > 1 else None
        found: dict[Gather, Any] = {}
        for gather in (each for site in stage.sites for op in site.users for each in gathers_of(layout, op, prices)):
            ops, ends = ancestors(gather.value, self._made, {*self.inputs})
            is_early = (-1 - number, gather.value) in self.lowering.early
            if gather in found or not is_early or not ends <= self.inputs.keys():
                continue
            shard = self.lowering.computed(ops, self.inputs)[gather.value]
            if earlier is not None and has_bits(shard):
                shard = after(self.lowering.mesh, shard, operand_spec(layout, gather.value), *earlier)
            wide = self.lowering.gathered(shard, gather).astype(shard.dtype)
            found[gather] = wide
        return found
