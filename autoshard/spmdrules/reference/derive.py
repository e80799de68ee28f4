"""Derives the rule of a function from the primitives that it is made of.

Dimensions of arguments and results that the primitives' rules join (`ir.dimension_classes`) are one factor. Each factor
is sharded alone over one mesh axis; factors major to it in a dimension are sharded fully over axes of their own. A walk
over the program then shows what sharding the factor requires:

    pass      nothing; results that have the factor are sharded in the same way
    reduce    nothing; results that lack the factor are partial
    offset    nothing, but a shard needs to know where it starts (positions, random bits)
    index     as pass or reduce, but the factor is addressed by values inside the function
    inside    partial terms are reduced inside, nothing else moves, and results that have the factor are sharded
    halo      neighbouring shards would have to exchange borders, which no plan does yet
    whole     something is gathered, or moved from one dimension to another
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.spmdrules.catalogue.entry import Operator
from autoshard.spmdrules.core.placement import Placement, Spec
from autoshard.spmdrules.ir.dimension_classes import DimensionClasses, unify
from autoshard.spmdrules.ir.program import Program, build
from autoshard.spmdrules.propagation.walk import Walk
from autoshard.spmdrules.reference.derived_rule import KINDS, Derived, DerivedFactor, DerivedKind, has_factor

Leaf = tuple[int, int]  # a node of the union-find, and the number of its occurrence within one array
Leaves = tuple[tuple[Leaf, ...], ...]  # the leaves of each dimension of an array, major to minor

_AXIS = "sharded"  # the mesh axis that shards the factor under examination


def derive(fn: Any, *args: Any) -> Derived:
    """Derives the rule of a function of arrays from the primitives that it is made of.

    Args:
        fn: any traceable function.
        *args: pytrees of arrays or `ShapeDtypeStruct`s; every leaf is an operand. Unrelated dimensions get separate
            factors even if they have the same size.

    Example:
        >>> import jax.numpy as jnp
        >>> x, scale = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.float32)
        >>> derive(lambda x, scale: x / jnp.sqrt((x * x).mean(-1, keepdims=True)) * scale, x, scale).text
        'a b c, c -> a b c; inside c'
    """
    closed = jax.make_jaxpr(fn)(*args)
    program = build(closed)
    return _Derivation(closed, program, unify(program)).derived()


def derive_gradient(op: Operator) -> Derived:
    """Derives the rule of an operator's gradient.

    Its operands are the arguments and the cotangents of the results, its results the gradients of the arguments. A
    cotangent has the factors of its result, and a gradient those of its argument, even if the gradient uses only the
    argument's shape.

    Args:
        op: an operator that has a gradient.
    """
    gradient = op.gradient
    assert gradient is not None, f"{op.name} has no gradient"
    closed = jax.make_jaxpr(gradient.fn)(*gradient.args)
    program = build(
        jax.make_jaxpr(lambda *given: (gradient.fn(*given), _differentiable_results(op, given)))(*gradient.args)
    )
    joined = unify(program)
    starts = [0, *itertools.accumulate(len(jax.tree.leaves(arg)) for arg in op.args)]
    primals = [k for i in op.wrt for k in range(starts[i], starts[i + 1])]
    cotangents = range(starts[-1], len(program.inputs))
    for k, result in zip([*primals, *cotangents], program.outputs, strict=True):
        for left, right in zip(joined.dims[program.inputs[k]], joined.dims[result], strict=True):
            joined.nodes.join(left, right)
    return _Derivation(closed, program, joined).derived()


def _differentiable_results(op: Operator, args: Sequence[Any]) -> list[Any]:
    """Returns the results of an operator that have a gradient."""
    results = jax.tree.leaves(op.fn(*args[: len(op.args)]))
    return [x for x in results if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]


@shown
@dataclass(eq=False)
class _RecordingWalk(Walk):
    """A walk that also records the operation that each reshard reduces by."""

    terms: list[str | None] = field(default_factory=list)

    def record(self, name: str, operand: int, value: int, target: Placement, times: float, eqn: Any) -> None:
        """Records every step that moves a value to `target`."""
        held, known = dict(self.placement(value).partial), len(self.reshards)
        super().record(name, operand, value, target, times, eqn)
        self.terms += [held.get(step.axis) for step in self.reshards[known:]]


class _Derivation:
    """Derives the rule of a closed jaxpr.

    `program` has the same inputs and first results, and may have further results; `joined` are its dimension classes.
    """

    def __init__(self, closed: Any, program: Program, joined: DimensionClasses):
        self.program = build(_compat.dce(closed))  # unused code must not affect the rule
        self.joined = joined
        self.kinds = _kinds(program, joined)
        self.operand_count = len(program.inputs)
        outputs = program.outputs[: len(self.program.outputs)]
        self.arrays = [_leaves(joined, v) for v in (*program.inputs, *outputs)]
        used = {v for op in self.program.ops() for v in op.operands} | set(self.program.outputs)
        self.used = [v in used for v in self.program.inputs]

    def derived(self) -> Derived:
        """Returns the derived rule."""
        leaves = list(dict.fromkeys(leaf for array in self.arrays for dim in array for leaf in dim))
        found = {leaf: self.classify(leaf) for leaf in leaves}
        while pair := self.adjacent_pair(found):
            self.merge(found, *pair)
        self.simplify(found)
        names = {leaf: _letter(k) for k, leaf in enumerate(found)}
        arrays = [tuple(tuple(names[leaf] for leaf in dim) for dim in array) for array in self.arrays]
        factors = tuple(replace(f, name=names[leaf]) for leaf, f in found.items())
        return Derived(tuple(arrays[: self.operand_count]), tuple(arrays[self.operand_count :]), factors)

    def classify(self, leaf: Leaf) -> DerivedFactor:
        """Finds the kind of a factor: the better of its kinds with and without a request for sharded results."""
        size = self.joined.nodes.size[leaf[0]]
        as_whole = DerivedFactor("", size, "whole", (None,) * (len(self.arrays) - self.operand_count))
        if as_whole.fewest_shards < 2:
            return as_whole
        found = self.shard(leaf, as_whole, True)
        if found.kind not in ("pass", "reduce"):
            found = min(found, self.shard(leaf, as_whole, False), key=lambda f: KINDS.index(f.kind))
        return replace(found, kind=self.refine_kind(leaf, found))

    def refine_kind(self, leaf: Leaf, found: DerivedFactor) -> DerivedKind:
        """Refines the kind of a factor by the kinds that it has in the program's operators."""
        kinds = self.kinds.get(leaf[0], set())
        if found.kind == "whole" and "halo" in kinds and "whole" not in kinds:
            return "halo"
        if found.kind not in ("pass", "reduce"):
            return found.kind
        pairs = zip(found.partial, self.arrays[self.operand_count :], strict=True)
        summed = all(op == (None if has_factor(dims, leaf) else "sum") for op, dims in pairs)
        if "index" in kinds and "reduce" not in kinds and summed:
            return "index"
        return "offset" if found.kind == "pass" and "offset" in kinds else found.kind

    def shard(self, leaf: Leaf, as_whole: DerivedFactor, request_results: bool) -> DerivedFactor:
        """Shards a factor in all arguments that have it, and classifies it by one walk.

        Args:
            leaf: the factor.
            as_whole: the factor as `whole`.
            request_results: whether results that have the factor are requested sharded.
        """
        majors = self.majors(leaf)
        axes = {leaf: _AXIS} | {major: f"major{k}" for k, major in enumerate(majors)}
        mesh = {_AXIS: as_whole.fewest_shards} | {axes[major]: self.joined.nodes.size[major[0]] for major in majors}
        specs = [_spec(array, axes) for array in self.arrays]
        inputs, results = specs[: self.operand_count], specs[self.operand_count :]
        walk = _RecordingWalk(self.program, mesh, list(map(Placement, inputs)), set())
        has = [has_factor(array, leaf) for array in self.arrays]
        result_has = has[self.operand_count :]
        ends = walk.run([s if request_results and h else None for s, h in zip(results, result_has, strict=True)])
        follows = [end.spec == s for end, s, h in zip(ends, results, result_has, strict=True) if h]
        argument_has = any(h and used for h, used in zip(has, self.used, strict=False))
        return _classify(as_whole, walk, ends, all(follows), argument_has)

    def majors(self, leaf: Leaf) -> list[Leaf]:
        """Returns the factors major to a factor, and those major to them. Sharding it requires sharding them fully."""
        found: dict[Leaf, None] = {}
        pending = [leaf]
        while pending:
            minor = pending.pop()
            dims = [dim for array in self.arrays for dim in array if minor in dim]
            before = {other: None for dim in dims for other in dim[: dim.index(minor)] if other != leaf}
            pending += [other for other in before if other not in found]
            found |= before
        return list(found)

    def adjacent_pair(self, found: Mapping[Leaf, DerivedFactor]) -> tuple[Leaf, Leaf] | None:
        """Returns two factors that are always adjacent and have the same meaning: they can be one factor."""
        dims = [dim for array in self.arrays for dim in array]
        after: dict[Leaf, set[Leaf | None]] = {}
        before: dict[Leaf, set[Leaf | None]] = {}
        for dim in dims:
            for left, right in zip((None, *dim), (*dim, None), strict=True):
                if left is not None:
                    after.setdefault(left, set()).add(right)
                if right is not None:
                    before.setdefault(right, set()).add(left)
        for leaf, following in after.items():
            other = next(iter(following))
            if len(following) == 1 and other is not None and before[other] == {leaf}:
                if replace(found[leaf], size=1) == replace(found[other], size=1):
                    return leaf, other
        return None

    def merge(self, found: dict[Leaf, DerivedFactor], left: Leaf, right: Leaf) -> None:
        """Merges two factors into the left one."""
        found[left] = replace(found[left], size=found[left].size * found.pop(right).size)
        self.arrays = [tuple(tuple(leaf for leaf in dim if leaf != right) for dim in array) for array in self.arrays]

    def simplify(self, found: dict[Leaf, DerivedFactor]) -> None:
        """Merges the factors of a dimension into one if they are whole in every dimension that has them."""
        dims = [dim for array in self.arrays for dim in array]
        mixed = {leaf for dim in dims if any(found[leaf].kind != "whole" for leaf in dim) for leaf in dim}
        merged: dict[tuple[Leaf, ...], Leaf] = {
            dim: dim[0] for dim in dims if len(dim) > 1 and not mixed.intersection(dim)
        }
        for number, dim in enumerate(merged):
            factors = [found[leaf] for leaf in dim]
            because = tuple(dict.fromkeys(name for f in factors for name in f.because))
            merged[dim] = -1 - number, 0
            found[merged[dim]] = replace(factors[0], size=math.prod(f.size for f in factors), because=because)
        self.arrays = [tuple((merged[dim],) if dim in merged else dim for dim in array) for array in self.arrays]
        order = dict.fromkeys(leaf for array in self.arrays for dim in array for leaf in dim)
        remaining = {leaf: found[leaf] for leaf in order}
        found.clear()
        found.update(remaining)


def _classify(
    as_whole: DerivedFactor, walk: _RecordingWalk, results: Sequence[Placement], follows: bool, argument_has: bool
) -> DerivedFactor:
    """Returns the factor with its kind, which follows from the reshards of a walk and the placements of its results.

    Args:
        as_whole: the factor as `whole`.
        walk: the walk.
        results: the placements of the results.
        follows: whether the results that have the factor are sharded.
        argument_has: whether a used argument has the factor. If none does, a slice only shards an array that was
            computed replicated.
    """
    steps = list(zip(walk.reshards, walk.terms, strict=True))
    moved = [r for r, op in steps if op is None and (r.kind != "slice" or r.operator == "output" or not argument_has)]
    if moved or not follows:
        return replace(as_whole, because=tuple(dict.fromkeys(r.operator for r in moved if r.operator != "output")))
    partial = tuple(dict(result.partial).get(_AXIS) for result in results)
    inside = tuple(dict.fromkeys(op for r, op in steps if op is not None and r.axis == _AXIS))
    kind: DerivedKind = "inside" if inside else "reduce" if any(partial) else "pass"
    return replace(as_whole, kind=kind, partial=partial, inside=inside)


def _leaves(joined: DimensionClasses, value: int) -> Leaves:
    """Returns the leaves of a value's dimensions; one that occurs twice becomes two, as a rule cannot shard both."""
    occurrence: dict[int, int] = {}

    def number(node: int) -> Leaf:
        occurrence[node] = occurrence.get(node, -1) + 1
        return node, occurrence[node]

    return tuple(tuple(map(number, joined.nodes.leaves(node))) for node in joined.dims[value])


def _kinds(program: Program, joined: DimensionClasses) -> dict[int, set[str]]:
    """Returns, for each leaf, the kinds that its factors have in the program's operators."""
    found: dict[int, set[str]] = {}
    for op, factors in zip(program.ops(), joined.factors, strict=True):
        for f in op.rule.factors if op.rule is not None else ():
            for leaf in joined.nodes.leaves(factors.get(f.name, 0)):
                found.setdefault(leaf, set()).add(f.kind)
    return found


def _spec(array: Leaves, axes: Mapping[Leaf, str]) -> Spec:
    return tuple(tuple(axes[leaf] for leaf in dim if leaf in axes) for dim in array)


def _letter(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[number % 26] + (str(number // 26) if number >= 26 else "")
