"""Evaluates slices of a program on small arrays, in float64, through the rules' `local`.

A jaxpr has fixed shapes. The rules of the operators join the dimensions of all values of the slices into axes. Each
axis gets a small divisor of its size, and every operator is evaluated as on one shard of these sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.rewrite.constants import SMALL_SIZES
from autoshard.sharding.rewrite.numpy_operators import evaluate_operator
from autoshard.sharding.rewrite.slices import Refused
from autoshard.sharding.rewrite.values import Value
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.core.rule import Rule, RuleError, Shard
from autoshard.spmdrules.ir import program as _rules_registered  # noqa: F401
from autoshard.spmdrules.ir.dimension_classes import Nodes, join_factors

Axes = tuple[int, ...]  # the axes of one dimension, major to minor; none for a size of 1


@shown
@dataclass(frozen=True)
class _Applied:
    """One application of a rule, in the form that `join_factors` takes."""

    rule: Rule
    operands: tuple[int, ...]
    results: tuple[int, ...]


class SmallShapes:
    """The axes of the values of some slices, and a small size for each.

    Attributes:
        axes: value -> the axes of each of its dimensions.
        small: axis -> its small size.

    With `lenient`, an operator without a rule is no error. Its values cannot be evaluated.
    """

    def __init__(self, inner: Sequence[Value], others: Iterable[Value] = (), *, lenient: bool = False):
        values = list(dict.fromkeys([*others, *(v for one in inner for v in (*one.operands, one))]))
        numbers = {value: i for i, value in enumerate(values)}
        self.nodes = Nodes()
        dims = [tuple(self.nodes.new(s) for s in value.shape) for value in values]
        self.rules: dict[Value, tuple[Rule, dict[str, int]]] = {}
        whole: set[int] = set()
        for value in inner:
            try:
                rule = _rule(value)
            except Refused:
                if not lenient:
                    raise
                # Assume that operands of the result's shape have its dimensions. This only serves to locate values.
                for operand in value.operands:
                    if operand.shape == value.shape:
                        for a, b in zip(dims[numbers[operand]], dims[numbers[value]], strict=True):
                            self.nodes.join(a, b)
                continue
            applied = _Applied(rule, tuple(numbers[v] for v in value.operands), (numbers[value],))
            self.rules[value] = rule, join_factors(self.nodes, dims, applied)
        for rule, factors in self.rules.values():
            whole |= {leaf for f in rule.factors if not f.shardable and f.name in factors
                      for leaf in self.nodes.leaves(factors[f.name])}  # fmt: skip
        self.axes: dict[Value, tuple[Axes, ...]] = {
            value: tuple(tuple(self.nodes.leaves(d)) for d in dims[i]) for value, i in numbers.items()
        }
        self.small = self._small_sizes(whole)

    def _small_sizes(self, whole: set[int]) -> dict[int, int]:
        small: dict[int, int] = {}
        for leaf in dict.fromkeys(a for dims in self.axes.values() for dim in dims for a in dim):
            size = self.nodes.size[leaf]
            divisors = [n for n in SMALL_SIZES if size % n == 0]
            unused = [n for n in divisors if n not in small.values()]
            small[leaf] = size if leaf in whole else next(iter([*unused, *divisors]), size)
        return small

    def shape(self, value: Value) -> tuple[int, ...]:
        """The small shape of a value."""
        return tuple(math.prod(self.small[a] for a in dim) for dim in self.axes[value])

    def evaluate(self, inner: Sequence[Value], known: Mapping[Value, Any]) -> dict[Value, Any]:
        """Evaluate the values of a slice from known values, which have their small shapes.

        Raises:
            Refused: on a shard, a result has another shape than the rule of its operator gives.
        """
        env = dict(known)
        for value in inner:
            if value in env:
                continue
            rule, factors = self.rules[value]
            counts = {
                f.name: math.prod(self.nodes.size[a] // self.small[a] for a in self.nodes.leaves(factors[f.name]))
                for f in rule.factors if f.name in factors
            }  # fmt: skip
            params = value.eqn.params
            if rule.local is not None:
                params = rule.local(params, Shard(rule, counts, {}))
            result = evaluate_operator(value.op, params, *(env[v] for v in value.operands))
            if result.shape != self.shape(value):
                raise Refused(f"{value.op} cannot be evaluated on small arrays, so nothing can be proven")
            env[value] = result
        return env


def _rule(value: Value) -> Rule:
    try:
        found = rule_for(value.eqn.primitive, tuple(v.aval for v in value.operands), value.eqn.params)
    except RuleError as error:
        raise Refused(str(error)) from error
    if found is None or found.body is not None or len(found.results) != 1:
        raise Refused(f"{value.op} cannot be evaluated on small arrays, so nothing can be proven")
    return found
