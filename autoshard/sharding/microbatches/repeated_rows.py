"""Values of the whole batch that have the same element for each row, such as a mask that is broadcast to the batch.

A microbatch computes them for its own rows. If it took a slice of the whole value, XLA would store that value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard import _compat
from autoshard.sharding.microbatches.states import Split, factor_at, split_of
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.core.rule import Rule, RuleError, Shard

_REPEATING = ("broadcast_in_dim", "iota")


def repeated_rows(eqn: Any, split: Split, count: int, env: Mapping[Any, Any], makers: Mapping[Any, Any]) -> Any | None:
    """Compute a value for the rows of one microbatch; return None if its rows differ.

    Args:
        eqn: the equation that makes the value.
        split: where the value has the rows.
        count: number of pieces that the rows are cut into.
        env: variable -> its whole value.
        makers: variable -> the equation that makes it. Elementwise functions of repeated values are followed there.
    """
    params, name = eqn.params, eqn.primitive.name
    if name == "iota" and split.dim == params["dimension"]:
        return None
    operands: list[Any] = []
    if name in _REPEATING:
        shape = list(params["shape"])
        shape[split.dim] //= count
        params = {**params, "shape": tuple(shape)}
        of_operand = _operand_split(eqn, split)
        splits = [of_operand] if eqn.invars else []
    elif (found := _elementwise(eqn, split, count)) is not None:
        params, splits = found
    else:
        return None
    for atom, part in zip(eqn.invars, splits, strict=True):
        if part is not None:
            made = repeated_rows(makers[atom], part, count, env, makers) if atom in makers else None
            if made is None:
                return None
            operands.append(made)
        elif isinstance(atom, _compat.Literal):
            operands.append(atom.val)
        elif atom in env:
            operands.append(env[atom])
        else:
            return None
    return _compat.bind(eqn, params, *operands)[0]


def _operand_split(eqn: Any, split: Split) -> Split | None:
    """Where the operand of a broadcast has the rows; None if the broadcast repeats it for each row."""
    dims = eqn.params.get("broadcast_dimensions", ())
    if split.dim not in dims:
        return None
    dim = dims.index(split.dim)
    return None if eqn.invars[0].aval.shape[dim] == 1 else Split(dim, split.stride)


def _elementwise(eqn: Any, split: Split, count: int) -> tuple[Mapping[str, Any], list[Split | None]] | None:
    """The parameters of an elementwise operator on the rows of one microbatch, and where its operands have the rows."""
    if len(eqn.outvars) != 1 or eqn.effects:
        return None
    try:
        rule = rule_for(eqn.primitive, tuple(_compat.shape_dtype_of(a) for a in eqn.invars), eqn.params)
    except RuleError:
        return None
    if rule is None or rule.body is not None or not _is_pointwise(rule):
        return None
    at = factor_at(rule, rule.results[0], split, count)
    if at is None:
        return None
    factor, stride = at
    splits = [split_of(rule, dims, factor, stride) for dims in rule.operands]
    if not any(splits):
        return None
    return (rule.local(eqn.params, Shard(rule, {factor: count}, {})) if rule.local else eqn.params), splits


def _is_pointwise(rule: Rule) -> bool:
    """Whether each operand has the dimensions of the result, or is broadcast to them."""
    (dims,) = rule.results
    return all(
        not operand or (len(operand) == len(dims) and all(not a or a == b for a, b in zip(operand, dims, strict=True)))
        for operand in rule.operands
    )
