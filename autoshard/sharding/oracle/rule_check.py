"""The oracle: checks that the rules of a function's operators are right and complete.

No expected mapping is needed. Every distinct equation is *run* on the shards that its rule declares, and the results,
joined as the rule declares, are compared with the unsharded results. Then the partitioner compiles the operator with
the same shardings, its program is run as well, and its collectives are counted.

    wrong         the rule declares what the operator does not do
    missing       the operator allows a strategy that the rule does not declare
    partitioner   the rule is right, but XLA's partitioner gives wrong results or adds collectives
    unknown       the operator has no rule
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
from autoshard.sharding.oracle.cases import Case, collect, error_summary
from autoshard.sharding.oracle.constants import INFORMATIVE_SHARE, SEARCH_TRIALS
from autoshard.sharding.oracle.missing_strategies import check_linear, missing_factors, smallest_divisor
from autoshard.sharding.oracle.partitioner_check import check_partitioner
from autoshard.sharding.oracle.probe_values import difference, trials
from autoshard.sharding.oracle.shard_runner import run_strategies
from autoshard.sharding.oracle.shards import Disagreement, Grid, join_shards
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.core.rule import POSITIONS, Rule, Shard
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from autoshard.spmdrules.families.manual_sharding import communicates
from autoshard.spmdrules.ir.program import build
from autoshard.spmdrules.propagation.input_specs import needs_function

FindingKind = Literal["wrong", "missing", "partitioner", "unknown"]
_ADVICE = {
    "wrong": "Correct the rule, or declare the factor whole.",
    "missing": "Declare it in the rule.",
    "partitioner": "Keep it out of plans, or list it in KNOWN_PARTITIONER_FAULTS with the reason.",
    "unknown": "Register one with @rule. Without a rule, its operands and results are replicated.",
}


@shown
@dataclass(frozen=True)
class Finding:
    """One problem with the rule of one operator.

    Attributes:
        kind: "wrong", "missing", "partitioner" or "unknown" (see the module docstring).
        primitive: the name of the operator.
        factors: the factors that were split; empty if the problem is not about a factor.
        mesh: how many ways each was split, such as "2" or "2x2".
        message: the problem.
        rule: the rule's text.
        source: the line of user code that the operator came from.
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
        split = f", {' and '.join(self.factors)} split {self.mesh} ways" if self.factors else ""
        text = f" Its rule is '{self.rule}'." if self.rule else ""
        return f"{self.kind}: {self.primitive}{where}{split}: {self.message}.{text} {_ADVICE[self.kind]}"


def check_rule(fn: Any, *args: Any, partitioner: bool = True) -> list[Finding]:
    """Checks the rule of every operator that a function uses, also inside its calls, loops and branches.

    Args:
        fn: any function that JAX can trace.
        *args: its arguments, pytrees of arrays or `ShapeDtypeStruct`s. Small even sizes (4, 6, 8) suffice.
        partitioner: whether to also compile each strategy for 2 x 2 devices, compare results and count collectives.

    Returns:
        The problems; empty if there are none. Whole factors of an `@operator` around a `jax.ffi` call are not split:
        foreign code may read past the end of pieces that it does not support.

    Raises:
        ValueError: there are fewer devices than the partitioner check needs.
        TypeError: `fn` is not a function, or JAX cannot trace an argument.

    Example:
        >>> import jax.numpy as jnp
        >>> check_rule(lambda a, b: a @ b, jnp.ones((4, 6)), jnp.ones((6, 8)), partitioner=False)
        []
    """
    needs_function("check_rule", fn)
    if partitioner and jax.device_count() < 4:
        raise ValueError(
            f"check_rule: the partitioner check needs 4 devices, but there are {jax.device_count()}. Set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 before jax starts, or pass partitioner=False."
        )
    findings = {f: None for case in collect(fn, args) for f in check_case(case, partitioner=partitioner)}
    return list(findings)


def check_case(case: Case, partitioner: bool = True, rule: Rule | None = None) -> list[Finding]:
    """`check_rule` for one equation. If `rule` is given, it is checked in place of the registered one.

    A `shard_map` whose shards communicate cannot be checked, since no shard can run alone.
    """
    if communicates(case.eqn):
        return []
    try:
        rule = rule or _rule(case)
    except Exception as error:  # a faulty rule may raise any error: it is the finding
        return [_finding(case, None, "wrong", {}, f"its rule raises {error_summary(error)}")]
    if rule is None:
        return [_finding(case, None, "unknown", {}, "it has no rule")]
    if mismatch := _shape_mismatch(case, rule):
        return [_finding(case, rule, "wrong", {}, mismatch)]
    operands = trials(case)
    findings = list(check_shards(case, rule, operands))
    findings += [_finding(case, rule, kind, {}, f"it {text}") for kind, text in check_linear(case, rule, operands)]
    undeclared = [] if _is_foreign(case) else [*missing_factors(case, rule), *_undeclared_kinds(case, rule)]
    for name, how in undeclared:
        text = f"the rule declares '{name}' whole, but the results of its pieces can be joined: {how}"
        findings.append(_finding(case, rule, "missing", {name: 2}, text))
    if partitioner and not any(f.kind == "wrong" for f in findings):
        for factors, fault in check_partitioner(case, rule, strategies(rule), operands[1]):
            findings.append(_finding(case, rule, "partitioner", dict.fromkeys(factors, 2), fault))
    return findings


def strategies(rule: Rule) -> list[dict[str, int]]:
    """The strategies to check: every factor alone and every pair, each split into the fewest possible pieces."""
    ways = {f.name: n for f in rule.factors if f.shardable and (n := smallest_divisor(f.size))}
    # Positions (argmax, argmin) are compared in the unsharded array. Their factors come first and are joined last.
    names = sorted(ways, key=lambda name: rule.factor(name).op not in POSITIONS)
    groups = [*((name,) for name in names), *itertools.combinations(names, 2)]
    found = [{name: ways[name] for name in group} for group in groups]
    # With 4 pieces, an inner shard has two neighbours, and some offsets are not multiples of half the size.
    finer = (f for f in rule.factors if f.kind in ("halo", "index", "offset"))
    return found + [{f.name: 4} for f in finer if f.size and f.size >= 8 and f.size % 4 == 0]


def _undeclared_kinds(case: Case, rule: Rule) -> Iterator[tuple[str, str]]:
    """Finds `whole` factors for which the rule's `local` or `body` already supports another kind."""
    in_operands = {name for dims in rule.operands for dim in dims for name in dim}
    candidates = [f for f in rule.factors if f.kind == "whole" and f.size and f.size % 2 == 0 and f.name in in_operands]
    others: list[dict[str, Any]] = []
    if rule.body is not None or rule.local is not None:
        others += [{"kind": "pass"}]
        if not any(a.dtype == np.bool_ for a in case.results):  # booleans have no partial sums
            others += [{"kind": "index"}, *({"kind": "reduce", "op": op} for op in ("sum", "mul", "max", "min"))]
    if len(rule.operands) == 1 and all(jnp.issubdtype(a.dtype, jnp.integer) for a in case.results):
        others += [{"kind": "reduce", "op": op} for op in POSITIONS]
    if not candidates or not others:
        return
    operands = trials(case, SEARCH_TRIALS)
    wholes = [case.run(x) for x in operands]
    informative = sum(any(len(np.unique(np.asarray(x, np.complex128))) > 1 for x in whole) for whole in wholes)
    if informative < INFORMATIVE_SHARE * len(wholes):
        return  # constant results prove nothing
    for f in candidates:
        with np.errstate(invalid="ignore"):  # results may be NaN
            positions = all(((x >= 0) & (x < f.size)).all() for whole in wholes for x in whole)
        for other in others:
            if other.get("op") in POSITIONS and not positions:
                continue
            changed = rule.where(factors=tuple(replace(f, **other) if g == f else g for g in rule.factors))
            (outcome,) = run_strategies(case, changed, [{f.name: 2}], operands)
            if _disagreement(changed, {f.name: 2}, outcome, operands, wholes) is None:
                yield f.name, f"by declaring it '{':'.join(other.values())}'"
                break


def _is_foreign(case: Case) -> bool:
    """Whether the equation is an `@operator` around foreign code.

    Foreign code may rely on never getting a piece of a whole dimension: LAPACK reads past the end of a matrix that is
    not square.
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
            return f"it has {len(avals)} {side}s, but the rule has {len(arrays)}"
        for i, (aval, dims) in enumerate(zip(avals, arrays, strict=True)):
            unbound = [f for dim in dims for f in dim if rule.factor(f).size is None]
            if unbound:
                return f"factor {unbound[0]} has no size"
            if whole.shape(dims) != tuple(aval.shape):
                return f"{side} {i} has shape {tuple(aval.shape)}, but the rule gives it {whole.shape(dims)}"
    return None


def check_shards(case: Case, rule: Rule, operands: Sequence[Sequence[np.ndarray]]) -> Iterator[Finding]:
    """Yields a finding for each strategy whose joined shards differ from the unsharded results."""
    tried = strategies(rule)
    wholes = [case.run(x) for x in operands]
    reported: set[str] = set()
    for counts, outcome in zip(tried, run_strategies(case, rule, tried, operands), strict=True):
        if reported & set(counts):
            continue
        if wrong := _disagreement(rule, counts, outcome, operands, wholes):
            reported |= set(counts)
            yield _finding(case, rule, "wrong", counts, wrong)


def _disagreement(
    rule: Rule,
    counts: Mapping[str, int],
    outcome: list[list[Grid]] | Exception,
    operands: Sequence[Sequence[np.ndarray]],
    wholes: Sequence[Sequence[np.ndarray]],
) -> str | None:
    """Describes how the joined results of one strategy's shards differ from the unsharded ones; None if they agree."""
    if isinstance(outcome, Disagreement):
        return str(outcome)
    if isinstance(outcome, Exception):
        return f"the operator cannot run on these shards: {error_summary(outcome)}"
    try:
        for grids, x, whole in zip(outcome, operands, wholes, strict=True):
            for r, expected in enumerate(whole):
                if wrong := difference(expected, join_shards(grids[r], rule, r, counts, x)):
                    return f"the joined shards differ from the unsharded result {r}: {wrong}"
    except Disagreement as error:
        return str(error)
    return None


def _finding(case: Case, rule: Rule | None, kind: FindingKind, counts: Mapping[str, int], text: str) -> Finding:
    mesh = "x".join(map(str, counts.values()))
    return Finding(kind, case.name, tuple(counts), mesh, text.rstrip("."), rule.text if rule else "", case.source)
