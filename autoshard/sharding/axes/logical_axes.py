"""Logical axes: which dimensions of which values are one and the same axis of the program.

Union-find over (value, dimension) through every rule (`spmdrules.joint`). Its leaves are the logical axes: a value's
dimension is a sequence of them, major to minor. Classes come from structure alone; names are given afterwards, for
people.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from autoshard._shown import shown
from autoshard.spmdrules.ir.dimension_classes import DimensionClasses, unify
from autoshard.spmdrules.ir.program import Block, Program

Leaves = tuple[tuple[int, ...], ...]  # for each dimension its classes, major to minor; () for size 1

REFINEMENTS = 3
_TAKES = ("slice", "squeeze", "split", "unstack")


@shown
@dataclass(eq=False)
class LogicalAxes:
    """The classes of a program.

    Attributes:
        sizes: the size of each class, in elements.
        of_value: for each value its classes by dimension.
        of_op: for each operator (in the order of `program.ops()`) its factors' classes, `{factor: classes}`.
        stacked: classes that count loop steps, of unrolled loops, too: a shard of one would leave other devices idle.
    """

    program: Program
    sizes: list[int]
    of_value: list[Leaves]
    of_op: list[dict[str, tuple[int, ...]]]
    stacked: frozenset[int]
    names: dict[int, str] = field(default_factory=dict)

    @cached_property
    def parameter_aliases(self) -> dict[int, int]:
        """Values that are a program input, or one loop step's slice of it, but for casts and turns: value -> the input.

        What a loop stacks of such slices is the input again: a cast parameter that is kept for the backward pass. A
        stack that is split into groups, and what is taken out of a group, is held as well: loops over groups of layers.
        """
        return {v: source for v, (source, _) in self._held.items() if v != source}

    @cached_property
    def layers(self) -> dict[int, tuple[int, ...]]:
        """Of what is held and taken out of a group, where it stood there: layers of one group are not one another."""
        return {v: where for v, (_, where) in self._held.items() if where}

    @cached_property
    def transfer_dtype(self) -> dict[int, Any]:
        """Of what is held and was cast to a wider float, the dtype that it moves in: the narrowest on the way to it.

        A stored parameter is gathered in that one, whether it is cast before the gather or behind it.
        """
        dtypes = [aval.dtype for aval in self.program.avals]
        found: dict[int, Any] = {}

        def follow(taken: int, result: int) -> None:
            before = found.get(taken, dtypes[taken])
            if result in self.parameter_aliases and before != dtypes[result] and _holds(dtypes[result], before):
                found[result] = before

        def visit(block: Block) -> None:
            for op in block.ops:
                for tie in op.ties:
                    if tie.stacked and tie.outer in op.operands:
                        follow(tie.outer, tie.inner)
                if op.operands and op.operands[0] >= 0:
                    for result in op.results:
                        follow(op.operands[0], result)
                for inner in op.blocks:
                    visit(inner)
                for tie in op.ties:
                    if tie.stacked and tie.outer in op.results:
                        follow(tie.inner, tie.outer)

        visit(self.program.block)
        return found

    @cached_property
    def kernels(self) -> dict[Leaves, int]:
        """Of inputs that are kernels of convolutions: their classes -> the output features' dimension, from behind."""
        found: dict[Leaves, int] = {}
        for op in self.program.ops():
            if op.name == "conv_general_dilated":
                source = self._held.get(op.operands[1], (-1, ()))[0]
                if source >= 0:
                    numbers, kernel = op.eqn.params["dimension_numbers"], op.eqn.invars[1].aval
                    found.setdefault(self.of_value[source], numbers.rhs_spec[0] - kernel.ndim)
        return found

    @cached_property
    def _held(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        held: dict[int, tuple[int, tuple[int, ...]]] = {v: (v, ()) for v in self.program.inputs}

        def visit(block: Block) -> None:
            for op in block.ops:
                for tie in op.ties:
                    if tie.stacked and tie.outer in held and tie.outer in op.operands:
                        held[tie.inner] = held[tie.outer]
                source, where = held.get(op.operands[0], (-1, ())) if op.operands else (-1, ())
                if source >= 0 and op.name in ("convert_element_type", "copy", "copy_p", "rev"):
                    held[op.results[0]] = source, where
                elif source >= 0 and op.name == "reshape":
                    leaves = self.of_value[op.results[0]]
                    if any(leaves[:1]) and self._of_stack(op.results[0], source):  # not one more dimension of size 1
                        held[op.results[0]] = source, where
                elif source >= 0 and op.name in _TAKES:
                    for number, result in enumerate(op.results):
                        if self._of_stack(result, source):
                            start = tuple(op.eqn.params["start_indices"]) if op.name == "slice" else (number,)
                            held[result] = source, where if op.name == "squeeze" else (*where, *start)
                for inner in op.blocks:
                    visit(inner)
                for tie in op.ties:
                    if tie.stacked and tie.outer in op.results and tie.inner in held and tie.outer not in held:
                        source, where = held[tie.inner]
                        if self._of_stack(tie.outer, source):
                            held[tie.outer] = source, where

        visit(self.program.block)
        return held

    def _of_stack(self, value: int, source: int) -> bool:
        """Whether a value is a stack of slices as an input is, with other leading dimensions: of groups, or of one."""
        stack, own = self.of_value[source], self.of_value[value]
        if not stack or not any(c in self.stacked for c in stack[0]):
            return False
        inner = len(stack) - 1
        leading = {c for dim in own[: len(own) - inner] for c in dim}
        return len(own) >= inner and own[len(own) - inner :] == stack[1:] and leading <= set(stack[0])

    @cached_property
    def co_occurring(self) -> dict[int, frozenset[int]]:
        """For each class the others that every value has which has it: of grouped heads, the key-value heads."""
        found: dict[int, frozenset[int]] = {}
        for leaves in set(self.of_value):
            classes = frozenset(c for dim in leaves for c in dim)
            for c in classes:
                found[c] = found.get(c, classes) & classes
        return {c: others - {c} for c, others in found.items()}

    def name(self, cls: int) -> str:
        """The class's name, or its number if it has none."""
        return self.names.get(cls, f"axis{cls}")


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether a float type has every value of another one, of 16 bits or more: not all backends move smaller ones."""
    if not all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2 for dtype in (wide, narrow)):
        return False
    return jnp.promote_types(wide, narrow) == wide


def find_axes(program: Program) -> LogicalAxes:
    """Unifies the factors of every operator of `program`."""
    return _collect(program, unify(program))


def _collect(program: Program, joined: DimensionClasses) -> LogicalAxes:
    nodes = joined.nodes
    numbers: dict[int, int] = {}
    sizes: list[int] = []
    memo: dict[int, tuple[int, ...]] = {0: ()}

    def classes(node: int) -> tuple[int, ...]:
        root = nodes.find(node)
        if root not in memo:
            for leaf in (leaves := nodes.leaves(root)):
                if leaf not in numbers:
                    numbers[leaf] = len(sizes)
                    sizes.append(nodes.size[leaf])
            memo[root] = tuple(numbers[leaf] for leaf in leaves)
        return memo[root]

    of_value = [tuple(map(classes, value)) for value in joined.dims]
    of_op = [{name: classes(node) for name, node in made.items()} for made in joined.factors]
    steps = frozenset(c for n in joined.stacked for c in classes(n)) | _taken_apart(program, of_value)
    return _merge_alike(LogicalAxes(program, sizes, of_value, of_op, steps))


def _taken_apart(program: Program, of_value: list[Leaves]) -> frozenset[int]:
    """The leading classes of inputs that are taken apart along them: stacks of layers whose loop is unrolled."""
    source = {v: v for v in program.inputs}
    taken: dict[int, set[int]] = {}
    for op in program.ops():
        stack = source.get(op.operands[0]) if op.operands else None
        if stack is None:
            continue
        if op.name == "convert_element_type":
            source[op.results[0]] = stack
        elif op.name == "slice":
            starts, ends = op.eqn.params["start_indices"], op.eqn.params["limit_indices"]
            shape = program.avals[stack].shape
            if ends[0] - starts[0] == 1 and not any(starts[1:]) and tuple(ends[1:]) == tuple(shape[1:]):
                taken.setdefault(stack, set()).add(starts[0])
    return frozenset(
        c for v, starts in taken.items() if len(starts) == program.avals[v].shape[0] > 1 for c in of_value[v][0]
    )


def _merge_alike(found: LogicalAxes) -> LogicalAxes:
    """Makes one class of the classes that repeated layers use alike: the `ffn` of layer 1 is that of layer 2.

    Colours classes by size, then twice by the operators that they stand in and the colours beside them there (colour
    refinement). Classes of one colour become one, unless two of them stand in one value.
    """
    colour: list[int] = list(found.sizes)
    operators = Counter(  # those of a layer are many, and most of them stand beside others with the same classes
        ((op.name, id(op.rule)), tuple(factors.items()))
        for op, factors in zip(found.program.ops(), found.of_op, strict=True) if factors
    )  # fmt: skip
    for _ in range(REFINEMENTS):
        seen: list[dict[int, int]] = [{} for _ in colour]
        palette: dict[Any, int] = {}
        for (key, factors), times in operators.items():
            around = tuple([tuple([colour[c] for c in classes]) for _, classes in factors])
            for name, classes in factors:
                for part, c in enumerate(classes):
                    use = palette.setdefault((key, around, name, part), len(palette))
                    seen[c][use] = seen[c].get(use, 0) + times
        shades: dict[Any, int] = {}
        colour = [
            shades.setdefault((colour[c], c in found.stacked, frozenset(seen[c].items())), len(shades))
            for c in range(len(colour))
        ]
    together = {colour[c] for leaves in set(found.of_value) for c in _twice(leaves, colour)}
    first: dict[int, int] = {}
    number: dict[int, int] = {}
    sizes: list[int] = []
    for c, shade in enumerate(colour):
        if shade in together or shade not in first:
            first[shade] = number[c] = len(sizes)
            sizes.append(found.sizes[c])
        else:
            number[c] = first[shade]

    def renumber(classes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[c] for c in classes)

    memo = {leaves: tuple(map(renumber, leaves)) for leaves in set(found.of_value)}
    return LogicalAxes(
        found.program,
        sizes,
        [memo[leaves] for leaves in found.of_value],
        [{name: renumber(classes) for name, classes in factors.items()} for factors in found.of_op],
        frozenset(number[c] for c in found.stacked),
    )


def _twice(leaves: Leaves, colour: list[int]) -> list[int]:
    """Classes of a value that share their colour with another class of it."""
    classes = {c for dim in leaves for c in dim}
    shades = [colour[c] for c in classes]
    return [c for c in classes if shades.count(colour[c]) > 1]
