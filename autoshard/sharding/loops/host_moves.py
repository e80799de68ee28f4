"""Decides when a scan over layers moves slices of stacks in host memory on a TPU.

    fetched now     in the iteration that uses it, from the start of the iteration on
    fetched ahead   one iteration before; the carry of the scan holds the slice
    sent now        in the iteration that computes it

A slice is fetched now if it is needed in the second half of the iteration's FLOPs, else ahead. It is needed when the
first product or inner loop uses it or a value that other operators compute from it. Those operators can wait. A result
is sent now if it is computed in the first half of the FLOPs. XLA schedules the other sends. The bounds are
`FETCHED_NOW_FROM` and `SENT_NOW_UNTIL`.

Slices are fetched one after the other, in the order in which they are needed. If several are needed at the same time,
the smallest is fetched first. XLA schedules a loop body backward and gives each fetch more compute than it needs, so
little compute is left for the first fetches.

`lower.tpu.host_stacks` writes these moves into the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.loops.constants import FETCHED_NOW_FROM, SENT_NOW_UNTIL
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.flops import flops_of, matmul_flops
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.spmdrules.ir.program import Block, Op, inlined, users_of, walk


@shown
@dataclass(frozen=True)
class HostMoves:
    """When a scan moves slices. Numbers count the stacks that it slices, or its stacked results.

    Attributes:
        now: the stacks whose slices are fetched now, in this order.
        ahead: the stacks whose slices are fetched ahead, in this order.
        sent: the results that are sent now.
    """

    now: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()


def host_moves(op: Op, avals: Sequence[Any]) -> HostMoves:
    """Return when a scan moves slices. A slice that is also used in host memory is not moved.

    Args:
        op: the scan.
        avals: the aval of each value of the program.
    """
    n_consts, n_carry = _compat.scan_arity(op.eqn.params)
    block, count = op.blocks[0], n_consts + n_carry
    slices = [k for k, v in enumerate(block.inputs[count:]) if _compat.is_on_host(avals[v])]
    results = [k for k, v in enumerate(block.outputs[n_carry:]) if v >= 0 and _compat.is_on_host(avals[v])]
    if op.eqn.params["length"] < 2 or not (slices or results):
        return HostMoves()
    times = _Times(block)
    uses = {k: use for k in slices if (use := times.needed(block.inputs[count + k])) is not None}
    makes = {k: made for k in results if (made := times.made(block.outputs[n_carry + k])) is not None}
    sizes = {k: nbytes(avals[block.inputs[count + k]]) for k in uses}
    in_order, late = sorted(uses, key=lambda k: (uses[k], sizes[k])), times.total * FETCHED_NOW_FROM
    return HostMoves(
        tuple(k for k in in_order if uses[k] >= late),
        tuple(k for k in in_order if uses[k] < late),
        tuple(k for k in makes if makes[k] <= times.total * SENT_NOW_UNTIL),
    )


class _Times:
    """The times at which a block uses and computes values. A time is the number of FLOPs in the block before it."""

    def __init__(self, block: Block):
        self.ops, self.total, self.results = list(inlined(block)), 0.0, {*block.outputs}
        self.begin: dict[int, float] = {}  # id of an operator -> the FLOPs before it
        for op in self.ops:
            self.begin[id(op)] = self.total
            self.total += sum(flops_of(each) * each.trips for each in _with_nested(op))
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
        """Return when the device computes a value in host memory; None if the value does not come from the device."""
        maker = self.makers.get(value)
        if maker is None or not is_host_transfer(maker):
            return None
        before = maker.operands[maker.results.index(value)]
        source = self.makers.get(before)
        return 0.0 if source is None else self.begin[id(source)]


def _with_nested(op: Op) -> Iterable[Op]:
    yield op
    for block in op.blocks:
        yield from walk(block)
