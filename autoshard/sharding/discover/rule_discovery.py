"""A rule for a function that nobody wrote one for, found by running it on pieces.

Each dimension of each operand is cut, alone or together with dimensions of other operands, the function is run on the
pieces, and the pieces of its results are put together in every way that a rule can say. What gives the whole on all
sets of values becomes a factor, which is as large as the number of pieces that it can be cut into; the rest is `whole`.

This is evidence and no proof: a function may do on other values or other sizes what it did not do on these. Nothing is
applied; `@autoshard.operator(found.text)` does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard._shown import shown
from autoshard.sharding.discover.factor_search import Search
from autoshard.sharding.discover.piecewise_runs import Outcome, Part
from autoshard.sharding.discover.rule_text import Found, declared
from autoshard.sharding.discover.subject import DiscoveryError, Refused, Subject, asked
from autoshard.sharding.oracle.cases import Case
from autoshard.sharding.oracle.missing_strategies import additive, possible_groups, surely_additive
from autoshard.sharding.oracle.probe_values import trials
from autoshard.sharding.oracle.rule_check import check_shards
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.custom_ops.opaque_primitive import apply, make_primitive

__all__ = ["Discovery", "DiscoveryError", "Evidence", "Refusal", "discover"]

_OWN_SETS = 4  # of values, in the last check, beside those of the oracle
_QUIET = 1e-5  # error by rounding, which the oracle does not mind
_SHOWN = 2  # refused cuts of each dimension


@shown
@dataclass(frozen=True)
class Evidence:
    """What speaks for one factor of a discovered rule.

    Attributes:
        factor: its name.
        size: into how many pieces it can be cut.
        operands: where operands were cut.
        pieces: into how many pieces they were cut.
        joins: for each result how its pieces gave the whole.
        sets: on how many sets of values.
        error: the largest relative error among them.
    """

    factor: str
    size: int
    operands: tuple[str, ...]
    pieces: tuple[int, ...]
    joins: tuple[str, ...]
    sets: int
    error: float

    def __str__(self) -> str:
        cut = " and ".join(f"operand {place}" for place in self.operands)
        ways = " and ".join(map(str, self.pieces))
        joined = ", ".join(f"result {r} {how}" for r, how in enumerate(self.joins))
        seen = f"{self.sets} sets of values, error {self.error:.1g}"
        return f"{self.factor} ({self.size}): {cut} cut into {ways}: {joined}; {seen}"


@shown
@dataclass(frozen=True)
class Refusal:
    """A dimension of an operand, or a part of one, that is whole in the rule, and why.

    Attributes:
        operand: the operand, the dimension, and behind what part of it.
        size: the dimension's size.
        tried: what was cut, and what came of it.
    """

    operand: str
    size: int
    tried: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        more = len(self.tried) - _SHOWN
        lines = [f"    {cut}: {why}" for cut, why in self.tried[:_SHOWN]]
        lines += [f"    and {more} more"] * (more > 0)
        return "\n".join([f"operand {self.operand} (size {self.size}) is whole", *lines])


@shown
@dataclass(frozen=True)
class Discovery:
    """A rule that a function's runs on pieces speak for.

    Attributes:
        rule: the rule, with the sizes of the arguments. Operands and results are the arrays of the arguments and
            results in flat order.
        text: its text, for `@autoshard.operator`: sizes are said only where operands would leave them open.
        evidence: for each factor that can be cut.
        refused: for each dimension that cannot.
    """

    rule: Rule
    text: str
    evidence: tuple[Evidence, ...]
    refused: tuple[Refusal, ...]

    def __str__(self) -> str:
        told = [f"  {each}" for each in (*self.evidence, *self.refused)]
        end = "Evidence from runs on random values, not proof. @autoshard.operator(text) applies it."
        return "\n".join([self.text, *told, end])


def discover(fn: Callable[..., Any], *args: Any) -> Discovery:
    """Proposes a rule for a function of arrays by running it on pieces of them.

    The rule is one for `@autoshard.operator`: what cannot be cut by running the function itself on a shard is whole,
    such as a dimension that positions are counted in (`argmax`, the rows of a table), though a shard that knew where
    it starts could do it. It is made for one operator, not for a train step: each dimension takes some compilations.
    Give different dimensions different sizes, small and divisible by 4; arrays where values matter (indices, a matrix
    to be factored), else `ShapeDtypeStruct`s.

    Args:
        fn: any function that `jax.jit` takes: opaque code, a kernel, a callback, the `bind` of a primitive.
        *args: pytrees of arrays; what is no array stays as it is.

    Returns:
        The rule, checked by the oracle, and what speaks for it: evidence, not proof. It is not registered.

    Raises:
        DiscoveryError: there are no arrays to cut or to compare, the function fails on the whole arguments, or two
            runs on the same values differ.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w = jax.ShapeDtypeStruct((4, 6), jnp.float32), jax.ShapeDtypeStruct((6, 8), jnp.float32)
        >>> discover(jnp.matmul, x, w).text
        'a b, b c -> a c; reduce b; linear 0; linear 1'
    """
    if not callable(fn):
        raise TypeError(f"discover takes a function and its arguments, got {fn!r}")
    with jax.default_matmul_precision("highest"):
        return _Discovery(Subject(fn, args)).discovered()


class _Discovery:
    """From a finished search to a rule that the oracle agrees with."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.search = Search(subject)
        self.search.run()
        self.results = [tuple(x.shape) for x in subject.results]
        self.primitive = make_primitive(f"discovered_{subject.name}")  # no name that the oracle knows

    def discovered(self) -> Discovery:
        """The rule without what the oracle calls wrong."""
        text, names = self.declared(())
        while wrong := next(self.wrong(text), None):
            factors, why = wrong
            self.search.withdraw(names[factors[-1]], why)
            text, names = self.declared(())
        text, names = self.declared(self.linear(text))
        evidence = [_evidence(name, f, self.search.outcomes[f]) for name, f in names.items() if not f.whole]
        refused = [Refusal(str(part), n, tuple(tried)) for part, n, tried in self.search.refusals()]
        return Discovery(Rule.parse(text, *self.subject.examples), text, tuple(evidence), tuple(refused))

    def declared(self, linear: Sequence[tuple[int, ...]]) -> tuple[str, dict[str, Found]]:
        """The text of what is found so far."""
        return declared(self.subject.shapes, self.results, self.search.found(), linear)

    def case(self, text: str) -> tuple[Case, Rule]:
        """The function as one operator with this rule, as `@autoshard.operator` makes it."""
        fn = self.subject.fn
        closed = jax.make_jaxpr(lambda *xs: apply(self.primitive, xs, fn=fn, text=text, vjp=None))(
            *self.subject.examples
        )
        rule = Rule.parse(text, *self.subject.examples, body=lambda shard, *shards: fn(*shards))
        return Case(closed.eqns[-1], tuple(self.subject.examples)), rule

    def wrong(self, text: str) -> Iterator[tuple[tuple[str, ...], str]]:
        """(factors, why) of each strategy that the oracle finds wrong, on values of the search and of its own."""
        case, rule = self.case(text)
        own = sorted(self.subject.samples, key=lambda sample: sample.loudness)[:_OWN_SETS]
        loudest = max((_QUIET, *(sample.loudness for sample in own)))
        sets = [sample.operands for sample in own] + [x for x in trials(case) if self.loudness(x) <= loudest]
        return ((f.factors, f.message) for f in (check_shards(case, rule, sets) if sets else ()))

    def loudness(self, operands: list[np.ndarray]) -> float:
        """What of an error on these values is rounding; infinite where the function does not take them."""
        try:
            return self.subject.sample(operands).loudness
        except Refused:
            return math.inf

    def linear(self, text: str) -> list[tuple[int, ...]]:
        """Groups of operands in which the function is jointly linear."""
        case, _ = self.case(text)
        sets = [sample.operands for sample in self.subject.samples[-3:]]
        try:
            with asked():
                some = [g for g in possible_groups(case) if surely_additive(case, g, sets)]
                groups = [g for g in some if additive(case, g, sets)]
        except Refused:  # it does not take the terms of a sum
            return []
        return [g for g in groups if not any(set(other) < set(g) for other in groups)]


def _evidence(name: str, found: Found, outcomes: Sequence[Outcome]) -> Evidence:
    first = outcomes[0]
    joins = tuple(
        f"side by side along {way.along}" if isinstance(way, Part) else _WORDS.get(way, f"by {way}")
        for way in first.joins
    )
    return Evidence(
        name,
        found.size,
        tuple(map(str, first.cut)),
        tuple(outcome.ways for outcome in outcomes),
        joins,
        first.sets,
        max(outcome.error for outcome in outcomes),
    )


_WORDS = {"same": "the same in all pieces"}
