"""Runs a program that was traced for a stack of matrices on one matrix.

The shapes in a jaxpr are fixed: Muon's iteration on a stack `[L, m, n]` is a program for L matrices. The rules of its
operators say which dimension of each value counts the matrices, and how each operator runs on a shard with one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard import _compat
from autoshard.sharding.rewrite.evaluation import bind_scan
from autoshard.sharding.rewrite.slices import Refused
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.core.rule import Rule, RuleError, Shard

Values = list[tuple[Any, int | None]]
"""Pairs of a value and its dimension that counts the matrices, which has size 1; None if it has no such dimension."""


def on_one_matrix(eqns: Sequence[Any], env: Mapping[Any, tuple[Any, int | None]], count: int) -> dict[Any, Any]:
    """Evaluate equations on a stack of one matrix.

    Args:
        eqns: the equations of a program on a stack of matrices.
        env: variable -> value and dimension, for the variables that the equations read.
        count: the number of matrices that the program was traced for.

    Returns:
        Variable -> value and dimension, for all variables.

    Raises:
        Refused: matrices depend on each other, or an operator cannot be evaluated on a part of the stack.
    """
    known = dict(env)
    for eqn in eqns:
        operands: Values = [(x.val, None) if isinstance(x, _compat.Literal) else known[x] for x in eqn.invars]
        with _compat.source_of(eqn):
            known.update(zip(eqn.outvars, _applied(eqn, operands, count), strict=True))
    return known


def _applied(eqn: Any, operands: Values, count: int) -> Values:
    if all(dim is None for _, dim in operands):
        return [(value, None) for value in _compat.bind(eqn, eqn.params, *(value for value, _ in operands))]
    if eqn.primitive.name == "scan":
        return _scanned(eqn, operands, count)
    rule = _rule_of(eqn)
    counting = {rule.operands[i][dim] for i, (_, dim) in enumerate(operands) if dim is not None}
    if len(counting) > 1 or any(len(each) != 1 for each in counting):
        raise Refused(f"{eqn.primitive.name} does not keep matrices apart")
    ((name,),) = counting
    if rule.factor(name).kind != "pass" or any(
        name in each for i, (_, dim) in enumerate(operands) for d, each in enumerate(rule.operands[i]) if d != dim
    ):
        raise Refused(f"{eqn.primitive.name} does not keep matrices apart")
    params = eqn.params if rule.local is None else rule.local(eqn.params, Shard(rule, {name: count}, {}))
    results = _compat.bind(eqn, params, *(value for value, _ in operands))
    found: Values = []
    for value, dims, x in zip(results, rule.results, eqn.outvars, strict=True):
        dim = next((d for d, each in enumerate(dims) if each == (name,)), None)
        if dim is None or value.shape != (*x.aval.shape[:dim], 1, *x.aval.shape[dim + 1 :]):
            raise Refused(f"{eqn.primitive.name} does not keep matrices apart")
        found.append((value, dim))
    return found


def _rule_of(eqn: Any) -> Rule:
    try:
        found = rule_for(eqn.primitive, tuple(x.aval for x in eqn.invars), eqn.params)
    except RuleError as error:
        raise Refused(str(error)) from error
    if found is None or found.body is not None:
        raise Refused(f"{eqn.primitive.name} has no rule by which it runs on one matrix")
    return found


def _scanned(eqn: Any, operands: Values, count: int) -> Values:
    n_consts, n_carry = _compat.scan_arity(eqn.params)
    first, body = n_consts + n_carry, _compat.open_jaxpr(eqn.params["jaxpr"])
    dims = [dim if n < first or dim is None else dim - 1 for n, (_, dim) in enumerate(operands)]
    if any(dim is not None and dim < 0 for dim in dims):
        raise Refused("a loop runs over the matrices")
    made: list[int | None] = []

    def run(*values: Any) -> list[Any]:
        env = dict(zip(body.constvars, [(x, None) for x in _compat.constants(eqn.params["jaxpr"])], strict=True))
        env |= dict(zip(body.invars, zip(values, dims, strict=True), strict=True))
        known = on_one_matrix(body.eqns, env, count)
        results: Values = [(x.val, None) if isinstance(x, _compat.Literal) else known[x] for x in body.outvars]
        made[:] = [dim for _, dim in results]
        return [value for value, _ in results]

    values = bind_scan(eqn, run, [value for value, _ in operands])
    if made[:n_carry] != dims[n_consts:first]:
        raise Refused("a loop does not keep matrices apart")
    return [(x, d if n < n_carry or d is None else d + 1) for n, (x, d) in enumerate(zip(values, made, strict=True))]
