"""Logical axes: equivalence classes of the dimensions of a program's values.

Union-find unifies dimensions through the rule of every operator (`spmdrules.ir.dimension_classes`). A dimension that a
reshape splits is a sequence of parts, major to minor; the smallest parts are the logical axes. Axes are numbered and
called classes in the code. They follow from structure alone: names are assigned afterwards, for display
(`axis_names`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from autoshard._shown import shown
from autoshard.sharding.axes.constants import LEAST_TRANSFER_BITS, REFINEMENT_ROUNDS
from autoshard.sharding.axes.lookup_tables import LookupTable, lookup_tables
from autoshard.sharding.axes.merged.row_order import unordered_dims
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.sharding.program.operator_kinds import CONVOLUTION, decodes
from autoshard.spmdrules.families.stacked.stages import STAGE, TO_STAGES, WITH_ALL_LAYERS, shift_p
from autoshard.spmdrules.ir.dimension_classes import DimensionClasses, unify
from autoshard.spmdrules.ir.program import Op, Program, visits

Leaves = tuple[tuple[int, ...], ...]  # for each dimension its classes, major to minor; () for size 1

KEY_SHAPES = ((2,), (4,))  # of the words of a key: threefry, rbg

_SLICING = ("slice", "squeeze", "split", "unstack")
_KEEPING = ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "expand_dims", "copy")
# What computes each element of a parameter in 8 bits from that element and a scale.
_SCALING = ("clamp", "convert_element_type", "div", "max", "min", "mul", "round")


@shown
@dataclass(eq=False)
class LogicalAxes:
    """The logical axes of a program.

    Attributes:
        program: the program.
        sizes: the size of each class, in elements.
        of_value: for each value the classes of its dimensions.
        of_op: for each operator (in the order of `program.ops()`) the classes of its factors, `{factor: classes}`.
        stacked: classes that count the iterations of a loop, unrolled ones included. They are never sharded for
            compute, because only the devices that hold the current iteration would work.
        names: class -> its name, for the axes of inputs and those that have a role.
        computed_names: class -> its name, for axes that only computed values have. They are for display; nobody can
            request or fix them.
    """

    program: Program
    sizes: list[int]
    of_value: list[Leaves]
    of_op: list[dict[str, tuple[int, ...]]]
    stacked: frozenset[int]
    names: dict[int, str] = field(default_factory=dict)
    computed_names: dict[int, str] = field(default_factory=dict)

    @cached_property
    def parameter_aliases(self) -> dict[int, int]:
        """Values that equal a program input, or one loop iteration's slice of it, up to casts and reversals.

        A copy in the other memory, of the device or of its host, is an alias too.
        A loop's stack of such slices is an alias of the input too, such as a cast parameter that is kept for the
        backward pass. So are a stack that is split into groups and a slice of one group, as in loops over groups of
        layers, and an input with one dimension split into chunks over which a loop runs, and a chunk. And so is an
        input that was divided by scales and rounded to 8 bits: its collectives then move 8 bits per element.

        Returns:
            Value -> the program input.
        """
        return {v: source for v, (source, _) in self._aliases.items() if v != source}

    @cached_property
    def stack_positions(self) -> dict[int, tuple[int, ...]]:
        """Alias that was sliced out of a stack -> its position there, which tells the layers of one stack apart."""
        return {v: position for v, (_, position) in self._aliases.items() if position}

    @cached_property
    def transfer_dtype(self) -> dict[int, Any]:
        """Alias that was cast to a wider float type -> the dtype in which it is gathered.

        It is the narrowest dtype between the input and the alias. A stored parameter is gathered in it, whether its
        cast comes before or after the gather.
        """
        dtypes = [aval.dtype for aval in self.program.avals]
        found: dict[int, Any] = {}

        def follow(operand: int, result: int) -> None:
            before = found.get(operand, dtypes[operand])
            if result in self.parameter_aliases and before != dtypes[result] and _represents(dtypes[result], before):
                found[result] = before

        for op, entering in visits(self.program.block):
            if not entering:
                for tie in op.edges:
                    if tie.stacked and tie.outer in op.results:
                        follow(tie.inner, tie.outer)
                continue
            for tie in op.edges:
                if tie.stacked and tie.outer in op.operands:
                    follow(tie.outer, tie.inner)
            if op.operands and op.operands[0] >= 0:
                for result in op.results:
                    follow(op.operands[0], result)
        return found

    @cached_property
    def key_words(self) -> frozenset[int]:
        """The classes of the words of random keys that the program takes as integers. They are not logical axes.

        These are keys that an operator wraps, and unsigned integers of a key's size that no operator reads. A dimension
        that arrays of other dtypes have, too, is not one of words.
        """
        used = {c for factors in self.of_op for classes in factors.values() for c in classes}
        for v in self.program.inputs:
            if self.program.avals[v].dtype != jnp.uint32:
                used.update(c for dim in self.of_value[v] for c in dim)
        found: set[int] = set()
        for v, aval in ((v, self.program.avals[v]) for v in self.program.inputs):
            if aval.dtype == jnp.uint32 and aval.shape[-1:] in KEY_SHAPES and not used & {*self.of_value[v][-1]}:
                found.update(self.of_value[v][-1])
        for op in self.program.ops():
            if op.name == "random_wrap" and op.operands[0] >= 0:
                words = self.of_value[op.operands[0]][len(self.of_value[op.results[0]]) :]
                found.update(c for dim in words for c in dim)
        return frozenset(found)

    @cached_property
    def kernels(self) -> dict[Leaves, int]:
        """Classes of an input that is a convolution's kernel -> its output feature dimension, counted from the end."""
        found: dict[Leaves, int] = {}
        for op in self.program.ops():
            if op.name == CONVOLUTION:
                source = self._aliases.get(op.operands[1], (-1, ()))[0]
                if source >= 0:
                    numbers, kernel = op.eqn.params["dimension_numbers"], op.eqn.invars[1].aval
                    found.setdefault(self.of_value[source], numbers.rhs_spec[0] - kernel.ndim)
        return found

    @cached_property
    def tables(self) -> dict[Leaves, LookupTable]:
        """Classes of an input whose rows are only looked up -> its lookups."""
        sources = {v: source for v, (source, _) in self._aliases.items()}
        return lookup_tables(self.program, self.of_value, self.of_op, sources)

    @cached_property
    def _aliases(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Value -> the program input that it is an alias of, and its position in that input's stack."""
        aliases: dict[int, tuple[int, tuple[int, ...]]] = {v: (v, ()) for v in self.program.inputs}
        of_layer: dict[int, Leaves] = {}
        if self.stages is not None:
            of_layer |= {v: own[1:] for v in self.program.inputs if (own := self.of_value[v]) and self.stages in own[0]}
        self._layer_dims = of_layer

        def keeps_layer(op: Op) -> bool:
            """Whether a staged alias only gets other dimensions before those of its layer."""
            layer, (result,) = of_layer[op.operands[0]], op.results
            own = self.of_value[result]
            return own[len(own) - len(layer) :] == layer and any(self.stages in dim for dim in own)

        scaled: dict[int, tuple[int, tuple[int, ...]]] = {}  # not an alias itself, but so is its rounding to 8 bits

        for op, entering in visits(self.program.block):
            if not entering:
                for tie in op.edges:
                    if tie.stacked and tie.outer in op.results and tie.inner in aliases and tie.outer not in aliases:
                        source, position = aliases[tie.inner]
                        if self._is_part_of_stack(tie.outer, source):
                            aliases[tie.outer] = source, position
                continue
            for tie in op.edges:
                if tie.stacked and tie.outer in aliases and tie.outer in op.operands:
                    aliases[tie.inner] = aliases[tie.outer]
                    if tie.outer in of_layer:
                        of_layer[tie.inner] = of_layer[tie.outer]
            source, position = aliases.get(op.operands[0] if op.operands else -1, (-1, ()))
            if op.name in TO_STAGES and all(v in aliases for v in op.operands):
                first = self.of_value[op.operands[0]]
                aliases[op.results[0]] = source, position
                of_layer[op.results[0]] = first[1:] if op.name in WITH_ALL_LAYERS else first
            elif op.operands and op.operands[0] in of_layer and op.name in _KEEPING and keeps_layer(op):
                aliases[op.results[0]] = source, position
                of_layer[op.results[0]] = of_layer[op.operands[0]]
            elif source >= 0 and op.name in ("convert_element_type", "copy", "copy_p", "rev") and not decodes(op):
                aliases[op.results[0]] = source, position
            elif is_host_transfer(op):
                pairs = zip(op.operands, op.results, strict=True)
                aliases.update({after: aliases[before] for before, after in pairs if before in aliases})
            elif source >= 0 and op.name == "reshape":
                leaves = self.of_value[op.results[0]]
                # a reshape that only adds a leading dimension of size 1 is not an alias
                whole = any(leaves[:1]) and self._is_part_of_stack(op.results[0], source)
                if whole or self._is_in_chunks(op.results[0], source):
                    aliases[op.results[0]] = source, position
            elif source >= 0 and op.name == "transpose" and self._is_in_chunks(op.results[0], source):
                aliases[op.results[0]] = source, position
            elif source >= 0 and op.name in _SLICING:
                for number, result in enumerate(op.results):
                    if self._is_part_of_stack(result, source):
                        start = tuple(op.eqn.params["start_indices"]) if op.name == "slice" else (number,)
                        aliases[result] = source, position if op.name == "squeeze" else (*position, *start)
            elif (operand := self._scaled_operand(op)) in aliases or operand in scaled:
                to = aliases if operand in scaled and self._has_8_bits(op.results[0]) else scaled
                to[op.results[0]] = scaled[operand] if operand in scaled else aliases[operand]
        return aliases

    @cached_property
    def stages(self) -> int | None:
        """The axis of a pipeline's stages: the one along which values are shifted. None without a pipeline."""
        for op, factors in zip(self.program.ops(), self.of_op, strict=True):
            if op.name == shift_p.name:
                return factors[STAGE][0]
        return None

    @cached_property
    def layer_dims(self) -> dict[int, Leaves]:
        """Alias of a parameter that has the layers of the stages of a pipeline -> the classes of one layer.

        They are the classes of its last dimensions.
        """
        _ = self._aliases
        return self._layer_dims

    def _scaled_operand(self, op: Op) -> int:
        """The operand with the result's dimensions, of an operator that scales or rounds it; -1 if there is none."""
        if op.name not in _SCALING:
            return -1
        avals, shape = self.program.avals, op.eqn.outvars[0].aval.shape
        whole = [v for v in op.operands if v >= 0 and avals[v].shape == shape]
        return whole[0] if len(whole) == 1 and math.prod(shape) > 1 else -1

    def _has_8_bits(self, value: int) -> bool:
        dtype = self.program.avals[value].dtype
        return dtype.itemsize == 1 and dtype != jnp.bool_

    def _is_part_of_stack(self, value: int, source: int) -> bool:
        """Whether a value is the stack `source` with its leading dimension kept, split, sliced or dropped."""
        stack, own = self.of_value[source], self.of_value[value]
        if not stack or not any(c in self.stacked for c in stack[0]):
            return False
        inner = len(stack) - 1
        leading = {c for dim in own[: len(own) - inner] for c in dim}
        return len(own) >= inner and own[len(own) - inner :] == stack[1:] and leading <= set(stack[0])

    def _is_in_chunks(self, value: int, source: int) -> bool:
        """Whether a value is `source` with one dimension split into chunks over which a loop runs, in any order."""
        whole, own = self.of_value[source], self.of_value[value]
        classes = [c for dim in whole for c in dim]
        if len({*classes}) < len(classes) or sorted(c for dim in own for c in dim) != sorted(classes):
            return False
        split = [dim for dim in whole if dim not in own]
        parts = {c for dim in own if dim not in whole for c in dim}
        return len(split) == 1 and parts == {*split[0]} and any(c in self.stacked for c in parts)

    @cached_property
    def unordered(self) -> frozenset[tuple[int, ...]]:
        """The merged dimensions, as classes, whose elements may be in any order (`merged.row_order`)."""
        return unordered_dims(self.program, self.of_value)

    @cached_property
    def merged_inputs(self) -> frozenset[tuple[int, ...]]:
        """The dimensions of inputs that have several logical axes."""
        return frozenset(dim for v in self.program.inputs for dim in self.of_value[v] if len(dim) > 1)

    @cached_property
    def co_occurring(self) -> dict[int, frozenset[int]]:
        """For each class, the other classes that occur in every value with this class.

        In grouped attention, for example, every value with query groups has the key-value heads.
        """
        found: dict[int, frozenset[int]] = {}
        for leaves in set(self.of_value):
            classes = frozenset(c for dim in leaves for c in dim)
            for c in classes:
                found[c] = found.get(c, classes) & classes
        return {c: others - {c} for c, others in found.items()}

    def name(self, cls: int) -> str:
        """The name of a class; `axis` and its number before names are given."""
        return self.names.get(cls) or self.computed_names.get(cls, f"axis{cls}")


def _represents(wide: Any, narrow: Any) -> bool:
    """Whether a float type represents every value of another one, where collectives support both."""
    least = LEAST_TRANSFER_BITS // 8
    if not all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= least for dtype in (wide, narrow)):
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
    stacked = frozenset(c for n in joined.stacked for c in classes(n)) | _unrolled_stacks(program, of_value)
    return _merge_repeated(LogicalAxes(program, sizes, of_value, of_op, stacked))


def _unrolled_stacks(program: Program, of_value: list[Leaves]) -> frozenset[int]:
    """The leading classes of inputs whose slices are all taken one by one: stacks of layers with an unrolled loop."""
    source = {v: v for v in program.inputs}
    sliced: dict[int, set[int]] = {}
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
                sliced.setdefault(stack, set()).add(starts[0])
    return frozenset(
        c for v, starts in sliced.items() if len(starts) == program.avals[v].shape[0] > 1 for c in of_value[v][0]
    )


def _merge_repeated(found: LogicalAxes) -> LogicalAxes:
    """Merges the classes that repeated layers use in the same way: the `ffn` of layer 1 with the `ffn` of layer 2.

    Colour refinement: the first colour of a class is its size. Each round refines it by the operators that the class
    occurs in and the colours of the other classes there. Classes of one colour are merged, unless two of them occur in
    one value.
    """
    colour: list[int] = list(found.sizes)
    operators = Counter(  # counted, because many operators have the same rule and classes
        ((op.name, id(op.rule)), tuple(factors.items()))
        for op, factors in zip(found.program.ops(), found.of_op, strict=True) if factors
    )  # fmt: skip
    for _ in range(REFINEMENT_ROUNDS):
        uses: list[dict[int, int]] = [{} for _ in colour]
        palette: dict[Any, int] = {}
        for (key, factors), times in operators.items():
            around = tuple([tuple([colour[c] for c in classes]) for _, classes in factors])
            place = palette.setdefault((key, around), len(palette))  # one number is hashed faster than nested tuples
            for name, classes in factors:
                for part, c in enumerate(classes):
                    use = palette.setdefault((place, name, part), len(palette))
                    uses[c][use] = uses[c].get(use, 0) + times
        shades: dict[Any, int] = {}
        colour = [
            shades.setdefault((colour[c], c in found.stacked, frozenset(uses[c].items())), len(shades))
            for c in range(len(colour))
        ]
    kept_apart = {colour[c] for leaves in set(found.of_value) for c in _same_coloured(leaves, colour)}
    first: dict[int, int] = {}
    number: dict[int, int] = {}
    sizes: list[int] = []
    for c, shade in enumerate(colour):
        if shade in kept_apart or shade not in first:
            first[shade] = number[c] = len(sizes)
            sizes.append(found.sizes[c])
        else:
            number[c] = first[shade]

    def renumber(classes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[c] for c in classes)

    memo = {leaves: tuple(map(renumber, leaves)) for leaves in set(found.of_value)}
    renumbered = {classes: renumber(classes) for _, factors in operators for _, classes in factors}
    return LogicalAxes(
        found.program,
        sizes,
        [memo[leaves] for leaves in found.of_value],
        [{name: renumbered[classes] for name, classes in factors.items()} for factors in found.of_op],
        frozenset(number[c] for c in found.stacked),
    )


def _same_coloured(leaves: Leaves, colour: list[int]) -> list[int]:
    """The classes of a value whose colour another class of the same value has too."""
    classes = {c for dim in leaves for c in dim}
    shades = [colour[c] for c in classes]
    return [c for c in classes if shades.count(colour[c]) > 1]
