"""How contractions, gathers and declared operators use the axes of parameters. Roles are derived from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.rows.loop_counts import counted_axes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, CONVOLUTION
from autoshard.spmdrules.core.layer_stacks import layer_stacks
from autoshard.spmdrules.core.rule import POSITIONS, Dims, Rule
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from autoshard.spmdrules.ir.program import Op, Program


@shown
@dataclass(eq=False)
class AxisUses:
    """The uses of axes. A weight is represented by the set of inputs that it is computed from.

    Attributes:
        weights: axis -> weights that have it.
        produced: axis -> weights whose first use, in the forward pass, produces it.
        contracted: axis -> weights whose first use contracts it.
        used: weights that have been used.
        reduced: axes over which an activation is summed, or its maximum or the maximum's position taken (logits).
        inner: axes over which two activations are contracted (head_dim).
        kept: axes that a contraction of two activations keeps from one of them (head_dim of the values).
        heads: batch dimensions of a contraction of two activations. Batch dimensions of a contraction of an activation
            with a weight are also heads if one weight produces them and another contracts them. Latent attention has
            such a weight: a matrix for the queries of each head (DeepSeek-V2, arXiv:2405.04434).
        experts: other batch dimensions of a contraction of an activation with a weight.
        indexed: axes of the rows of a table that a gather or scatter indexes.
        windows: axes of the windows of convolution kernels, which are never sharded.
        attended: axes that a contraction of two activations has on both sides: positions of queries and of keys.
        taken: axis -> its positions that slices of one element take; all positions if a loop takes one after another.
    """

    weights: dict[int, set[frozenset[int]]] = field(default_factory=lambda: defaultdict(set))
    produced: dict[int, set[frozenset[int]]] = field(default_factory=lambda: defaultdict(set))
    contracted: dict[int, set[frozenset[int]]] = field(default_factory=lambda: defaultdict(set))
    used: set[frozenset[int]] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)
    inner: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    heads: set[int] = field(default_factory=set)
    experts: set[int] = field(default_factory=set)
    indexed: set[int] = field(default_factory=set)
    windows: set[int] = field(default_factory=set)
    attended: set[int] = field(default_factory=set)
    taken: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def hidden(self) -> set[int]:
        """Axes that one weight produces and another weight contracts, such as those of hidden features."""
        return {c for c in self.produced if any(a != b for a in self.produced[c] for b in self.contracted.get(c, ()))}

    def is_taken_apart(self, axis: int, size: int) -> bool:
        """Whether a slice of one element takes each position of an axis, such as x, y and z of a point."""
        return len(self.taken.get(axis, ())) == size

    def discard(self, axis: int) -> None:
        """Forget an axis, such as that of a pipeline's stages, which only its own kind of parallelism shards."""
        for found in (self.weights, self.produced, self.contracted):
            found.pop(axis, None)
        for found in (self.reduced, self.inner, self.kept, self.heads, self.experts, self.indexed, self.windows):
            found.discard(axis)


def find_uses(
    program: Program,
    axes: LogicalAxes,
    batch: int | None,
    in_parameters: set[int],
    owner: dict[int, frozenset[int]],
    dispatched: frozenset[int] = frozenset(),
    row: frozenset[int] = frozenset(),
    *,
    other_rows: Collection[int] = (),
    groups: bool = False,
) -> AxisUses:
    """Collects how the operators of a program use the axes of its parameters.

    Args:
        program: the program.
        axes: its logical axes.
        batch: the batch axis, if there is one.
        in_parameters: the axes that parameters have.
        owner: value without the batch -> the inputs that it was computed from.
        dispatched: values without the batch that hold its rows (`dispatched_rows`).
        row: the values of the only row of a step without a batch axis (`single_row`).
        other_rows: axes that count as the batch, see `Roles`.
        groups: whether each row of the batch is a group (`microbatches.replicas`) with its own terms of gradients.
    """
    rows = frozenset(other_rows if batch is None else (batch, *other_rows))
    collector = _UseCollector(axes, rows, in_parameters, owner, dispatched, row, groups)
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if op.rule is not None:
            collector.record(op, op.rule, factors)
    uses = collector.uses
    for c in counted_axes(axes):
        uses.taken[c].update(range(axes.sizes[c]))
    uses.heads |= uses.experts & uses.hidden
    uses.experts -= uses.heads
    return uses


@shown
@dataclass(eq=False)
class _UseCollector:
    axes: LogicalAxes
    rows: frozenset[int]
    in_parameters: set[int]
    owner: Mapping[int, frozenset[int]]
    dispatched: frozenset[int]
    row: frozenset[int]
    groups: bool
    uses: AxisUses = field(default_factory=AxisUses)
    matrices_of_rows: set[frozenset[int]] = field(default_factory=set)  # their axes without the rows

    def record(self, op: Op, rule: Rule, factors: Mapping[str, Sequence[int]]) -> None:
        """Records the uses of axes by one operator."""
        if op.name in ("slice", "split", "unstack"):
            self.record_slices(op)
        if op.name == "gather" and self.has_batch(op.results[0]) and not self.has_batch(op.operands[0]):
            table, result = ({c for dim in self.axes.of_value[v] for c in dim} for v in (op.operands[0], op.results[0]))
            if len(window := table & result & self.in_parameters) > 1:
                self.matrices_of_rows.add(frozenset(window))
        if op.name in ("gather", "scatter-add"):
            self.uses.indexed |= self.of_kind("index", rule, factors) & self.in_parameters
        if op.name in ("reduce_sum", "reduce_max", *POSITIONS) and self.has_batch(op.results[0]):
            self.uses.reduced |= self.of_kind("reduce", rule, factors)
        if not self.rows and not self.row:
            return
        if op.name in CONTRACTIONS:
            self.record_contraction(op, rule, factors)
        if is_operator(op.eqn.primitive):
            self.record_operator(op, rule, factors)
            self.record_opaque_attention(op, rule, factors)

    def record_slices(self, op: Op) -> None:
        """Records the positions that an operator slices one by one."""
        params, dims, shape = op.eqn.params, self.axes.of_value[op.operands[0]], op.eqn.invars[0].aval.shape
        if op.name == "slice":
            for dim, size, start, end in zip(
                dims, shape, params["start_indices"], params["limit_indices"], strict=True
            ):
                if end - start == 1 < size and len(dim) == 1:
                    self.uses.taken[dim[0]].add(start)
        elif op.name == "unstack" or set(params["sizes"]) == {1}:
            for c in dims[params["axis"]]:
                self.uses.taken[c].update(range(self.axes.sizes[c]))

    def of_layer(self, op: Op, dims: Dims, factors: Mapping[str, Sequence[int]]) -> Dims:
        """The dimensions that an operand has in one layer, on one stage of a pipeline: not those that count these."""
        stacks = layer_stacks(op.eqn.params["fn"])
        return tuple(
            dim for dim in dims
            if [c for f in dim for c in factors.get(f, ())] != [self.axes.stages]
            and (stacks is None or dim != (stacks.factor,))
        )  # fmt: skip

    def has_batch(self, value: int) -> bool:
        """Whether a value has an axis of rows, or belongs to the only row."""
        if value in self.row:
            return True
        return value >= 0 and any([not self.rows.isdisjoint(dim) for dim in self.axes.of_value[value]])

    def of_kind(self, kind: str, rule: Rule, factors: Mapping[str, Sequence[int]]) -> set[int]:
        """The classes of a rule's factors of one kind."""
        return {c for f in rule.factors if f.kind == kind for c in factors.get(f.name, ())}

    def record_operator(self, op: Op, rule: Rule, factors: Mapping[str, Sequence[int]]) -> None:
        """Records the axes that a declared operator internally produces with one weight and contracts with another.

        The leading axis of several stacks of matrices is an axis of experts.
        """
        uses, avals = self.uses, self.axes.program.avals
        matrices = [
            (self.weight(v), of_layer)
            for v, dims in zip(op.operands, rule.operands, strict=True)
            if v >= 0 and len(of_layer := self.of_layer(op, dims, factors)) > 1
            and _compat.is_floating(avals[v].dtype) and not self.has_batch(v)
        ]  # fmt: skip
        matrices = _without_scales(matrices)
        if len(matrices) == 1:
            self.record_opaque_product(op, rule, factors, *matrices[0])
        if len(matrices) < 2 or not any(map(self.has_batch, (*op.operands, *op.results))):
            return
        results = {f for dims in rule.results for dim in dims for f in dim}
        for f in rule.factors:
            with_factor = [(weight, dims) for weight, dims in matrices if any(f.name in dim for dim in dims)]
            if f.kind not in ("reduce", "index") or f.name in results or len(with_factor) < 2:
                continue
            for weight, dims in with_factor:
                for c in {c for dim in dims for name in dim for c in factors.get(name, ())}:
                    uses.weights[c].add(weight)
            # Stacks of biases may stand beside the stacks of matrices.
            matrices_of = [dims for _, dims in with_factor if len(dims) > 2]
            stacked = len(matrices_of) > 1 and all(dims[0] == (f.name,) for _, dims in with_factor)
            for c in factors.get(f.name, ()):
                if stacked:
                    uses.experts.add(c)
                else:
                    uses.produced[c].add(with_factor[0][0])
                    uses.contracted[c].add(with_factor[-1][0])

    def record_opaque_product(
        self, op: Op, rule: Rule, factors: Mapping[str, Sequence[int]], weight: frozenset[int], dims: Dims
    ) -> None:
        """Records the axes of a declared operator that multiplies activations by a weight, such as a grouped product.

        The leading axis of a stack of matrices over which the results are summed is an axis of experts.
        """
        if not self.has_batch(op.results[0]) or weight in self.uses.used:
            return
        avals = self.axes.program.avals
        activations = {
            f
            for v, each in zip(op.operands, rule.operands, strict=True)
            if self.has_batch(v) and _compat.is_floating(avals[v].dtype)
            for dim in each
            for f in dim
        }
        results, own = ({f for dim in each for f in dim} for each in (rule.results[0], dims))
        summed = {f.name for f in rule.factors if f.kind == "reduce"} - results
        whole = {f.name for f in rule.factors if f.kind == "whole"}  # such as the elements of a block
        contracted, produced = own & summed & activations, own & results - activations - whole
        if not contracted or not produced:
            return
        for uses, names in ((self.uses.contracted, contracted), (self.uses.produced, produced)):
            for c in (c for name in names for c in factors.get(name, ())):
                uses[c].add(weight)
        for c in (c for name in own for c in factors.get(name, ())):
            self.uses.weights[c].add(weight)
        if len(dims) > 2 and len(dims[0]) == 1 and dims[0][0] in summed - activations:
            self.uses.experts.update(factors.get(dims[0][0], ()))
        self.uses.used.add(weight)

    def record_opaque_attention(self, op: Op, rule: Rule, factors: Mapping[str, Sequence[int]]) -> None:
        """Records the axes of a declared operator that contracts activations with each other: an attention kernel.

        It contracts a factor that several activations have and no result has. The factors that it needs whole are
        elements of a head.
        """
        avals = self.axes.program.avals
        activations = [
            {f for dim in dims for f in dim}
            for v, dims in zip(op.operands, rule.operands, strict=True)
            if self.has_batch(v) and _compat.is_floating(avals[v].dtype)
        ]
        results = [{f for dim in dims for f in dim} for dims in rule.results]
        if len(activations) < 2 or not results or not self.has_batch(op.results[0]):
            return
        common = set.intersection(*activations, *results)
        repeated = {f for side in activations for f in side if sum(f in other for other in activations) > 1}

        def classes(names: set[str]) -> set[int]:
            return {c for name in names for c in factors.get(name, ())}

        if contracted := repeated - set.union(*results):
            self.uses.attended |= {c for c, n in Counter(c for each in factors.values() for c in each).items() if n > 1}
            whole = self.of_kind("whole", rule, factors)
            self.uses.inner |= (classes(contracted) | whole) & self.in_parameters
            self.uses.heads |= classes(common) - self.rows
            self.uses.kept |= classes(set.union(*results) - common) & self.in_parameters

    def record_contraction(self, op: Op, rule: Rule, factors: Mapping[str, Sequence[int]]) -> None:
        """Records the axes that a contraction of an activation with a weight or an activation produces or sums over."""
        uses, of_value = self.uses, self.axes.of_value
        sides = [{c for dim in of_value[v] for c in dim} if v >= 0 else set[int]() for v in op.operands[:2]]
        result = {c for dim in of_value[op.results[0]] for c in dim}
        with_batch = [self.has_batch(v) for v in op.operands[:2]]
        kept = self.has_batch(op.results[0])
        if self.dispatched.intersection((*op.operands[:2], op.results[0])):
            with_batch = [has or v in self.dispatched for has, v in zip(with_batch, op.operands[:2], strict=True)]
            kept = op.results[0] in self.dispatched
            if all(with_batch):  # rows that are dispatched or combined, or the gradient of a weight
                return
        everywhere = [*rule.operands[:2], rule.results[0]]
        shared = {
            c for f in rule.factors
            if f.kind == "index" or all(any(f.name in dim for dim in dims) for dims in everywhere)
            for c in factors.get(f.name, ())
        }  # fmt: skip
        summed = self.of_kind("reduce", rule, factors)
        of_row = result - {*self.rows, self.axes.stages}
        if self.groups and all(with_batch) and kept and of_row <= self.in_parameters:
            return  # not attention, but a group's term of a weight's gradient
        if not self.matrices_of_rows.isdisjoint(frozenset(own - self.rows) for own in (*sides, result)):
            return  # product of an activation and a weight that is looked up for each row, such as an adapter
        if all(with_batch) and kept:  # activation with activation: attention
            # The gradient of keys sums over the query groups and the sequence together. These are not inner axes.
            if summed <= self.in_parameters:
                uses.inner |= summed
            uses.kept |= (result - shared) & self.in_parameters
            uses.heads |= shared - self.rows
            of_result = Counter(c for dim in of_value[op.results[0]] for c in dim)
            uses.attended |= {c for c, n in of_result.items() if n > 1}
        elif any(with_batch) and kept:  # activation with weight
            place = with_batch.index(False)
            weight = self.weight(op.operands[place])
            for c in sides[place]:
                uses.weights[c].add(weight)
                if weight not in uses.used and c not in shared:
                    (uses.contracted if c in summed else uses.produced)[c].add(weight)
            uses.used.add(weight)
            if op.name == CONVOLUTION:
                uses.windows |= sides[place] & self.of_kind("whole", rule, factors)
            else:  # in a convolution, a shared axis is the channel of a depthwise kernel
                uses.experts |= shared

    def weight(self, value: int) -> frozenset[int]:
        """The inputs that a value without the batch was computed from."""
        return self.owner.get(value, frozenset({value}))


def _without_scales(matrices: list[tuple[frozenset[int], Dims]]) -> list[tuple[frozenset[int], Dims]]:
    """Leave out the scales of blocks: matrices that have only some of the factors of another one, and no other ones."""
    factors = [{name for dim in dims for name in dim} for _, dims in matrices]
    return [one for one, own in zip(matrices, factors, strict=True) if not any(own < other for other in factors)]
