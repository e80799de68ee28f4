"""The one registry: which function gives the rule of which primitive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.extend.core import Primitive

from autoshard.spmdrules.rule import Factor, Rule, RuleError

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
    """

    def register(fn: RuleFn) -> RuleFn:
        for primitive in primitives:
            if primitive is None:
                continue
            if not isinstance(primitive, Primitive):
                raise TypeError(f"@rule takes primitives, got {primitive!r}; write @rule(lax.add_p)")
            if primitive in _RULES:
                raise RuleError(f"primitive '{primitive}' has a rule already, {_RULES[primitive].__qualname__}")
            _RULES[primitive] = fn
        return fn

    return register


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
    """
    fn = _RULES.get(primitive)
    if fn is None:
        return None
    key = (primitive, tuple((a.shape, a.dtype) for a in avals), tuple(params.items()))
    try:
        found = _CACHE.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return fn(*avals, **params)
    if found is None:
        found = _CACHE[key] = fn(*avals, **params)
    return found


def replicated(avals: tuple[Any, ...], results: tuple[Any, ...]) -> Rule:
    """The rule of an operator that nothing is known about: every dimension is needed whole."""
    factors: list[Factor] = []

    def dims(prefix: str, shape: tuple[int, ...]):
        names = tuple(f"{prefix}{i}" for i in range(len(shape)))
        factors.extend(Factor(n, s, "whole") for n, s in zip(names, shape, strict=True))
        return tuple((n,) for n in names)

    operands = tuple(dims(f"w{i}_", tuple(a.shape)) for i, a in enumerate(avals))
    outs = tuple(dims(f"r{i}_", tuple(a.shape)) for i, a in enumerate(results))
    return Rule(operands, outs, tuple(factors))
