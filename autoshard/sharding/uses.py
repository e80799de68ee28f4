"""How contractions, lookups and declared operators use the axes of parameters: what roles are read off."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from autoshard import _compat
from autoshard.sharding.axes import LogicalAxes
from autoshard.spmdrules.opaque import is_operator
from autoshard.spmdrules.program import Op, Program

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@dataclass(eq=False)
class Uses:
    """How contractions and gathers use the axes of parameters."""

    # axis -> weights that have it; a weight is the inputs that it is made of
    weights: dict[int, set[frozenset[int]]] = field(default_factory=lambda: defaultdict(set))
    # As each weight is first used, which is forward: axis -> weights that make it, that contract it.
    made: dict[int, set[frozenset[int]]] = field(default_factory=lambda: defaultdict(set))
    contracted: dict[int, set[frozenset[int]]] = field(default_factory=lambda: defaultdict(set))
    used: set[frozenset[int]] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)  # summed or maximised within an activation (logits)
    inner: set[int] = field(default_factory=set)  # contracted between two activations (head_dim)
    heads: set[int] = field(default_factory=set)  # batched over between two activations
    experts: set[int] = field(default_factory=set)  # batched over between an activation and a weight
    indexed: set[int] = field(default_factory=set)  # rows of a table


def find_uses(
    program: Program, axes: LogicalAxes, batch: int | None, in_parameters: set[int], owner: dict[int, frozenset[int]]
) -> Uses:
    """How the operators of a program use the axes of its parameters.

    Args:
        program: the program.
        axes: its logical axes.
        batch: the batch, if there is one.
        in_parameters: the axes that parameters have.
        owner: the inputs that each value without the batch was made from.
    """
    use = Uses()
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if op.rule is None:
            continue
        if op.name in ("gather", "scatter-add"):
            indexed = {c for f in op.rule.factors if f.kind == "index" for c in factors.get(f.name, ())}
            use.indexed |= indexed & in_parameters
        if op.name in ("reduce_sum", "reduce_max") and any(batch in dim for dim in axes.of_value[op.results[0]]):
            use.reduced |= {c for f in op.rule.factors if f.kind == "reduce" for c in factors.get(f.name, ())}
        if op.name in CONTRACTIONS and batch is not None:
            _use_of_contraction(use, op, factors, axes, batch, owner, in_parameters)
        if is_operator(op.eqn.primitive) and batch is not None:
            _use_of_operator(use, op, factors, axes, batch, owner)
    return use


def _use_of_operator(
    use: Uses,
    op: Op,
    factors: dict[str, tuple[int, ...]],
    axes: LogicalAxes,
    batch: int,
    owner: dict[int, frozenset[int]],
) -> None:
    """What a declared operator of activations and weights sums over inside: what its weights make and contract again.

    Where it is foremost in each of several stacks of matrices it is a number of experts.
    """
    rule = op.rule
    assert rule is not None
    with_batch = [any(batch in dim for dim in axes.of_value[v]) for v in (*op.operands, *op.results) if v >= 0]
    matrices = [
        (owner.get(v, frozenset({v})), dims)
        for v, dims in zip(op.operands, rule.operands, strict=True)
        if v >= 0 and len(dims) > 1 and _compat.is_floating(axes.program.avals[v].dtype)
        and not any(batch in dim for dim in axes.of_value[v])
    ]  # fmt: skip
    if len(matrices) < 2 or not any(with_batch):
        return
    results = {f for dims in rule.results for dim in dims for f in dim}
    for f in rule.factors:
        having = [(weight, dims) for weight, dims in matrices if any(f.name in dim for dim in dims)]
        if f.kind not in ("reduce", "index") or f.name in results or len(having) < 2:
            continue
        for weight, dims in having:
            for c in {c for dim in dims for f in dim for c in factors.get(f, ())}:
                use.weights[c].add(weight)
        stacked = all(len(dims) > 2 and dims[0] == (f.name,) for _, dims in having)
        for c in factors.get(f.name, ()):
            if stacked:
                use.experts.add(c)
            else:
                use.made[c].add(having[0][0])
                use.contracted[c].add(having[-1][0])


def _use_of_contraction(
    use: Uses,
    op: Op,
    factors: dict[str, tuple[int, ...]],
    axes: LogicalAxes,
    batch: int,
    owner: dict[int, frozenset[int]],
    in_parameters: set[int],
) -> None:
    assert op.rule is not None
    sides = [{c for dim in axes.of_value[v] for c in dim} if v >= 0 else set() for v in op.operands[:2]]
    result = {c for dim in axes.of_value[op.results[0]] for c in dim}
    with_batch = [batch in side for side in sides]
    everywhere = [*op.rule.operands[:2], op.rule.results[0]]
    shared = {
        c for f in op.rule.factors
        if f.kind == "index" or all(any(f.name in dim for dim in dims) for dims in everywhere)
        for c in factors.get(f.name, ())
    }  # fmt: skip
    summed = {c for f in op.rule.factors if f.kind == "reduce" for c in factors.get(f.name, ())}
    if all(with_batch) and batch in result:  # activation with activation: attention
        if summed <= in_parameters:  # not with a sequence: a gradient sums query groups along with it
            use.inner |= summed
        use.heads |= shared - {batch}
    elif any(with_batch) and batch in result:  # activation with weight
        place = with_batch.index(False)
        value = op.operands[place]
        weight = owner.get(value, frozenset({value}))
        for c in sides[place]:
            use.weights[c].add(weight)
            if weight not in use.used and c not in shared:
                (use.contracted if c in summed else use.made)[c].add(weight)
        use.used.add(weight)
        if op.name != "conv_general_dilated":  # where it is the channel of a depthwise kernel
            use.experts |= shared
