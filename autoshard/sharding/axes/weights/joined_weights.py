"""Joined weights: what a program concatenates or stacks from several parameters, or splits and slices from one.

    jnp.concatenate([p["q"], p["k"], p["v"]], 1)      jnp.stack([layer["w"] for layer in p])      p["qkv"][:, :embed]

A dimension passes if the operator does not change it, like the rows in the first and the last example. If parameters
are sharded along a dimension that passes, each device joins its shards, and the result is gathered where it is used.
The gradient of the result is reduced to shards, and each device splits or joins those. So parameters are sharded along
a dimension that passes, if one has a divisible size. If none has, they are gathered before they are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.spmdrules.core.placement import Spec, exchanged_spec
from autoshard.spmdrules.core.rule import Dims
from autoshard.spmdrules.ir.program import Op

_JOINING = ("concatenate", "slice", "split", "stack", "unstack")


@shown
@dataclass(frozen=True)
class Join:
    """How one joined weight is computed.

    Attributes:
        operands: the stored operands: the value, and for each dimension of the result the dimension of the operand
            that passes to it, or None.
    """

    operands: tuple[tuple[int, tuple[int | None, ...]], ...]

    def spec(self, stored: Callable[[int], Spec], used: Spec) -> Spec:
        """Return the sharding in which the weight is computed.

        A dimension that passes has the mesh axes that shard it in all stored operands. All dimensions also have the
        mesh axes that shard them where the weight is used.

        Args:
            stored: the sharding of an operand.
            used: the sharding of the result where it is used.
        """
        kept = [
            tuple([() if d is None else spec[d] for d in dims])
            for spec, dims in ((stored(v), dims) for v, dims in self.operands)
        ]
        return exchanged_spec(tuple(map(_common, zip(*kept, strict=True))), used)

    def needed(self, stored: Callable[[int], Spec], used: Callable[[int], Spec], after: Spec) -> dict[int, Spec]:
        """Return the sharding that the operator needs of each stored operand.

        Args:
            stored: the sharding in which an operand is stored or computed.
            used: the sharding of an operand without storage.
            after: the sharding of the result.
        """
        found: dict[int, Spec] = {}
        for operand, dims in self.operands:
            before, needed = stored(operand), [*used(operand)]
            for d, axes in zip(dims, after, strict=True):
                if d is not None and {*before[d]} <= {*axes, *needed[d]}:
                    needed[d] = before[d]
            found[operand] = tuple(needed)
        return found


@shown
@dataclass(frozen=True)
class JoinedWeights:
    """The joined weights of a program.

    Attributes:
        joins: joined weight -> how it is computed.
        origin: each joined weight, its slices in loops, and the weights that are computed from it -> the joined weight.
        dims: the logical axes of a parameter, and of its moments -> the dimensions that do not pass.
    """

    joins: Mapping[int, Join] = field(default_factory=dict)
    origin: Mapping[int, int] = field(default_factory=dict)
    dims: Mapping[Leaves, frozenset[int]] = field(default_factory=dict)

    def join_of(self, op: Op) -> tuple[int, Join] | None:
        """Return the first result of an operator that is a joined weight, and how it is computed."""
        return next(((v, self.joins[v]) for v in op.results if v in self.joins), None)


def join_of(op: Op, result: int, sources: Collection[int]) -> Join | None:
    """Return how an operator joins parameters.

    Args:
        op: the operator.
        result: one of its results.
        sources: parameters, and the weights that are computed from them.

    Returns:
        None if it does not join any.
    """
    if op.name not in _JOINING or op.rule is None:
        return None
    after = op.rule.results[op.results.index(result)]
    operands = dict.fromkeys(
        (v, _passing(dims, after, op)) for v, dims in zip(op.operands, op.rule.operands, strict=True) if v in sources
    )
    return Join(tuple(operands)) if operands else None


def stacks_weights(op: Op) -> bool:
    """Whether an operator stacks arrays along a new dimension, as for a loop over layers. Scalars do not count."""
    if op.name not in ("concatenate", "stack") or len(op.eqn.outvars[0].aval.shape) < 2:
        return False
    return op.name == "stack" or all(v.aval.shape[op.eqn.params["dimension"]] == 1 for v in op.eqn.invars)


def _passing(before: Dims, after: Dims, op: Op) -> tuple[int | None, ...]:
    """Return the operand's dimension that each dimension of the result comes from; None for one that does not pass."""
    assert op.rule is not None
    whole = {f.name for f in op.rule.factors if not f.shardable}
    passing = {dim: d for d, dim in enumerate(before) if dim and whole.isdisjoint(dim)}
    return tuple(passing.get(dim) for dim in after)


def joined_weights(
    axes: LogicalAxes, joins: Mapping[int, Join], origin: Mapping[int, int], sources: Mapping[int, int]
) -> JoinedWeights:
    """Return the joined weights of a program, and the dimensions of parameters that do not pass.

    Args:
        axes: the program's logical axes.
        joins: see `JoinedWeights`.
        origin: see `JoinedWeights`.
        sources: each parameter, and each value that comes from one -> the parameter.
    """
    found: dict[Leaves, frozenset[int]] = {}
    left = [
        (operand, frozenset(range(len(axes.of_value[operand]))) - {*passing})
        for join in joins.values()
        for operand, passing in join.operands
    ]
    while left:
        value, dims = left.pop()
        base = origin.get(value, sources[value])
        dims = _same_dims(axes.of_value[value], axes.of_value[base], dims)
        if base in joins:
            left += [
                (operand, frozenset(d for n in dims if (d := passing[n]) is not None))
                for operand, passing in joins[base].operands
            ]
        else:
            found[axes.of_value[base]] = found.get(axes.of_value[base], frozenset()) | dims
    return JoinedWeights(joins, origin, found)


def _same_dims(own: Leaves, whole: Leaves, dims: Collection[int]) -> frozenset[int]:
    """Return the dimensions of a parameter that correspond to dimensions of a value computed from it.

    >>> _same_dims(((2,), (1,)), ((1,), (2,)), {0}), _same_dims(((1,), (1,)), ((3,), (1,), (1,)), {0})
    (frozenset({1}), frozenset({1}))
    """
    if (before := len(whole) - len(own)) >= 0 and whole[before:] == own:
        return frozenset(before + d for d in dims)
    classes = {c for d in dims for c in own[d]}
    return frozenset(d for d, dim in enumerate(whole) if not classes.isdisjoint(dim))


def _common(parts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the longest common prefix of tuples of mesh axes.

    >>> _common([("dp", "fsdp"), ("dp", "tp")])
    ('dp',)
    """
    found: list[str] = []
    for same in zip(*parts, strict=False):
        if len({*same}) > 1:
            break
        found.append(same[0])
    return tuple(found)
