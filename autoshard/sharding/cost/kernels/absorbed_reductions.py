"""Which reductions XLA:TPU computes in the kernel of a product.

The kernel of a product can also reduce its result, or elementwise functions of the result, before it writes anything to
memory. So the reduction does not read the result from memory. If only such reductions take the result, it is never
stored.

A kernel computes a reduction if

- the reduced dimensions are whole dimensions of the product's result. A reshape may not split them: the sum over 128
  of 4096 columns is a kernel of its own;
- no other operand depends on the product. Other arrays are read by the product's kernel. The sum of `exp(x - max(x))`
  needs the maximum first, so it reads the result;
- it has the element type of the kernel's other reductions. The sum of a float32 array and its maximum are computed
  together. Those of a bfloat16 array are not if the sum is in float32: the kernel then computes only the first one;
- it is not an `argmax` or `argmin`. Those are computed only if nothing else takes the result.

The softmax of scores in float32 is an exception, if the product has dimensions of a batch (`is_softmax`). Its kernel
keeps whole rows of up to `SOFTMAX_ROW` elements on the chip: it computes the maximum, the exponentials and their sum,
and writes the exponentials in place of the scores. For longer rows it computes none of them.

Compiled for v5e, v5p and v6e (libtpu 0.0.42.1, `benchmarks/absorbed_reductions.py`), kernels move as many bytes as
estimated in all cases without attention but one: a product whose columns are summed in groups is stored in float32. The
time of attention is 0.92 to 1.12 times the referee's. The exception is attention without a gradient on v6e, with 0.58
times, because XLA computes the exponentials in another kernel there. Apart from that, the length of the rows, the
reduced dimension, and batch dimensions make no difference. On other platforms products absorb nothing.

Not modelled: with one row of the batch on each device, XLA stores the scores in 16 bits and reads them once for the
sum; and a row's maximum takes a product's kernel up to 0.3 ms for 2**26 elements on v5e.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.cost.constants import PASS_OPS, SOFTMAX_ROW
from autoshard.sharding.cost.kernels.sources import Sources, readers
from autoshard.sharding.program.array_sizes import is_float, itemsize
from autoshard.sharding.program.operator_kinds import CONVOLUTION, REDUCTIONS
from autoshard.spmdrules.core.rule import POSITIONS
from autoshard.spmdrules.ir.program import Op

ABSORBING = ("dot_general", CONVOLUTION)  # products that absorb reductions
_SPREADS = ("broadcast_in_dim", "expand_dims", "reshape", "stop_gradient", "max")  # from a maximum to all of its row
_SELECTIONS = ("reduce_max", "reduce_min")  # of the elements themselves: XLA computes them before a widening cast


@shown
@dataclass(frozen=True)
class Absorbed:
    """The reductions of a block that the kernels of products compute.

    Attributes:
        reductions: a product's result as it is stored -> the reductions that its kernel computes.
        unstored: those of these results that nothing else takes.
    """

    reductions: dict[int, list[Op]]
    unstored: frozenset[int]


class ReductionFinder:
    """Finds which reductions of a block the kernels of products compute.

    Args:
        avals: the avals of all values.
        ops: the operators of the block.
        users: value -> the operators that take it.
        kernel_ids: the `id`s of the operators that are kernels.
        sources: finds the values in memory from which others are computed.
    """

    def __init__(
        self,
        avals: Sequence[Any],
        ops: Sequence[Op],
        users: Mapping[int, Sequence[Op]],
        kernel_ids: Set[int],
        sources: Sources,
    ):
        self.avals, self.ops, self.users, self.kernel_ids, self.sources = avals, ops, users, kernel_ids, sources
        self.when = {id(op): number for number, op in enumerate(ops)}

    def __call__(self, products: Mapping[int, Op], loops: Mapping[int, int], outputs: Set[int]) -> Absorbed:
        """Return what the products absorb.

        Args:
            products: a product's result as it is stored -> the product.
            loops: `id` of an operator -> the number of loops before it.
            outputs: the outputs of the block.
        """
        found: dict[int, list[Op]] = {}
        for op in self.ops:
            if op.name in REDUCTIONS and id(op) in self.kernel_ids and len(op.operands) == 1:
                value = self.reduced_product(op, products)
                if value is not None and loops[id(products[value])] == loops[id(op)]:
                    found.setdefault(value, []).append(op)
        absorbed: dict[int, list[Op]] = {}
        unstored: set[int] = set()
        for value, reductions in found.items():
            sums: list[Op] = []
            for op in [op for op in reductions if self.is_softmax(op, products[value])]:
                if self.avals[op.operands[0]].shape[-1] > SOFTMAX_ROW:
                    reductions.remove(op)
                else:
                    sums += self.exponential_sums(op)
            takers = readers([value], self.users, self.kernel_ids, self.sources.memory)
            only_these = value not in outputs and {*map(id, takers)} <= {*map(id, reductions)}
            chosen = self.computed_together(reductions, only_these)
            if chosen:
                absorbed[value] = chosen + [op for op in sums if op not in chosen]
                if only_these and len(chosen) == len(reductions):
                    unstored.add(value)
        return Absorbed(absorbed, frozenset(unstored))

    def reduced_product(self, reduction: Op, products: Mapping[int, Op]) -> int | None:
        """Return the stored result of a product in whose kernel a reduction can be computed, if there is one."""
        operand = reduction.operands[0]
        if operand < 0:
            return None
        first = self.when[id(reduction)] - PASS_OPS
        whole, others = self.reduced_dims(operand, frozenset(reduction.eqn.params["axes"]), first)
        candidates = [
            v for v, dims in whole.items()
            if v in products and v not in others and self.reduces_whole_dims(v, dims, products[v])
        ]  # fmt: skip
        value = max(candidates, key=lambda v: self.when[id(products[v])], default=None)
        if value is None or self.when[id(products[value])] < first:
            return None
        rest = (others | whole.keys()) - {value}
        return None if self.depend_on(rest, products[value]) else value

    def reduced_dims(
        self, operand: int, dims: frozenset[int], first: int
    ) -> tuple[dict[int, frozenset[int]], set[int]]:
        """Follow the operand of a reduction back to values in memory.

        Args:
            operand: the operand.
            dims: its dimensions that are reduced.
            first: the place from which on operators are followed. So a long chain is not followed from each reduction.

        Returns:
            The values with an element for each of the operand's, with those of their dimensions that are reduced; and
            the other values from which the operand is computed.
        """
        memory, maker = self.sources.memory, self.sources.maker
        size, todo, seen = self.avals[operand].size, [(operand, dims)], {operand: dims}
        whole: dict[int, frozenset[int]] = {}
        others: set[int] = set()
        while todo:
            value, reduced = todo.pop()
            op = maker.get(value)
            if value in memory or op is None or self.when.get(id(op), -1) < first:
                whole[value] = reduced
                continue
            for number, taken in enumerate(op.operands):
                if taken < 0:
                    continue
                before = dims_before(op, number, reduced) if self.avals[taken].size == size else None
                if before is None or seen.get(taken, before) != before:
                    others.update(self.sources([taken]))
                elif taken not in seen:
                    seen[taken] = before
                    todo.append((taken, before))
        return whole, others

    def reduces_whole_dims(self, value: int, dims: frozenset[int], product: Op) -> bool:
        """Whether these dimensions of a product's stored result are whole dimensions of the result itself."""
        (first,) = product.results
        inside, todo = {first, value}, [first]  # the values on the chains of operators from the one result to the other
        while todo and first != value:
            for user in self.users.get(todo.pop(), ()):
                todo += [v for v in user.results if v not in inside]
                inside.update(user.results)
        reduced, todo = {value: dims}, [value]
        while todo:
            if (at := todo.pop()) == first:
                continue
            op = self.sources.maker[at]
            for number, taken in enumerate(op.operands):
                if taken not in inside:
                    continue
                before = dims_before(op, number, reduced[at])
                if before is None or reduced.get(taken, before) != before:
                    return False
                if taken not in reduced:
                    reduced[taken] = before
                    todo.append(taken)
        return True

    def depend_on(self, values: Iterable[int], product: Op) -> bool:
        """Whether some of these values depend on a product of the same block."""
        first, todo, seen = self.when[id(product)], [*values], set[int]()
        while todo:
            op = self.sources.maker.get(todo.pop())
            place = -1 if op is None else self.when.get(id(op), -1)
            if op is None or place < first or place in seen:
                continue
            if op is product:
                return True
            seen.add(place)
            todo += op.operands
        return False

    def computed_together(self, reductions: Sequence[Op], only_these: bool) -> list[Op]:
        """Return those of a product's reductions that one kernel computes.

        Args:
            reductions: the reductions.
            only_these: whether nothing else takes the product's result.
        """
        if len(reductions) == 1 and only_these:
            return [*reductions]
        others = [op for op in reductions if op.name not in POSITIONS]
        return [op for op in others if self.element_type(op) == self.element_type(others[0])]

    def is_softmax(self, maximum: Op, product: Op) -> bool:
        """Whether a maximum of a product is that of a softmax which XLA computes row by row."""
        if maximum.name != "reduce_max" or product.name != "dot_general" or self.element_type(maximum) != "float32":
            return False
        _, (batch, _) = product.eqn.params["dimension_numbers"]
        last = self.avals[maximum.operands[0]].ndim - 1
        return bool(batch) and tuple(maximum.eqn.params["axes"]) == (last,) and bool(self.exponential_sums(maximum))

    def exponential_sums(self, maximum: Op) -> list[Op]:
        """Return the sums of `exp(x - max(x))` over the dimensions of a maximum of `x`."""
        todo, found = [maximum.results[0]], list[Op]()
        while todo:
            for user in self.users.get(todo.pop(), ()):
                if user.name in _SPREADS and len({*user.operands} - {-1}) == 1:
                    todo += user.results
                elif user.name == "sub" and user.operands[0] == maximum.operands[0]:
                    exponentials = [one for one in self.users.get(user.results[0], ()) if one.name == "exp"]
                    taken = [each for one in exponentials for each in self.users.get(one.results[0], ())]
                    found += [each for each in taken if each.name == "reduce_sum"]
        return [op for op in found if op.eqn.params["axes"] == maximum.eqn.params["axes"]]

    def element_type(self, reduction: Op) -> Any:
        """Return the type in which a reduction is computed: that of its operand before it is cast to a wider type."""
        value = reduction.operands[0]
        while reduction.name in _SELECTIONS and (op := self.sources.maker.get(value)) is not None:
            if op.name != "convert_element_type" or not is_float(before := self.avals[op.operands[0]]):
                break
            if itemsize(before) > itemsize(self.avals[value]):
                break
            value = op.operands[0]
        return self.avals[value].dtype


def dims_before(op: Op, number: int, dims: frozenset[int]) -> frozenset[int] | None:
    """Return which dimensions of an operand these dimensions of an operator's result are.

    Args:
        op: an operator with one result.
        number: the number of the operand. It has as many elements as the result.
        dims: some of the result's dimensions.

    Returns:
        The operand's dimensions; None if they are parts of its dimensions, or not known.
    """
    if op.rule is None or op.rule.is_unknown or len(op.results) != 1:
        return None
    inside = {f for dim in dims for f in op.rule.results[0][dim]}
    found: set[int] = set()
    for dim, factors in enumerate(op.rule.operands[number]):
        own = {f for f in factors if op.rule.factor(f).size != 1}
        if own and own <= inside:
            found.add(dim)
        elif own & inside:
            return None
    return frozenset(found)
