"""Proposes a rule for a function that has none by running it on pieces of its operands.

Each dimension of each operand is split, alone or together with dimensions of other operands. The function is run on the
pieces, and the pieces of its results are joined in every way that a rule can express. A split whose joined pieces equal
the whole result on all sets of values becomes a factor, whose size is the number of pieces that it can be split into.
All other dimensions are `whole`.

This is evidence, not proof: the function may behave differently for other values or sizes. The rule is not applied;
`@autoshard.operator(found.text)` applies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard._shown import shown
from autoshard.sharding.discover.constants import FINAL_SETS, LINEARITY_SETS, MIN_NOISE, SHOWN_ATTEMPTS
from autoshard.sharding.discover.factor_search import Search
from autoshard.sharding.discover.piecewise_runs import Outcome, Place
from autoshard.sharding.discover.rule_text import FoundFactor, render_rule
from autoshard.sharding.discover.subject import DiscoveryError, Refused, Subject, as_refused
from autoshard.sharding.oracle.cases import Case
from autoshard.sharding.oracle.missing_strategies import additive, possible_groups, surely_additive
from autoshard.sharding.oracle.probe_values import trials
from autoshard.sharding.oracle.rule_check import check_shards
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.custom_ops.opaque_primitive import apply, make_primitive

__all__ = ["Discovery", "DiscoveryError", "Evidence", "Refusal", "discover"]


@shown
@dataclass(frozen=True)
class Evidence:
    """The evidence for one factor of a discovered rule.

    Attributes:
        factor: its name.
        size: the most pieces that it can be split into.
        operands: the places where operands were split.
        pieces: the numbers of pieces that were tried.
        joins: for each result, how its pieces were joined.
        sets: the number of sets of values.
        error: the largest relative error on these.
    """

    factor: str
    size: int
    operands: tuple[str, ...]
    pieces: tuple[int, ...]
    joins: tuple[str, ...]
    sets: int
    error: float

    def __str__(self) -> str:
        split = " and ".join(f"operand {place}" for place in self.operands)
        ways = " and ".join(map(str, self.pieces))
        joined = ", ".join(f"result {r} {how}" for r, how in enumerate(self.joins))
        tests = f"{self.sets} sets of values, error {self.error:.1g}"
        return f"{self.factor} ({self.size}): {split} split into {ways} pieces: {joined}; {tests}"


@shown
@dataclass(frozen=True)
class Refusal:
    """A dimension of an operand, or a part of one, that is whole in the rule, and the reasons.

    Attributes:
        operand: the place as text: the number of the operand and the dimension.
        size: the size of the dimension.
        tried: what was split, and why it failed.
    """

    operand: str
    size: int
    tried: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        more = len(self.tried) - SHOWN_ATTEMPTS
        lines = [f"    {split}: {why}" for split, why in self.tried[:SHOWN_ATTEMPTS]]
        lines += [f"    and {more} more"] * (more > 0)
        return "\n".join([f"operand {self.operand} (size {self.size}) is whole", *lines])


@shown
@dataclass(frozen=True)
class Discovery:
    """A discovered rule, with the evidence for it.

    Attributes:
        rule: the rule, with the sizes of the arguments. Operands and results are the arrays of the arguments and
            results in flat order.
        text: its text, for `@autoshard.operator`. It states only the sizes that the operands do not determine.
        evidence: the evidence for each factor that can be split.
        refused: the reasons for each dimension that cannot be split.
    """

    rule: Rule
    text: str
    evidence: tuple[Evidence, ...]
    refused: tuple[Refusal, ...]

    def __str__(self) -> str:
        lines = [f"  {each}" for each in (*self.evidence, *self.refused)]
        end = "This is evidence from runs on random values, not proof. @autoshard.operator(text) applies the rule."
        return "\n".join([self.text, *lines, end])


def discover(fn: Callable[..., Any], *args: Any) -> Discovery:
    """Proposes a rule for a function of arrays by running it on pieces of these arrays.

    The rule is for `@autoshard.operator`, which runs the function itself on each shard. A dimension for which this is
    impossible is whole. An example is a dimension in which positions are counted (`argmax`, the rows of a table), even
    though code that knows the offset of its shard could split it. Use `discover` for one operator, not for a train
    step: each dimension takes several compilations. Give different dimensions different sizes, small and divisible by
    4. Pass arrays where values matter (indices, a matrix to be factored), and `ShapeDtypeStruct`s otherwise.

    Args:
        fn: any function that `jax.jit` accepts: opaque code, a kernel, a callback, the `bind` of a primitive.
        *args: pytrees of arrays. Leaves that are not arrays are kept as they are.

    Returns:
        The rule, checked by the oracle, and the evidence for it. The rule is not registered.

    Raises:
        DiscoveryError: there are no arrays to split or to compare, the function fails on the whole arguments, or two
            runs on the same values differ.
        TypeError: `fn` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w = jax.ShapeDtypeStruct((4, 6), jnp.float32), jax.ShapeDtypeStruct((6, 8), jnp.float32)
        >>> discover(jnp.matmul, x, w).text
        'a b, b c -> a c; reduce b; linear 0; linear 1'
    """
    if not callable(fn):
        raise TypeError(f"discover takes a function and its arguments, but got {fn!r}. Pass the function first.")
    with jax.default_matmul_precision("highest"):
        return _Discovery(Subject(fn, args)).result()


class _Discovery:
    """Makes a rule that passes the oracle from the factors that a search finds."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.search = Search(subject)
        self.search.run()
        self.results = [tuple(x.shape) for x in subject.results]
        # The prefix keeps the oracle from treating the function like a primitive of the same name.
        self.primitive = make_primitive(f"discovered_{subject.name}")

    def result(self) -> Discovery:
        """Returns the rule without the factors that the oracle finds wrong."""
        text, names = self.render(())
        while wrong := next(self.wrong_strategies(text), None):
            factors, why = wrong
            self.search.withdraw(names[factors[-1]], why)
            text, names = self.render(())
        text, names = self.render(self.linear_groups(text))
        evidence = [_evidence(name, f, self.search.outcomes[f]) for name, f in names.items() if not f.whole]
        refused = [Refusal(str(place), n, tuple(tried)) for place, n, tried in self.search.refusals()]
        return Discovery(Rule.parse(text, *self.subject.examples), text, tuple(evidence), tuple(refused))

    def render(self, linear: Sequence[tuple[int, ...]]) -> tuple[str, dict[str, FoundFactor]]:
        """Returns the rule's text for the factors found so far, and the factor of each name."""
        return render_rule(self.subject.shapes, self.results, self.search.found(), linear)

    def case(self, text: str) -> tuple[Case, Rule]:
        """Returns the function as one operator with this rule, as `@autoshard.operator` makes it, and the rule."""
        fn = self.subject.fn
        closed = jax.make_jaxpr(lambda *xs: apply(self.primitive, xs, fn=fn, text=text, vjp=None))(
            *self.subject.examples
        )
        rule = Rule.parse(text, *self.subject.examples, body=lambda shard, *shards: fn(*shards))
        return Case(closed.eqns[-1], tuple(self.subject.examples)), rule

    def wrong_strategies(self, text: str) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields (factors, reason) of each strategy that the oracle finds wrong, on the search's and its own values."""
        case, rule = self.case(text)
        own = sorted(self.subject.samples, key=lambda sample: sample.noise)[:FINAL_SETS]
        max_noise = max((MIN_NOISE, *(sample.noise for sample in own)))
        sets = [sample.operands for sample in own] + [x for x in trials(case) if self.noise(x) <= max_noise]
        return ((f.factors, f.message) for f in (check_shards(case, rule, sets) if sets else ()))

    def noise(self, operands: list[np.ndarray]) -> float:
        """The relative error on these values that counts as rounding; infinite if the function rejects the values."""
        try:
            return self.subject.sample(operands).noise
        except Refused:
            return math.inf

    def linear_groups(self, text: str) -> list[tuple[int, ...]]:
        """Returns the minimal groups of operands in which the function is jointly linear."""
        case, _ = self.case(text)
        sets = [sample.operands for sample in self.subject.samples[-LINEARITY_SETS:]]
        try:
            with as_refused():
                candidates = [g for g in possible_groups(case) if surely_additive(case, g, sets)]
                groups = [g for g in candidates if additive(case, g, sets)]
        except Refused:  # it rejects the terms of a sum
            return []
        return [g for g in groups if not any(set(other) < set(g) for other in groups)]


def _evidence(name: str, found: FoundFactor, outcomes: Sequence[Outcome]) -> Evidence:
    first = outcomes[0]
    joins = tuple(
        f"concatenated along {way.description}" if isinstance(way, Place) else _WORDS.get(way, f"reduced by {way}")
        for way in first.joins
    )
    return Evidence(
        name,
        found.size,
        tuple(map(str, first.places)),
        tuple(outcome.piece_count for outcome in outcomes),
        joins,
        first.sets,
        max(outcome.error for outcome in outcomes),
    )


_WORDS = {"same": "equal on all pieces"}
