"""Finds merged dimensions whose elements may be in any order.

A reshape merges `[time, rows]` to `[time * rows]`, later operators compute each element apart or add them up, and
another reshape splits the dimension again. Nothing in between depends on where an element is. So each device may merge
the rows that it holds, although these are not consecutive elements of the whole dimension.

The order matters to what counts, compares or moves positions: `iota`, sorting, slices, indices, convolutions along the
dimension, and any operator that is not in `proven_operators.py`. It also matters to inputs, results and constants of
the program.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np

from autoshard import _compat
from autoshard.sharding.axes.merged.proven_operators import PROVEN
from autoshard.spmdrules.core.registry import registered
from autoshard.spmdrules.core.rule import POSITIONS, Factor, Rule
from autoshard.spmdrules.ir.program import IMPLEMENTATION, Block, Op, Program, walk

Dim = tuple[int, ...]  # the logical axes of one dimension, major to minor

# Calls whose derivative or transpose is a function of its own, which nothing here rewrites.
_OWN_DERIVATIVES = frozenset({"call_hi_primitive", "custom_linear_solve", "custom_vjp_call", "linear_call"})
# Calls with a second definition that has reshapes of its own: a derivative, or what the compiler puts in their place.
_DEFINED_TWICE = frozenset({"composite", "custom_jvp_call"})


def unordered_dims(program: Program, of_value: Sequence[tuple[Dim, ...]]) -> frozenset[Dim]:
    """Return the merged dimensions whose elements may be in any order, as long as all values have the same one.

    A dimension is left out if one of its minor axes is also a minor axis of an ordered dimension. Otherwise values
    would have to be resharded between the two.

    Args:
        program: the program.
        of_value: for each value the logical axes of its dimensions.
    """
    merged = {dim for dims in of_value for dim in dims if len(dim) > 1}
    ordered = {dim for dim in merged if len({*dim}) < len(dim)}
    ordered |= {dim for dim in _ordered(program, of_value, merged) if len(dim) > 1}
    while True:
        minor = {axis for dim in ordered for axis in dim[1:]}
        more = {dim for dim in merged - ordered if not minor.isdisjoint(dim[1:])}
        if not more:
            return frozenset(merged - ordered)
        ordered |= more


def is_plain_reshape(op: Op) -> bool:
    """Whether an operator is a reshape that reads its operand in order and has a fixed shape."""
    return op.name == "reshape" and op.eqn.params.get("dimensions") is None and len(op.operands) == 1


def unordered_factors(eqn: Any, rule: Rule) -> frozenset[str]:
    """Return the factors of an operator along which it treats all elements alike, wherever they are.

    It computes each one apart, or adds them up. A permutation of the operands' elements along such a factor then
    permutes those of the results in the same way.

    Args:
        eqn: the operator's equation.
        rule: its rule.
    """
    if eqn.primitive not in _proven_primitives():
        return frozenset()
    name = eqn.primitive.name
    fixed = {factor for dim in rule.compound_dims for factor in dim}
    if eqn.params.get("indices_are_sorted"):  # the indices would not be sorted
        fixed |= {factor for dim in rule.operands[1] for factor in dim}
    if name == "ragged_dot_general":  # it sums the rows of each group, which are consecutive
        fixed |= {f.name for f in rule.factors if f.kind == "reduce"}
    copies = name == "broadcast_in_dim"
    return frozenset(f.name for f in rule.factors if f.name not in fixed and (copies or _treats_alike(rule, f)))


@functools.cache
def _proven_primitives() -> frozenset[Any]:
    """Return the primitives of `PROVEN`. A primitive of the same name with a rule of the user's own is not one."""
    return frozenset(
        primitive
        for primitive, rule in registered()
        if primitive.name in PROVEN and rule.__module__.startswith("autoshard.spmdrules.families.")
    )


def _treats_alike(rule: Rule, factor: Factor) -> bool:
    """Whether a factor's kind says that an operator treats all elements along it alike."""
    if factor.kind == "reduce":
        return factor.op not in POSITIONS
    return factor.kind == "pass" and any((factor.name,) in dims for dims in rule.operands)


def _ordered(program: Program, of_value: Sequence[tuple[Dim, ...]], merged: Set[Dim]) -> Iterator[Dim]:
    """Yield the dimensions whose order matters somewhere: all that are in `merged`, and some others."""
    for v in (*program.inputs, *program.outputs):
        yield from of_value[v]
    is_merged = {dims: not merged.isdisjoint(dims) for dims in {*of_value}}
    # The last element is for literals, which have the number -1.
    yield from _ordered_in(program.block, of_value, [*(is_merged[dims] for dims in of_value), False], False)


def _ordered_in(
    block: Block, of_value: Sequence[tuple[Dim, ...]], is_merged: Sequence[bool], kept: bool
) -> Iterator[Dim]:
    """Yield the dimensions whose order matters in a block; if it is `kept`, those of all its values.

    Operators without nested ones that take and return no merged dimension are left out.
    """
    jaxpr = _compat.open_jaxpr(block.jaxpr)
    constants = {id(v) for v in jaxpr.constvars}
    for atom, v in zip(jaxpr.outvars, block.outputs, strict=True):
        if id(atom) in constants or isinstance(atom, _compat.Literal):
            yield from of_value[v]
    for op in block.ops:
        if not op.blocks and not any([is_merged[v] for v in (*op.operands, *op.results)]):
            continue
        values = [v for v in (*op.operands, *op.results) if v >= 0]
        for atom, v in zip(op.eqn.invars, op.operands, strict=True):
            if v >= 0 and id(atom) in constants:
                yield from of_value[v]
        if kept or (op.rule is None and not op.blocks):
            for v in values:
                yield from of_value[v]
        elif op.rule is not None:
            yield from _ordered_at(op, op.rule, of_value)
        for edge in op.edges:
            outer = of_value[edge.outer]
            if edge.stacked:
                yield outer[0]
                outer = outer[1:]
            for pair in zip(outer, of_value[edge.inner], strict=True):
                if pair[0] != pair[1]:
                    yield from pair
        for inner in op.blocks:
            # A literal array is a constant inside.
            if any(isinstance(atom, _compat.Literal) and np.ndim(atom.val) for atom in op.eqn.invars):
                for v in inner.inputs:
                    yield from of_value[v]
            derived = op.name in _DEFINED_TWICE and any(each.name == "reshape" for each in walk(inner))
            unknown = inner.param == IMPLEMENTATION or op.name in _OWN_DERIVATIVES or derived
            yield from _ordered_in(inner, of_value, is_merged, kept or unknown)


def _ordered_at(op: Op, rule: Rule, of_value: Sequence[tuple[Dim, ...]]) -> Iterator[Dim]:
    """Yield the dimensions whose order matters to one operator."""
    if is_plain_reshape(op):
        before, after = of_value[op.operands[0]], of_value[op.results[0]]
        if [axis for dim in before for axis in dim] != [axis for dim in after for axis in dim]:
            yield from (*before, *after)
        return
    places = [*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True)]
    free = unordered_factors(op.eqn, rule)
    seen: dict[str, Dim] = {}
    for v, dims in places:
        for d, factors in enumerate(dims):
            own = of_value[v][d] if v >= 0 else ()
            if len(factors) != 1 or factors[0] not in free:
                yield own
            elif seen.setdefault(factors[0], own) != own:
                yield from (seen[factors[0]], own)
