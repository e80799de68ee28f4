"""Mutants: rules with one mistake each, which the oracle must detect.

    python -m tests.spmdrules.mutants [name ...]     the mutants of all rules, or of the named primitives' rules

A mutant is caught if the oracle, which knows no expected map, finds it wrong or incomplete by running shards. Changes
that are not mistakes are not mutants: renaming dimensions that are never sharded, dropping a clause that another one
implies, and claims that hold up to rounding (`SAME` lists the others). Rows that the oracle cannot run have no mutants,
and neither have rows with empty arrays.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from autoshard.sharding.oracle.cases import Case, collect, is_key
from autoshard.sharding.oracle.rule_check import check_case
from autoshard.spmdrules.core.rule import Dims, Factor, Reduction, Rule, RuleError
from tests.spmdrules.rows import Row, all_rows

OTHER_OP: dict[Reduction, Reduction] = {
    "sum": "max", "max": "sum", "min": "max", "mul": "sum", "and": "or", "or": "and", "xor": "or",
    "argmax": "argmin", "argmin": "argmax",
}  # fmt: skip


# By row: properties that hold, but that the more cautious rule does not declare.
SAME = {
    "shift_left": ("linear in 0",),  # the bits shifted out are lost from the terms and from their sum
    "convert_element_type-of_integers": ("linear in 0",),  # except for sums that overflow
    "convert_element_type-to_other": ("linear in 0",),  # except for sums that overflow
}


@dataclass(frozen=True)
class Mutant:
    """A broken rule and its mistake."""

    how: str
    rule: Rule


def mutants(rule: Rule, sums: Sequence[int] | None = None) -> Iterator[Mutant]:
    """Yields every rule that is one mistake away from this one.

    Args:
        rule: the rule.
        sums: the operands that can be partial sums, for which a wrong `linear` is tried; by default all.
    """
    sums = range(len(rule.operands)) if sums is None else sums
    for how, make in _mistakes(rule, sums):
        try:
            broken = make()
        except RuleError:
            continue  # the rule itself rejects this mistake
        if broken != rule:
            yield Mutant(how, broken)


def _mistakes(rule: Rule, sums: Sequence[int]):
    for f in rule.factors:
        if f.size in (0, 1):
            continue  # never sharded
        if f.kind == "whole":
            yield f"{f.name} is not whole", lambda f=f: _changed(rule, replace(f, kind="pass"))
            continue
        if not any(f.name in dim for dims in rule.operands for dim in dims):
            continue  # only a result has this factor (iota, broadcasts), so no operand is sharded along it
        yield f"{f.name} is whole", lambda f=f: _changed(rule, replace(f, kind="whole", op=None))
        if f.op is not None:
            other = OTHER_OP[f.op]
            yield f"{f.name}:{other}", lambda f=f, other=other: _changed(rule, replace(f, op=other))
            yield f"{f.name} is not reduced", lambda f=f: _changed(rule, replace(f, kind="pass", op=None))
        if f.kind in ("index", "offset", "halo"):
            yield f"{f.name} passes", lambda f=f: _changed(rule, replace(f, kind="pass")).where(body=None, local=None)
        for r, dims in enumerate(rule.results):
            if any(f.name in dim for dim in dims) and any(f.name in dim for o in rule.operands for dim in o):
                yield f"{f.name} dropped from result {r}", lambda f=f, r=r: _dropped(rule, f, r)
    for side in ("operands", "results"):
        arrays = getattr(rule, side)
        for i, dims in enumerate(arrays):
            for a, b in itertools.combinations(range(len(dims)), 2):
                if not any(_can_shard(rule, f) for f in (*dims[a], *dims[b])):
                    continue
                yield (
                    f"{side} {i}: dimensions {a} and {b} swapped",
                    lambda *x, s=side, i=i, a=a, b=b: rule.where(**{s: _swapped(getattr(rule, s), i, a, b)}),
                )
    for group in rule.linear:
        others = [set(g) for g in rule.linear if g != group] + [set(rule.moves)] * bool(rule.moves)
        if any(set(group) <= other or other <= set(group) for other in others):
            continue  # moved operands are linear too, and a group that contains another group adds nothing
        yield f"not linear in {group}", lambda g=group: rule.where(linear=tuple(x for x in rule.linear if x != g))
    for i in sums:
        if not any(i in group for group in rule.linear) and i not in rule.moves:
            yield f"linear in {i}", lambda i=i: rule.where(linear=(*rule.linear, (i,)))


def _can_shard(rule: Rule, name: str) -> bool:
    factor = rule.factor(name)
    return factor.kind != "whole" and factor.size not in (0, 1)


def _changed(rule: Rule, factor: Factor) -> Rule:
    return rule.where(factors=tuple(factor if f.name == factor.name else f for f in rule.factors))


def _dropped(rule: Rule, factor: Factor, result: int) -> Rule:
    """Returns the rule with a new whole factor in place of `factor` in one result."""
    new_factor = Factor(f"{factor.name}_own", factor.size, "whole")
    dims = tuple(tuple(new_factor.name if f == factor.name else f for f in dim) for dim in rule.results[result])
    results = tuple(dims if r == result else other for r, other in enumerate(rule.results))
    used = {f for array in (*rule.operands, *results) for dim in array for f in dim}
    return rule.where(results=results, factors=(*(f for f in rule.factors if f.name in used), new_factor))


def _swapped(arrays: Sequence[Dims], i: int, a: int, b: int) -> tuple[Dims, ...]:
    dims = list(arrays[i])
    dims[a], dims[b] = dims[b], dims[a]
    return tuple(tuple(dims) if k == i else other for k, other in enumerate(arrays))


def case_of(row: Row) -> tuple[Case, Rule]:
    """Returns the row's main equation as the oracle sees it, and its rule with sizes."""
    case = next(case for case in collect(row.fn, row.args) if case.name == row.primitive)
    rule = row.rule()
    return case, rule.bind(*case.avals) if any(f.size is None for f in rule.factors) else rule


def survivors(row: Row) -> tuple[int, list[Mutant]]:
    """Returns the number of mutants of a row's rule, and those that the oracle does not detect."""
    if row.unchecked:
        return 0, []
    case, rule = case_of(row)
    if not all(math.prod(a.shape) for a in (*case.avals, *case.results)):
        return 0, []
    summed = all(not is_key(a.dtype) and a.dtype != bool for a in case.results)
    sums = [i for i, a in enumerate(case.avals) if summed and not is_key(a.dtype) and a.dtype != bool]
    rounds = any(jnp.issubdtype(a.dtype, jnp.inexact) and a.dtype.itemsize < 4 for a in (*case.avals, *case.results))
    tried = [m for m in mutants(rule, sums) if m.how not in SAME.get(row.id, ()) and not (rounds and "linear" in m.how)]
    return len(tried), [m for m in tried if not check_case(case, partitioner=False, rule=m.rule)]


def main(names: Sequence[str]) -> None:
    """Prints the mutants that survive, row by row, and the share that is caught."""
    total = alive = 0
    for row in all_rows():
        if names and row.primitive not in names:
            continue
        count, survived = survivors(row)
        total, alive = total + count, alive + len(survived)
        for mutant in survived:
            print(f"{row.id}: {mutant.how}: '{mutant.rule.text}' for '{row.rule().text}'", flush=True)
    print(f"{total - alive} of {total} mutants caught, {100 * (1 - alive / max(total, 1)):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
