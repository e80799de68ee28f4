"""The registry of rules: the function that returns the rule of each primitive."""

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
        *primitives: the primitives; a None stands for one that the installed JAX lacks, and is skipped.

    Returns:
        The decorator, which returns the function unchanged.

    Raises:
        RuleError: a primitive already has a rule.
        TypeError: an argument is not a primitive, or there is none.
    """
    if wrong := [p for p in primitives if p is not None and not isinstance(p, Primitive)]:
        raise TypeError(f"@rule takes primitives, but got {wrong[0]!r}. Pass one or more, as in @rule(lax.add_p).")
    if not primitives:
        raise TypeError("@rule got no primitive. Pass one or more, as in @rule(lax.add_p).")

    def register(fn: RuleFn) -> RuleFn:
        chosen = [p for p in primitives if p is not None]
        for number, primitive in enumerate(chosen):
            if primitive in _RULES or primitive in chosen[:number]:
                first = _qualified_name(_RULES.get(primitive, fn))
                raise RuleError(
                    f"@rule: primitive '{primitive}' already has a rule, {first}. A primitive has only one rule: "
                    f"remove that one or {_qualified_name(fn)}."
                )
        _RULES.update(dict.fromkeys(chosen, fn))
        return fn

    return register


def _qualified_name(fn: RuleFn) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def registered() -> Iterator[tuple[Primitive, RuleFn]]:
    """Returns every primitive with a rule and its rule function, in order of registration."""
    return iter(_RULES.items())


def has_rule(primitive: Primitive) -> bool:
    """Whether a primitive has a rule."""
    return primitive in _RULES


def rule_for(primitive: Primitive, avals: tuple[Any, ...], params: Mapping[str, Any]) -> Rule | None:
    """Returns the rule of one application of a primitive, None if the primitive has none.

    Args:
        primitive: the primitive.
        avals: its operands' avals (shape, dtype).
        params: its parameters.

    Raises:
        RuleError: the rule function fails, or its rule does not fit the operands.
    """
    fn = _RULES.get(primitive)
    if fn is None:
        return None
    key = (primitive, tuple((a.shape, a.dtype) for a in avals), tuple(params.items()))
    try:
        found = _CACHE.get(key)
    except TypeError:  # a parameter is not hashable
        return _call_rule_function(fn, primitive, avals, params)
    if found is None:
        found = _CACHE[key] = _call_rule_function(fn, primitive, avals, params)
    return found


def _call_rule_function(fn: RuleFn, primitive: Primitive, avals: tuple[Any, ...], params: Mapping[str, Any]) -> Rule:
    """Calls a rule function and binds the sizes of its rule to the operands."""
    try:
        found: Any = fn(*avals, **params)
        if not isinstance(found, Rule):
            raise RuleError(f"it returned {found!r}, which is not a Rule")
        return found.bind(*avals) if any(f.size is None for f in found.factors) else found
    except Exception as error:  # a rule function is user code and may raise anything
        shapes = ", ".join(str(tuple(a.shape)) for a in avals)
        reason = str(error) if isinstance(error, RuleError) else f"it raised {type(error).__name__}: {error}"
        raise RuleError(
            f"the rule of '{primitive}', {_qualified_name(fn)}, failed for operands of shapes {shapes}: {reason}"
        ) from error


def check_fit(primitive: Primitive, rule: Rule, avals: Sequence[Any], results: Sequence[Any], where: str) -> None:
    """Checks a rule against one application of its primitive.

    Args:
        primitive: the primitive.
        rule: what `rule_for` returned.
        avals: the operands' types.
        results: the results' types.
        where: the user's line.

    Raises:
        RuleError: the number of arrays or their shapes differ from what the rule declares.
    """
    sizes = {f.name: f.size for f in rule.factors}
    for side, arrays, found in (("operand", rule.operands, avals), ("result", rule.results, results)):
        declared = [tuple(math.prod(sizes[f] or 0 for f in dim) for dim in dims) for dims in arrays]
        shapes = [tuple(a.shape) for a in found]
        if declared != shapes:
            raise RuleError(
                f"the rule of '{primitive}', {_qualified_name(_RULES[primitive])}, does not fit the equation at "
                f"{where}: '{rule}' declares {side}s of shapes {declared}, but they have shapes {shapes}. "
                "Correct the rule."
            )


def replicated_rule(avals: tuple[Any, ...], results: tuple[Any, ...]) -> Rule:
    """Returns the rule of an operator about which nothing is known: it needs every dimension whole."""
    factors: list[Factor] = []

    def dims(prefix: str, shape: tuple[int, ...]):
        names = tuple(f"{prefix}{i}" for i in range(len(shape)))
        factors.extend(Factor(n, s, "whole") for n, s in zip(names, shape, strict=True))
        return tuple((n,) for n in names)

    operands = tuple(dims(f"w{i}_", tuple(a.shape)) for i, a in enumerate(avals))
    outs = tuple(dims(f"r{i}_", tuple(a.shape)) for i, a in enumerate(results))
    return Rule(operands, outs, tuple(factors), is_unknown=True)
