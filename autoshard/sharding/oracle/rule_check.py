"""The oracle: are the rules of a function's operators true, and do they say all that they could?

No expected mapping is compared with. Every different equation is *run* on the shards that its rule declares, and the
results, put together as the rule declares, are compared with the whole; then the partitioner gets the same shardings,
its program is run too, and its collectives are counted.

    wrong         the rule promises what the operator does not do
    missing       the operator allows what the rule does not offer
    partitioner   the rule is true, and XLA's partitioner makes something wrong or dear of it
    unknown       there is no rule
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from autoshard._shown import shown
from autoshard.sharding.oracle.cases import Case, brief, collect
from autoshard.sharding.oracle.missing_strategies import check_linear, fewest, missing_factors
from autoshard.sharding.oracle.partitioner_check import check_partitioner
from autoshard.sharding.oracle.probe_values import difference, trials
from autoshard.sharding.oracle.shard_runner import run_strategies
from autoshard.sharding.oracle.shards import Disagreement, Grid, join
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.core.rule import POSITIONS, Rule, Shard
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from autoshard.spmdrules.families.manual_sharding import communicates
from autoshard.spmdrules.ir.program import build
from autoshard.spmdrules.propagation.input_specs import needs_function

FindingKind = Literal["wrong", "missing", "partitioner", "unknown"]
_ADVICE = {
    "wrong": "Correct the rule, or make the factor whole.",
    "missing": "Offer it in the rule.",
    "partitioner": "Keep it out of plans, or list it in KNOWN_PARTITIONER_FAULTS with the reason.",
    "unknown": "Register one with @rule; until then its operands and results are replicated.",
}


@shown
@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be with the rule of one operator.

    Attributes:
        kind: see the module's head.
        primitive: the operator.
        factors: the factors that were cut, none where it is not about a factor.
        mesh: how many ways each was cut, such as "2" or "2x2".
        message: what is wrong.
        rule: the rule's text.
        source: the user's line that the operator came from.
    """

    kind: FindingKind
    primitive: str
    factors: tuple[str, ...]
    mesh: str
    message: str
    rule: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        cut = f", {' and '.join(self.factors)} cut {self.mesh} ways" if self.factors else ""
        text = f" Its rule is '{self.rule}'." if self.rule else ""
        return f"{self.kind}: {self.primitive}{where}{cut}: {self.message}.{text} {_ADVICE[self.kind]}"


def check_rule(fn: Any, *args: Any, partitioner: bool = True) -> list[Finding]:
    """Checks the rule of every operator that a function uses, calls, loops and branches entered.

    Args:
        fn: any traceable function.
        *args: its arguments, pytrees of arrays or `ShapeDtypeStruct`s. Small even sizes (4, 6, 8) are enough.
        partitioner: also compile each strategy for 2 x 2 devices, compare, and count collectives.

    Returns:
        What is wrong or missing; empty where all is well. What an `@operator` around a `jax.ffi` call declares whole
        is left so: foreign code may read past the end of pieces that its author ruled out.

    Raises:
        ValueError: there are fewer devices than the partitioner's part needs.
        TypeError: `fn` is no function, or an argument nothing that JAX can trace.

    Example:
        >>> import jax.numpy as jnp
        >>> check_rule(lambda a, b: a @ b, jnp.ones((4, 6)), jnp.ones((6, 8)), partitioner=False)
        []
    """
    needs_function("check_rule", fn)
    if partitioner and jax.device_count() < 4:
        raise ValueError(
            f"check_rule: the partitioner's part needs 4 devices, there are {jax.device_count()}. Set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 before jax starts, or pass partitioner=False."
        )
    findings = {f: None for case in collect(fn, args) for f in check_case(case, partitioner=partitioner)}
    return list(findings)


def check_case(case: Case, partitioner: bool = True, rule: Rule | None = None) -> list[Finding]:
    """`check_rule` for one equation; `rule` is checked in place of the registered one.

    Of a `shard_map` whose shards talk to each other nothing can be said: none of them can be run by itself.
    """
    if communicates(case.eqn):
        return []
    try:
        rule = rule or _rule(case)
    except Exception as error:  # the author of a rule may have got anything wrong: that it raises is the finding
        return [_finding(case, None, "wrong", {}, f"its rule cannot be made: {brief(error)}")]
    if rule is None:
        return [_finding(case, None, "unknown", {}, "there is no rule for it")]
    if mismatch := _shape_mismatch(case, rule):
        return [_finding(case, rule, "wrong", {}, mismatch)]
    operands = trials(case)
    findings = list(check_shards(case, rule, operands))
    findings += [_finding(case, rule, kind, {}, f"it {text}") for kind, text in check_linear(case, rule, operands)]
    undeclared = [] if _is_foreign(case) else [*missing_factors(case, rule), *_kinds_that_hold(case, rule)]
    for name, how in undeclared:
        text = f"'{name}' is whole in the rule, but pieces can be joined: {how}"
        findings.append(_finding(case, rule, "missing", {name: 2}, text))
    if partitioner and not any(f.kind == "wrong" for f in findings):
        for factors, fault in check_partitioner(case, rule, strategies(rule), operands[1]):
            findings.append(_finding(case, rule, "partitioner", dict.fromkeys(factors, 2), fault))
    return findings


def strategies(rule: Rule) -> list[dict[str, int]]:
    """What is tried: every factor alone, and every two of them, each cut into the fewest pieces that divide it."""
    ways = {f.name: n for f in rule.factors if f.shardable and (n := fewest(f.size))}
    # Positions are of the whole array: they are decided last, when the other factors are joined again.
    names = sorted(ways, key=lambda name: rule.factor(name).op not in POSITIONS)
    groups = [*((name,) for name in names), *itertools.combinations(names, 2)]
    found = [{name: ways[name] for name in group} for group in groups]
    # A shard in the middle has two neighbours and an offset that is no multiple of half.
    finer = (f for f in rule.factors if f.kind in ("halo", "index", "offset"))
    return found + [{f.name: 4} for f in finer if f.size and f.size >= 8 and f.size % 4 == 0]


def _kinds_that_hold(case: Case, rule: Rule) -> Iterator[tuple[str, str]]:
    """Whole factors that the rule's own way of running on a shard would do for, were they declared otherwise."""
    taken = {name for dims in rule.operands for dim in dims for name in dim}
    able = [f for f in rule.factors if f.kind == "whole" and f.size and f.size % 2 == 0 and f.name in taken]
    others: list[dict[str, Any]] = []
    if rule.body is not None or rule.local is not None:
        others += [{"kind": "pass"}]
        if not any(a.dtype == np.bool_ for a in case.results):  # of which there are no partial sums
            others += [{"kind": "index"}, *({"kind": "reduce", "op": op} for op in ("sum", "mul", "max", "min"))]
    if len(rule.operands) == 1 and all(jnp.issubdtype(a.dtype, jnp.integer) for a in case.results):
        others += [{"kind": "reduce", "op": op} for op in POSITIONS]
    if not able or not others:
        return
    operands = trials(case, 12)
    wholes = [case.run(x) for x in operands]
    if sum(any(len(np.unique(np.asarray(x, np.complex128))) > 1 for x in whole) for whole in wholes) < len(wholes) / 2:
        return  # results that are all the same are evidence of nothing
    for f in able:
        positions = all(((x >= 0) & (x < f.size)).all() for whole in wholes for x in whole)
        for other in others:
            if other.get("op") in POSITIONS and not positions:
                continue
            changed = rule.where(factors=tuple(replace(f, **other) if g == f else g for g in rule.factors))
            (outcome,) = run_strategies(case, changed, [{f.name: 2}], operands)
            if _disagreement(changed, {f.name: 2}, outcome, operands, wholes) is None:
                yield f.name, f"as a factor of kind '{':'.join(other.values())}'"
                break


def _is_foreign(case: Case) -> bool:
    """Whether it is an operator around foreign code.

    That may trust its author that it gets no piece of what is whole: LAPACK reads past the end of a matrix that is not
    square.
    """
    if not is_operator(case.eqn.primitive):
        return False
    inside = build(jax.make_jaxpr(case.eqn.params["fn"])(*case.operands))
    return any(op.name == "ffi_call" for op in inside.ops())


def _rule(case: Case) -> Rule | None:
    rule = rule_for(case.eqn.primitive, case.avals, case.eqn.params)
    if rule is not None and any(f.size is None for f in rule.factors):
        rule = rule.bind(*case.avals)
    return rule


def _shape_mismatch(case: Case, rule: Rule) -> str | None:
    whole = Shard(rule, {}, {})
    for side, avals, arrays in (("operand", case.avals, rule.operands), ("result", case.results, rule.results)):
        if len(avals) != len(arrays):
            return f"it has {len(avals)} {side}s, the rule names {len(arrays)}"
        for i, (aval, dims) in enumerate(zip(avals, arrays, strict=True)):
            unbound = [f for dim in dims for f in dim if rule.factor(f).size is None]
            if unbound:
                return f"the size of factor {unbound[0]} is not bound"
            if whole.shape(dims) != tuple(aval.shape):
                return f"{side} {i} has shape {tuple(aval.shape)}, the rule makes it {whole.shape(dims)}"
    return None


def check_shards(case: Case, rule: Rule, operands: Sequence[Sequence[np.ndarray]]) -> Iterator[Finding]:
    """Findings where a rule's shards, put together, differ from the unsharded results."""
    tried = strategies(rule)
    wholes = [case.run(x) for x in operands]
    guilty: set[str] = set()
    for counts, outcome in zip(tried, run_strategies(case, rule, tried, operands), strict=True):
        if guilty & set(counts):
            continue  # said already
        if wrong := _disagreement(rule, counts, outcome, operands, wholes):
            guilty |= set(counts)
            yield _finding(case, rule, "wrong", counts, wrong)


def _disagreement(
    rule: Rule,
    counts: Mapping[str, int],
    outcome: list[list[Grid]] | Exception,
    operands: Sequence[Sequence[np.ndarray]],
    wholes: Sequence[Sequence[np.ndarray]],
) -> str | None:
    """How the results of one strategy's shards, put together, differ from the whole ones."""
    if isinstance(outcome, Disagreement):
        return str(outcome)
    if isinstance(outcome, Exception):
        return f"the operator cannot run on these shards: {brief(outcome)}"
    try:
        for grids, x, whole in zip(outcome, operands, wholes, strict=True):
            for r, expected in enumerate(whole):
                if wrong := difference(expected, join(grids[r], rule, r, counts, x)):
                    return f"the shards put together are not the whole result {r}: {wrong}"
    except Disagreement as error:
        return str(error)
    return None


def _finding(case: Case, rule: Rule | None, kind: FindingKind, counts: Mapping[str, int], text: str) -> Finding:
    mesh = "x".join(map(str, counts.values()))
    return Finding(kind, case.name, tuple(counts), mesh, text.rstrip("."), rule.text if rule else "", case.source)
