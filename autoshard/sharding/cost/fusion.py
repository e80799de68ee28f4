"""What XLA reads from memory and writes to it: which operators run as one kernel.

A *kernel* is a contraction, a gather, a scatter, a reduction, a sort, ...; and what is elementwise and has to be
written: a loop's carried or stacked results, the program's results, operands of control flow. Other elementwise
operators (and those that only move or cut elements) run inside the kernels that take their results.

    reads(kernel)  = the written values behind its operands, each once
    writes(kernel) = its results that are written

On TPU a contraction computes elementwise operands itself, unless several take the same one: that is written once, in 16
bits, which is all that a product reads at its default precision. Convolutions compute it anew each, where it is made of
no more than one activation (a norm and `relu` behind a convolution). Nor is a contraction's result written where one
chain of elementwise operators leads from it to what is, with no loop on the way. Elsewhere contractions take their
operands from memory.

Elementwise kernels of one block that read something of their own shape in common (the moments and the parameter of an
optimizer's update) are one. What several take is written where it is made of as much again (a residual stream), unless
a function of it alone, its `relu`, is written for products. What is spread out from next to nothing (a mask) is made
anew in every loop and kernel. A slice is read, not what it is cut from; what is updated in place costs the update.

What is read soon after it was made, in one run of a block, may stay on the chip, if all such values that are alive with
it have room there: which ones are is found once, and each one's part of their bytes tells it for every layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.sharding.program.array_sizes import itemsize, nbytes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, is_decision_point
from autoshard.spmdrules.ir.program import Block, Op, Program, inlined

_CONVOLUTION = "conv_general_dilated"
_SLICES = ("slice", "dynamic_slice")
_IN_PLACE = ("dynamic_update_slice",)
_WHOLE = (
    "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "cholesky", "triangular_solve", "lu", "qr", "eigh",
    "svd", "pallas_call", "custom_call", "ffi_call", "rng_bit_generator", "select_and_scatter_add",
)  # fmt: skip

_BITS16 = 2  # bytes
_SOON = 64  # operators, after which what was made is not on the chip any more
_HEAVY = 2  # how many times a value that several take is read instead of being written
_LIGHT = 16  # how many times larger than what it is made of a value is that XLA makes anew at each use


@dataclass(eq=False)
class Kernel:
    """One kernel.

    Attributes:
        op: the operator that gives it its name and work; of elementwise ones the first.
        reads: the values that it reads.
        writes: the values that it writes.
    """

    op: Op
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def is_kernel(op: Op) -> bool:
    """Whether an operator is computed by itself, not inside those that take its result."""
    if op.rule is None or op.name in _SLICES:
        return False
    return is_decision_point(op) or op.name in _WHOLE or op.name in _IN_PLACE


@dataclass(frozen=True)
class Fusion:
    """What XLA makes of a program.

    Attributes:
        kernels: its kernels, by the identity of the operator that stands for each.
        written: values that lie in memory.
        narrow: value -> part of its bytes that is written, where it is kept in a narrower type than its own.
        near: values that are read only where they are made, in one run of a loop's body, and can stay on the chip:
            value -> its part of the bytes of all such that are alive with it when those are most.
    """

    kernels: dict[int, Kernel]
    written: frozenset[int]
    narrow: dict[int, float]
    near: dict[int, float] = field(default_factory=dict)


def _reads_memory(user: Op) -> bool:
    """Whether an operator takes its operands from memory only."""
    return bool(user.blocks) or user.name in _WHOLE or user.name in ("gather", "scatter", "scatter-add")


def fuse(program: Program, fuses_operands: bool) -> Fusion:
    """Groups the operators of a program into kernels.

    Args:
        program: the program.
        fuses_operands: whether contractions compute elementwise operands themselves (TPU).
    """
    finder = _Finder(program, fuses_operands)
    return Fusion(finder.found, frozenset(finder.memory), finder.narrow, finder.near)


class _Finder:
    def __init__(self, program: Program, fuses_operands: bool):
        self.program, self.fuses_operands = program, fuses_operands
        self.found: dict[int, Kernel] = {}
        self.narrow: dict[int, float] = {}
        self.near: dict[int, float] = {}
        self.ends: dict[int, Op] = {}  # contraction -> the operator behind it whose result it writes, by identity
        self.ended: set[int] = set()
        self.maker: dict[int, Op] = {}
        self.memory: set[int] = set()  # values that lie in memory
        self.behind: dict[int, frozenset[int]] = {}
        self.block(program.block)

    def block(self, block: Block) -> None:
        ops = list(inlined(block))
        users: dict[int, list[Op]] = {}
        for op in ops:
            self.maker.update(dict.fromkeys(op.results, op))
            for v in op.operands:
                users.setdefault(v, []).append(op)
        self.memory.update(v for v in block.inputs if v not in self.maker)
        outputs = set(block.outputs)
        for op in ops:
            if op.blocks or is_kernel(op) or op.name in _SLICES or outputs & set(op.results):
                self.memory.update(op.results)
            elif op.rule is not None:
                self.mark(op, users)
        loops = dict(zip(map(id, ops), itertools.accumulate(bool(op.blocks) for op in ops), strict=True))
        for op in ops:
            if op.name in CONTRACTIONS and not outputs & set(op.results):
                self.end(op, users, loops)
        self.behind.clear()
        stores: list[Op] = []
        for op in ops:
            for inner in op.blocks:
                self.block(inner)
            if is_kernel(op):
                self.found[id(op)] = self.kernel(op)
            elif op.rule is not None and op.name not in _SLICES and id(op) not in self.ended:
                stores += [op] if any(v in self.memory for v in op.results) else []
        self.stay(ops, users, outputs)
        for group in self.together(stores):
            writes = tuple(v for op in group for v in op.results)
            reads = self.sources(v for op in group for v in op.operands)
            self.found[id(group[0])] = Kernel(group[0], tuple(v for v in reads if v not in writes), writes)

    def stay(self, ops: Sequence[Op], users: Mapping[int, Sequence[Op]], outputs: set[int]) -> None:
        """Notes the values of a block that can stay on the chip, and how much of what is there is theirs."""
        when = {id(op): number for number, op in enumerate(ops)}
        change, lives = np.zeros(len(ops) + 1), {}
        for op in ops:
            for v in (set(op.results) & self.memory) - outputs:  # not all of the memory for each operator
                taken, first = users.get(v, ()), when[id(op)]
                last = max([first, *(when[id(u)] for u in taken)])
                if last - first <= _SOON and not any(u.blocks for u in taken):
                    size = nbytes(self.program.avals[v]) * self.narrow.get(v, 1.0)
                    lives[v] = first, last, size
                    change[first] += size
                    change[last + 1] -= size
        alive = np.cumsum(change)
        for v, (first, last, size) in lives.items():
            self.near[v] = size / most if (most := float(alive[first : last + 1].max())) else 1.0

    def mark(self, op: Op, users: Mapping[int, Sequence[Op]]) -> None:
        """Notes whether the result of an elementwise operator is written for those that take it."""
        taken = [u for v in op.results for u in users.get(v, ())]
        products = sum(u.name in CONTRACTIONS for u in taken)
        convolutions = sum(u.name == _CONVOLUTION for u in taken)
        if any(map(_reads_memory, taken)) or (products and not self.fuses_operands):
            if not self.is_light(op):
                self.memory.update(op.results)
        elif len(taken) > 1 and self.is_heavy(op):
            if not any(self.stands_for(u, op, users) for u in taken):
                self.memory.update(op.results)
        elif products > 1 and not self.is_light(op) and (products > convolutions or self.is_heavy(op)):
            self.memory.update(op.results)
            self.narrow.update({v: _BITS16 / n for v in op.results if (n := itemsize(self.program.avals[v])) > _BITS16})

    def stands_for(self, user: Op, op: Op, users: Mapping[int, Sequence[Op]]) -> bool:
        """Whether a function of this result alone, a sum's `relu`, is written for products: XLA does not write both."""
        if user.blocks or user.rule is None or is_kernel(user) or len(user.results) != 1:
            return False
        size = op.eqn.outvars[0].aval.size
        alone = all(v in op.results or self.program.avals[v].size < size for v in user.operands if v >= 0)
        products = sum(u.name in CONTRACTIONS for u in users.get(user.results[0], ()))
        return alone and products > 1 and user.eqn.outvars[0].aval.size == size

    def is_light(self, op: Op) -> bool:
        """Whether a result is spread out from next to nothing, such as a mask: XLA makes it anew in each loop."""
        whole = sum(nbytes(v.aval) for v in op.eqn.outvars)
        return sum(nbytes(self.program.avals[v]) for v in self.sources(op.results)) * _LIGHT < whole

    def is_heavy(self, op: Op) -> bool:
        """Whether it takes twice as much to read what a result is made of as to read it: a sum of two activations."""
        whole = sum(nbytes(v.aval) for v in op.eqn.outvars)
        return sum(nbytes(self.program.avals[v]) for v in self.sources(op.results)) >= _HEAVY * whole

    def end(self, op: Op, users: Mapping[int, Sequence[Op]], loops: Mapping[int, int]) -> None:
        """Follows the result of a contraction through elementwise operators to where it is written.

        Not past a loop: what the contraction is made of would have to wait for it. `loops` counts those before each
        operator, by identity.
        """
        (first,) = op.results
        value = first
        while len(taken := users.get(value, ())) == 1 and not taken[0].blocks and not is_kernel(taken[0]):
            (user,) = taken
            if loops[id(user)] != loops[id(op)]:
                break
            if user.rule is None or [v.aval.size for v in user.eqn.outvars] != [op.eqn.outvars[0].aval.size]:
                break
            value = user.results[0]
            if value in self.memory:
                if self.fuses_operands and id(user) not in self.ended:
                    self.memory.discard(first)
                    self.ends[id(op)] = user
                    self.ended.add(id(user))
                return
        if value != first:  # written where the chain ends, in its type
            narrow = itemsize(self.program.avals[value]) / itemsize(op.eqn.outvars[0].aval)
            if narrow < 1:
                self.narrow[first] = narrow

    def kernel(self, op: Op) -> Kernel:
        operands, writes = op.operands, op.results
        if op.name in _IN_PLACE:
            operands, writes = op.operands[1:2], op.operands[1:2]
        elif op.name == "gather":
            operands = (*op.operands[1:], *op.results)  # as many rows as it gives
        elif op.name.startswith("scatter"):
            operands, writes = (*op.operands[1:], op.operands[2]), (op.operands[2],)
        elif last := self.ends.get(id(op)):
            operands, writes = (*operands, *last.operands), last.results
        return Kernel(op, self.sources(operands), tuple(v for v in writes if v >= 0))

    def sources(self, values: Iterable[int]) -> tuple[int, ...]:
        """The values in memory from which others are computed."""
        found: set[int] = set()
        for v in values:
            found |= self.source(v)
        return tuple(sorted(found))

    def source(self, value: int) -> frozenset[int]:
        if value < 0:
            return frozenset()
        if value in self.memory or value not in self.maker:
            return frozenset({value})
        stack = [value]
        while stack:  # not by recursion: chains may be long
            v = stack[-1]
            waiting = [
                u for u in self.maker[v].operands
                if u >= 0 and u not in self.memory and u in self.maker and u not in self.behind
            ]  # fmt: skip
            if v not in self.behind and waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if v not in self.behind:
                own: set[int] = set()
                for u in self.maker[v].operands:
                    if u >= 0:
                        own |= {u} if u in self.memory or u not in self.maker else self.behind[u]
                self.behind[v] = frozenset(own)
        return self.behind[value]

    def together(self, stores: list[Op]) -> list[list[Op]]:
        """Elementwise operators that write, those in one list that read something of their own shape in common."""
        groups: list[list[Op]] = []
        of: dict[Any, int] = {}
        for op in stores:
            shape = op.eqn.outvars[0].aval.shape
            keys = [(shape, v) for v in self.sources(op.operands) if self.program.avals[v].shape == shape]
            at = next((of[k] for k in keys if k in of), None)
            if at is None:
                at = len(groups)
                groups.append([])
            groups[at].append(op)
            for k in (*keys, *((shape, v) for v in op.results)):
                of.setdefault(k, at)
        return groups
