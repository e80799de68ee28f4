"""The one registry: which function gives the rule of which primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Primitive

from autoshard.spmdrules.core.rule import Factor, Rule, RuleError

RuleFn = Callable[..., Rule]

_RULES: dict[Primitive, RuleFn] = {}
_CACHE: dict[Any, Rule] = {}


def rule(*primitives: Primitive | None) -> Callable[[RuleFn], RuleFn]:
    """Registers a function `(*avals, **params) -> Rule` for one or more primitives.

    Args:
        *primitives: the primitives; None stands for one that the installed JAX does not have.

    Returns:
        The decorator, which returns the function unchanged.

    Raises:
        RuleError: a primitive has a rule already.
        TypeError: something is no primitive.
    """
    if wrong := [p for p in primitives if p is not None and not isinstance(p, Primitive)]:
        raise TypeError(f"@rule takes primitives, got {wrong[0]!r}; write @rule(lax.add_p), one or several")
    if not primitives:
        raise TypeError("@rule names no primitive; write @rule(lax.add_p), one or several")

    def register(fn: RuleFn) -> RuleFn:
        chosen = [p for p in primitives if p is not None]
        for number, primitive in enumerate(chosen):
            if primitive in _RULES or primitive in chosen[:number]:
                raise RuleError(
                    f"@rule: primitive '{primitive}' has a rule already, {_qualified_name(_RULES.get(primitive, fn))}. It has "
                    f"one rule only: drop that one, or {_qualified_name(fn)}."
                )
        _RULES.update(dict.fromkeys(chosen, fn))
        return fn

    return register


def _qualified_name(fn: RuleFn) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def registered() -> Iterator[tuple[Primitive, RuleFn]]:
    """Every primitive with a rule, in order of registration."""
    return iter(_RULES.items())


def has_rule(primitive: Primitive) -> bool:
    """Whether a primitive has a rule."""
    return primitive in _RULES


def rule_for(primitive: Primitive, avals: tuple[Any, ...], params: Mapping[str, Any]) -> Rule | None:
    """The rule of one application of a primitive, None if there is none.

    Args:
        primitive: the primitive.
        avals: its operands' avals (shape, dtype).
        params: its parameters.

    Raises:
        RuleError: the rule cannot be made, or does not fit the operands.
    """
    fn = _RULES.get(primitive)
    if fn is None:
        return None
    key = (primitive, tuple((a.shape, a.dtype) for a in avals), tuple(params.items()))
    try:
        found = _CACHE.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return _call_rule_function(fn, primitive, avals, params)
    if found is None:
        found = _CACHE[key] = _call_rule_function(fn, primitive, avals, params)
    return found


def _call_rule_function(fn: RuleFn, primitive: Primitive, avals: tuple[Any, ...], params: Mapping[str, Any]) -> Rule:
    """What a rule function gives, with its sizes read off the operands."""
    try:
        found: Any = fn(*avals, **params)
        if not isinstance(found, Rule):
            raise RuleError(f"it gave {found!r}, which is no Rule")
        return found.bind(*avals) if any(f.size is None for f in found.factors) else found
    except Exception as error:  # a rule is its author's code, which may raise anything; told as the rule's error
        shapes = ", ".join(str(tuple(a.shape)) for a in avals)
        told = str(error) if isinstance(error, RuleError) else f"it raised {type(error).__name__}: {error}"
        raise RuleError(f"the rule of '{primitive}', {_qualified_name(fn)}, for operands {shapes}: {told}") from error


def check_fit(primitive: Primitive, rule: Rule, avals: Sequence[Any], results: Sequence[Any], where: str) -> None:
    """Compares a rule with one application of its primitive.

    Args:
        primitive: the primitive.
        rule: what `rule_for` gave.
        avals: the operands' types.
        results: the results' types.
        where: the user's line.

    Raises:
        RuleError: there are more or fewer arrays than it declares, or of other shapes.
    """
    sizes = {f.name: f.size for f in rule.factors}
    for side, arrays, found in (("operand", rule.operands, avals), ("result", rule.results, results)):
        declared = [tuple(math.prod(sizes[f] or 0 for f in dim) for dim in dims) for dims in arrays]
        shapes = [tuple(a.shape) for a in found]
        if declared != shapes:
            raise RuleError(
                f"the rule of '{primitive}', {_qualified_name(_RULES[primitive])}, at {where}: '{rule}' declares {side}s of "
                f"shapes {declared}, they are {shapes}. Correct the rule."
            )


def replicated_rule(avals: tuple[Any, ...], results: tuple[Any, ...]) -> Rule:
    """The rule of an operator that nothing is known about: every dimension is needed whole."""
    factors: list[Factor] = []

    def dims(prefix: str, shape: tuple[int, ...]):
        names = tuple(f"{prefix}{i}" for i in range(len(shape)))
        factors.extend(Factor(n, s, "whole") for n, s in zip(names, shape, strict=True))
        return tuple((n,) for n in names)

    operands = tuple(dims(f"w{i}_", tuple(a.shape)) for i, a in enumerate(avals))
    outs = tuple(dims(f"r{i}_", tuple(a.shape)) for i, a in enumerate(results))
    return Rule(operands, outs, tuple(factors))
