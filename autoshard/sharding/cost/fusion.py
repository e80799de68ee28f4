"""What XLA reads from memory and writes to it: which operators run as one kernel.

A *kernel* is a contraction, a gather, a scatter, a reduction, a sort, ..., or an elementwise operator whose result must
be written: a loop's carried or stacked results, the program's results, operands of control flow and of declared
operators. Other elementwise operators, slices and other data movement run inside the kernels that take their results.

    reads(kernel)  = the written values from which its operands are computed, each once
    writes(kernel) = its results that are written

On TPU a contraction computes its elementwise operands itself. A value that several contractions of one pass take is
written once, in 16 bits, because at JAX's default precision products read only 16 bits. A product of the backward pass
that takes an operand of the forward pass, such as a norm, computes it again (`PASS_OPS`). A convolution also computes
an operand again if the operand's sources are not larger than one activation (a norm and `relu` after a convolution).
Patches of images are written once for the products of both passes (`is_rearranged`).

A contraction's kernel also computes the chain of elementwise operators after it, up to the first value that is written.
The contraction's own result is then not written. On TPU the chain may branch, if all branches lead to one written
value, as in the gradient of gelu. A loop ends the chain. If the chain reaches no written value, the result of the
contraction is written. There is one exception: a chain that computes in a wider type, and that reads only masks and
values broadcast from little data, writes its last value. An example is scores in float32 with a mask or a bias. On
platforms other than TPU, contractions read their operands from memory. TPUs write a sum that is only cast in the
narrower type (`narrowing_cast`).

A contraction's kernel also computes reductions of what it writes, such as the maximum of scores
(`kernels/absorbed_reductions.py`).

Elementwise kernels of one block are one kernel if they read the same value of their own shape, such as the moments and
the parameter of an optimizer's update. A value with several users is written if its sources have at least twice its
bytes (a residual stream), unless a function of it alone, such as its `relu`, is written for products. A value that is
broadcast from little data (a mask) is computed again in every kernel, and on TPU in every loop; elsewhere an operand of
a loop is written. The result of a slow function that both passes need, such as the `tanh` of a gelu on GPUs, is written
(`SLOW_OPS`), and a value that one kernel needs several times is not. A slice is read without the rest of its operand.
An update in place costs the bytes of the update. A scatter into zeros writes all of its result first. Moves to host
memory and back write their results. On TPU two more operators are kernels of their own (`is_strided_move`), such as
those of `lax.associative_scan`.

A value that is read soon, in the same run of its block, can stay in on-chip memory. Each such value gets a share of
that memory: its fraction of the bytes of all such values that are live with it and not larger (`on_chip`). It stays
there if its bytes on a device are at most its share. The shares are the same for every layout. Transfers between host
and device read and write the device's memory, not the on-chip memory.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.cost.constants import (
    BROADCAST_GROWTH,
    PASS_OPS,
    PRODUCT_OPERAND_BYTES,
    SLOW_OPS,
    WRITTEN_SOURCES,
)
from autoshard.sharding.cost.kernels.absorbed_reductions import ABSORBING, ReductionFinder
from autoshard.sharding.cost.kernels.kernel import Kernel
from autoshard.sharding.cost.kernels.kernel_kinds import (
    IN_PLACE,
    MOVES,
    SLICES,
    is_backward,
    is_kernel,
    is_rearranged,
    narrowing_cast,
    reads_memory,
)
from autoshard.sharding.cost.kernels.sources import Sources, readers
from autoshard.sharding.cost.on_chip import on_chip_shares, short_lives
from autoshard.sharding.program.array_sizes import itemsize, nbytes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, CONVOLUTION, is_strided_move
from autoshard.spmdrules.families.stacked.stages import read_p
from autoshard.spmdrules.families.weight_gathers import AROUND_LOOPS
from autoshard.spmdrules.ir.program import Block, Op, Program, inlined, users_of


@shown
@dataclass(frozen=True)
class Fusion:
    """The kernels of a program.

    Attributes:
        kernels: its kernels, by the `id` of `Kernel.op`.
        written: values that are stored in memory.
        narrow: value -> fraction of its bytes that is written, if it is written in a narrower dtype than its own, or as
            the end of a chain in a wider one.
        on_chip: values that are read only in the same run of their block and can stay in on-chip memory: value -> its
            share of that memory (`on_chip_shares`). Scalars are left out: they take no time in any memory, and their
            shares would tell apart operators that are equal.
        rounded: float32 operands of products that are gathered in 16 bits (`gathers.rounded_operands`).
    """

    kernels: dict[int, Kernel]
    written: frozenset[int]
    narrow: dict[int, float]
    on_chip: dict[int, float] = field(default_factory=dict)
    rounded: frozenset[int] = frozenset()


def fuse(
    program: Program,
    fuses_operands: bool,
    on_gpu: bool = False,
    views: frozenset[int] = frozenset(),
    sums: frozenset[int] = frozenset(),
) -> Fusion:
    """Group the operators of a program into kernels.

    Args:
        program: the program.
        fuses_operands: whether contractions compute their elementwise operands (TPU).
        on_gpu: whether the results of `SLOW_OPS` are written only if both passes need them.
        views: values that are another value under another shape (`reused_buffers.views`). They are not written.
        sums: sums over the batch (`Roles.gradients`). They are reduced over devices before anything reads them, so
            their products absorb no reductions.
    """
    finder = _Finder(program, fuses_operands, on_gpu, views, sums)
    return Fusion(finder.kernels, frozenset(finder.memory), finder.narrow, finder.on_chip)


class _Finder:
    def __init__(
        self, program: Program, fuses_operands: bool, on_gpu: bool, views: frozenset[int], sums: frozenset[int]
    ):
        self.program, self.fuses_operands, self.on_gpu = program, fuses_operands, on_gpu
        self.views, self.sums = views, sums
        self.slow_ops = SLOW_OPS["gpu" if on_gpu else "tpu" if fuses_operands else ""]
        self.is_strided_move = is_strided_move if fuses_operands else lambda _: False
        self.kernels: dict[int, Kernel] = {}
        self.narrow: dict[int, float] = {}
        self.on_chip: dict[int, float] = {}
        self.chain_ends: dict[int, Op] = {}  # id of a contraction -> the last operator of the chain that it computes
        self.chain_end_ids: set[int] = set()  # ids of the operators in `chain_ends`
        # `id` of a product -> its result as it is stored, and the reductions of the result that its kernel computes
        self.absorbed: dict[int, tuple[int, list[Op]]] = {}
        self.maker: dict[int, Op] = {}  # value -> the operator that makes it
        self.memory: set[int] = set()  # values that are stored in memory
        self.when: dict[int, int] = {}  # id of an operator of the block in work -> its place
        self.kernel_ids: set[int] = set()  # ids of the operators that are kernels, of all blocks so far
        self.shared: list[Op] = []  # operators of the block whose results are written because several others take them
        self.sources = Sources(self.memory, self.maker)
        self.visit(program.block)

    def visit(self, block: Block) -> None:
        ops = list(inlined(block))
        users = users_of(ops)
        for op in ops:
            for v in op.results:
                self.maker[v] = op
        self.memory.update(v for v in block.inputs if v not in self.maker)
        outputs = set(block.outputs)
        self.when = {id(op): number for number, op in enumerate(ops)}
        self.kernel_ids.update(id(op) for op in ops if is_kernel(op) or self.is_strided_move(op))
        for op in ops:
            if op.blocks or id(op) in self.kernel_ids or op.name in SLICES or not outputs.isdisjoint(op.results):
                self.memory.update(op.results)
            elif op.rule is not None:
                self.note_written(op, users)
        for op in reversed(self.shared) if self.on_gpu or self.fuses_operands else ():
            if len(self.kernels_of(op, users)) == 1:
                self.memory.difference_update(op.results)
        for op in ops:
            if op.name in self.slow_ops and self.is_needed_twice(op, users):
                self.memory.update(op.results)
        self.sources.clear()
        self.shared.clear()
        loops = dict(zip(map(id, ops), itertools.accumulate(bool(op.blocks) for op in ops), strict=True))
        for op in ops:
            if op.name in CONTRACTIONS and outputs.isdisjoint(op.results):
                self.find_chain_end(op, users, loops)
            elif self.fuses_operands and (cast := narrowing_cast(op, users)) and outputs.isdisjoint(op.results):
                self.end_chain(op, cast)
        self.sources.clear()
        absorbed = self.absorb_reductions(ops, users, loops, outputs) if self.fuses_operands else set[int]()
        stores: list[Op] = []
        for op in ops:
            for inner in op.blocks:
                self.visit(inner)
            if id(op) in self.kernel_ids:
                if op.name not in AROUND_LOOPS and id(op) not in absorbed:  # these are no kernels
                    self.kernels[id(op)] = self.make_kernel(op)
            elif op.rule is not None and op.name not in SLICES and id(op) not in self.chain_end_ids:
                stores += [op] if any(v in self.memory for v in op.results) else []
        stored = {v for op in ops for v in op.results}.intersection(self.memory) - outputs
        sizes = {v: nbytes(self.program.avals[v]) * self.narrow.get(v, 1.0) for v in stored}
        self.on_chip |= on_chip_shares(short_lives(ops, users, sizes), len(ops))
        for group in self.merged(stores):
            writes = tuple(v for op in group for v in op.results)
            reads = self.sources(v for op in group for v in op.operands)
            self.kernels[id(group[0])] = Kernel(group[0], tuple(v for v in reads if v not in writes), writes)

    def note_written(self, op: Op, users: Mapping[int, Sequence[Op]]) -> None:
        """Decide whether the result of an elementwise operator is written for its users."""
        if any(map(self.is_view, op.results)):
            return
        taken = [u for v in op.results for u in users.get(v, ())]
        products = sum(u.name in CONTRACTIONS for u in taken)
        convolutions = sum(u.name == CONVOLUTION for u in taken)
        reads = any(reads_memory(u) or self.is_strided_move(u) for u in taken)
        if reads or (products and not self.fuses_operands):
            if not self.is_broadcast(op) or (self.is_mask(op) and any(u.blocks for u in taken)):
                self.memory.update(op.results)
        elif len(taken) > 1 and self.has_large_sources(op) and not self.is_computed_by_passes(taken):
            if not any(self.is_written_instead(u, op, users) for u in taken):
                self.memory.update(op.results)
                self.shared.append(op)
        elif (
            products > 1
            and (self.products_in_one_pass(taken) > 1 or is_rearranged(op.results[0], self.maker))
            and not self.is_broadcast(op)
            and (products > convolutions or self.has_large_sources(op))
        ):
            self.memory.update(op.results)
            for v in op.results:
                if (size := itemsize(self.program.avals[v])) > PRODUCT_OPERAND_BYTES:
                    self.narrow[v] = PRODUCT_OPERAND_BYTES / size

    def is_view(self, value: int) -> bool:
        """Whether a value is another one in memory under another shape."""
        while value in self.views and value in self.maker:
            value = self.maker[value].operands[0]
            if value in self.memory:
                return True
        return False

    def kernels_of(self, op: Op, users: Mapping[int, Sequence[Op]]) -> list[Op]:
        """Return the kernels that compute from a result of an elementwise operator (`readers`)."""
        return readers(op.results, users, self.kernel_ids, self.memory)

    def is_needed_twice(self, op: Op, users: Mapping[int, Sequence[Op]]) -> bool:
        """Whether several kernels need a result of an elementwise operator; on GPUs, those of both passes."""
        kernels = self.kernels_of(op, users)
        if self.on_gpu:
            places = [self.when[id(each)] for each in kernels]
            return bool(places) and max(places) - min(places) > PASS_OPS
        return len(kernels) > 1

    def products_in_one_pass(self, taken: Sequence[Op]) -> int:
        """Return the largest number of products of one pass that take a value within `PASS_OPS` operators."""
        most, products = 0, [u for u in taken if u.name in CONTRACTIONS]
        backward = [self.fuses_operands and is_backward(u) for u in products]
        for one in {*backward}:
            when = sorted(self.when[id(u)] for u, other in zip(products, backward, strict=True) if other == one)
            most = max([most, *(bisect_right(when, first + PASS_OPS) - n for n, first in enumerate(when))])
        return most

    def is_computed_by_passes(self, taken: Sequence[Op]) -> bool:
        """Whether only products take a value, and at most one in each pass: each computes it (TPU)."""
        only_products = all(u.name in CONTRACTIONS and u.name != CONVOLUTION for u in taken)
        return self.fuses_operands and only_products and self.products_in_one_pass(taken) <= 1

    def is_written_instead(self, user: Op, op: Op, users: Mapping[int, Sequence[Op]]) -> bool:
        """Whether a user of this result alone, such as `relu`, is written for products. XLA does not write both."""
        if user.blocks or user.rule is None or id(user) in self.kernel_ids or len(user.results) != 1:
            return False
        size = op.eqn.outvars[0].aval.size
        alone = all(v in op.results or self.program.avals[v].size < size for v in user.operands if v >= 0)
        products = self.products_in_one_pass(users.get(user.results[0], ()))
        return alone and products > 1 and user.eqn.outvars[0].aval.size == size

    def is_broadcast(self, op: Op) -> bool:
        """Whether a result is broadcast from little data, such as a mask. XLA computes it again in each loop."""
        whole = sum(nbytes(v.aval) for v in op.eqn.outvars)
        return sum(nbytes(self.program.avals[v]) for v in self.sources(op.results)) * BROADCAST_GROWTH < whole

    def is_constant_or_mask(self, value: int) -> bool:
        """Whether a value is computed from masks, numbers and positions alone."""
        avals = self.program.avals
        return all(avals[v].dtype == bool or not avals[v].shape for v in self.sources([value]))

    def is_constant_or_little(self, value: int, user: Op) -> bool:
        """Whether an operand is a constant or mask, or broadcast from little data, such as a bias of scores."""
        whole = nbytes(user.eqn.outvars[0].aval)
        little = sum(nbytes(self.program.avals[v]) for v in self.sources([value])) * BROADCAST_GROWTH < whole
        return little or self.is_constant_or_mask(value)

    def is_mask(self, op: Op) -> bool:
        """Whether a broadcast result is written where it is an operand of a loop. XLA:TPU computes it in the loop."""
        repeats_scalar = op.name == "broadcast_in_dim" and not op.eqn.invars[0].aval.shape
        return not self.fuses_operands and not repeats_scalar

    def has_large_sources(self, op: Op) -> bool:
        """Whether the sources of a result have at least twice its bytes, such as a sum of two activations."""
        whole = sum(nbytes(v.aval) for v in op.eqn.outvars)
        return sum(nbytes(self.program.avals[v]) for v in self.sources(op.results)) >= WRITTEN_SOURCES * whole

    def find_chain_end(self, op: Op, users: Mapping[int, Sequence[Op]], loops: Mapping[int, int]) -> None:
        """Follow the result of a contraction through elementwise operators to the value that is written.

        The chain ends at a loop, because the contraction's operands would have to be kept until the loop ends. `loops`
        gives the number of loops before each operator, by its `id`.
        """
        (first,) = op.results
        value, computes, widens = first, False, self.fuses_operands
        while taken := users.get(value, ()):
            user = taken[0] if len(taken) == 1 else self.joined_end(value, op, users, loops)
            if user is None or not self.continues(op, user, loops):
                break
            widens = widens and all(self.is_constant_or_little(v, user) for v in user.operands if v != value)
            value = user.results[0]
            is_wider = itemsize(self.program.avals[value]) > itemsize(op.eqn.outvars[0].aval)
            computes = computes or (is_wider and user.name not in MOVES)
            if value in self.memory:
                if self.fuses_operands and id(user) not in self.chain_end_ids:
                    self.end_chain(op, user)
                return
        if value != first:  # the end of the chain is written, in its own dtype; not if it is a mere cast to a wider one
            narrow = itemsize(self.program.avals[value]) / itemsize(op.eqn.outvars[0].aval)
            if narrow < 1 or (computes and widens):
                self.narrow[first] = narrow

    def end_chain(self, op: Op, last: Op) -> None:
        """Let the kernel of an operator write the result of the last operator of a chain instead of its own."""
        self.memory.difference_update(op.results)
        self.memory.update(last.results)
        self.chain_ends[id(op)] = last
        self.chain_end_ids.add(id(last))

    def absorb_reductions(
        self, ops: Sequence[Op], users: Mapping[int, Sequence[Op]], loops: Mapping[int, int], outputs: set[int]
    ) -> set[int]:
        """Note in `absorbed` the reductions that the kernels of products compute, and return the `id`s of these."""
        ends = [op for op in ops if op.name in ABSORBING and op.results[0] not in self.sums]
        products = {self.chain_ends.get(id(op), op).results[0]: op for op in ends}
        products = {v: op for v, op in products.items() if v in self.memory}
        finder = ReductionFinder(self.program.avals, ops, users, self.kernel_ids, self.sources)
        found = finder(products, loops, outputs)
        self.absorbed |= {id(products[v]): (v, reductions) for v, reductions in found.reductions.items()}
        self.memory -= found.unstored
        self.sources.clear()
        return {id(op) for reductions in found.reductions.values() for op in reductions}

    def continues(self, op: Op, user: Op, loops: Mapping[int, int]) -> bool:
        """Whether the chain of elementwise operators after a contraction continues with an operator that takes it.

        Args:
            op: the contraction.
            user: the operator.
            loops: `id` of an operator -> the number of loops before it.
        """
        if user.blocks or id(user) in self.kernel_ids or user.rule is None or loops[id(user)] != loops[id(op)]:
            return False
        return [v.aval.size for v in user.eqn.outvars] == [op.eqn.outvars[0].aval.size]

    def joined_end(self, value: int, op: Op, users: Mapping[int, Sequence[Op]], loops: Mapping[int, int]) -> Op | None:
        """Return the operator at which several chains from a value end, if they join before they are written (TPU).

        An example is the gradient of gelu.
        """
        todo, seen, ends = [value], set[int](), list[Op]()
        while todo and self.fuses_operands:
            for user in users.get(todo.pop(), ()):
                if id(user) in seen:
                    continue
                seen.add(id(user))
                if not self.continues(op, user, loops):
                    return None
                if self.memory.isdisjoint(user.results):
                    todo += user.results
                else:
                    ends.append(user)
        return ends[0] if len(ends) == 1 else None

    def make_kernel(self, op: Op) -> Kernel:
        operands, writes = op.operands, op.results
        if op.name in IN_PLACE:
            operands = writes = op.operands[1:2]
        elif op.name in ("gather", read_p.name, "slice"):
            operands = (*op.operands[1:], *op.results)  # it reads as many rows as it returns
        elif op.name.startswith("scatter"):
            operands, writes = (*op.operands[1:], op.operands[2]), (op.operands[2],)
            if self.is_constant_or_mask(op.operands[0]):  # such as zeros, which are written first
                writes = (*writes, *op.results)
        elif last := self.chain_ends.get(id(op)):
            operands, writes = (*operands, *last.operands), last.results
        if id(op) not in self.absorbed:
            return Kernel(op, self.sources(operands), tuple(v for v in writes if v >= 0))
        value, reductions = self.absorbed[id(op)]
        reads = self.sources((*operands, *(each.operands[0] for each in reductions)))
        writes = (*(v for v in writes if v in self.memory), *(each.results[0] for each in reductions))
        return Kernel(op, tuple(v for v in reads if v not in writes), writes, value)

    def merged(self, stores: list[Op]) -> list[list[Op]]:
        """Group elementwise operators that store results of the same shape and read the same value of that shape."""
        groups: list[list[Op]] = []
        group_of: dict[Any, int] = {}
        for op in stores:
            shape = op.eqn.outvars[0].aval.shape
            keys = [(shape, v) for v in self.sources(op.operands) if self.program.avals[v].shape == shape]
            at = next((group_of[k] for k in keys if k in group_of), None)
            if at is None:
                at = len(groups)
                groups.append([])
            groups[at].append(op)
            for k in (*keys, *((shape, v) for v in op.results)):
                group_of.setdefault(k, at)
        return groups
