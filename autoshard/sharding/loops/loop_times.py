"""When the body of a loop uses and computes values of stacks in host memory."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.sharding.program.flops import flops_of, matmul_flops
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.spmdrules.ir.program import Op, inlined, users_of, walk


class LoopTimes:
    """The times at which the body of a scan uses and computes values: the FLOPs of an iteration before that.

    Attributes:
        total: the FLOPs of an iteration.
        products: the FLOPs of its products alone. Flags of JAX change the order of other operators only.
    """

    def __init__(self, scan: Op):
        block, trips = scan.blocks[0], scan.trips * scan.eqn.params["length"]
        self.ops, self.total, self.results = list(inlined(block)), 0.0, {*block.outputs}
        self.begin: dict[int, float] = {}  # id of an operator -> the FLOPs before it
        self.after: dict[int, float] = {}  # id of an operator -> the FLOPs of the products up to and including it
        self.products = 0.0
        for op in self.ops:
            self.begin[id(op)] = self.total
            self.total += sum(flops_of(each) * each.trips / trips for each in _with_nested(op)) if trips else 0.0
            inner = [each for each in _with_nested(op) if matmul_flops(each)]
            self.products += sum(flops_of(each) * each.trips / trips for each in inner) if trips else 0.0
            self.after[id(op)] = self.products
        self.users = users_of(self.ops)
        self.makers = {v: op for op in self.ops for v in op.results}
        self.needs: dict[int, float] = {}  # value -> when the first product takes it, or a value computed from it
        for op in reversed(self.ops):
            if op.blocks or matmul_flops(op):
                self.needs |= dict.fromkeys(op.operands, self.begin[id(op)])
            elif later := [self.needs[v] for v in op.results if v in self.needs]:
                self.needs |= {v: min(*later, self.needs.get(v, self.total)) for v in op.operands}

    def needed(self, value: int) -> float | None:
        """Return when a value is needed on the device; None if it is used in host memory, too, or nowhere.

        A value is needed by the first product, or operator with a block, that takes it or takes what other operators
        compute from it. Those can wait. If there is no such product, the value is needed at its first use.
        """
        users = self.users.get(value, [])
        if value in self.results or not all(map(is_host_transfer, users)):
            return None
        moved = [new for user in users for old, new in zip(user.operands, user.results, strict=True) if old == value]
        products = [self.needs[new] for new in moved if new in self.needs]
        return min(products or (self.begin[id(op)] for new in moved for op in self.users.get(new, [])), default=None)

    def made(self, value: int) -> float | None:
        """Return when the device begins to compute a value in host memory; None if it does not come from the device."""
        maker = self.makers.get(value)
        if maker is None or not is_host_transfer(maker):
            return None
        source = self._source(value)
        return 0.0 if source is None else self.begin[id(source)]

    def done(self, value: int) -> float:
        """Return the fraction of the products that run before the device has a value that it sends to the host."""
        source = self._source(value)
        return self.after[id(source)] / self.products if source is not None and self.products else 0.0

    def _source(self, value: int) -> Op | None:
        """Return the operator that computes, on the device, what a transfer sends; None if the body does not."""
        transfer = self.makers[value]
        return self.makers.get(transfer.operands[transfer.results.index(value)])


def _with_nested(op: Op) -> Iterable[Op]:
    yield op
    for block in op.blocks:
        yield from walk(block)
