"""Finds the parts of an optimizer that compute one matrix from another one by products, such as Muon's iteration.

An update is a part of the step that starts from one value and ends in one value of the same shape:

    - It has at least one matrix product, or a loop with one.
    - All arrays that it takes are computed from its first value. Arrays of a few elements (coefficients) are exempt.
    - Elementwise operators compute its first value from state, such as momentum or the statistics of Shampoo.

The products of the forward and backward pass are not updates, because they take both parameters and data. An update
that contains a sharding constraint is skipped, because the user decided which devices compute it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.offload.edits import call_of, jaxprs_of
from autoshard.sharding.rewrite.slices import ELEMENTWISE
from autoshard.spmdrules.core.registry import has_rule

# Most operators of an update. Source: chosen; five Newton-Schulz steps without a loop have about 50.
_MOST_OPERATORS = 400
# Number of products that `may_have_updates` searches first. Source: chosen for speed.
_FEW_PRODUCTS = 64
# Most elements of a coefficient. Source: chosen; Muon has 3, or 3 for each of 5 steps.
_MOST_COEFFICIENTS = 64
_MORE_ELEMENTWISE = frozenset("min clamp pow reduce_precision erf".split())  # besides ELEMENTWISE
_MOVES = frozenset(("transpose", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "name", "optimization_barrier"))
_PRODUCTS = frozenset(("dot_general",))
_CONSTRAINTS = frozenset(("sharding_constraint",))


@shown
@dataclass(frozen=True)
class MatrixUpdate:
    """One update of one matrix.

    Attributes:
        first: the variable of its first value.
        last: the variable of its result.
        others: the variables of its coefficients.
        inside: the positions of its equations, in order.
    """

    first: Any
    last: Any
    others: tuple[Any, ...]
    inside: tuple[int, ...]


def matrix_updates(jaxpr: Any, state: Iterable[int]) -> list[MatrixUpdate]:
    """Return the updates of a step in the order of their results.

    Args:
        jaxpr: the step, with its calls inlined.
        state: the numbers of the inputs that are state.
    """
    search = _Search(jaxpr)
    inputs = {jaxpr.invars[n] for n in state}
    updates, regions = [], search.regions(search.products())
    constrained = {x for first in regions for x in search.sources(first, _CONSTRAINTS) - search.sources(first)}
    for first, inside in regions.items():
        last = search.last(first, inside)
        if last is None or last.aval.shape != first.aval.shape or not all(_is_known(jaxpr.eqns[n]) for n in inside):
            continue
        if last not in constrained and not inputs.isdisjoint(search.sources(first)):
            others = dict.fromkeys(
                x for n in inside for x in jaxpr.eqns[n].invars
                if not isinstance(x, _compat.Literal) and x is not first and search.maker.get(x, -1) not in inside
            )  # fmt: skip
            updates.append(MatrixUpdate(first, last, tuple(others), tuple(sorted(inside))))
    return sorted(updates, key=lambda each: search.maker[each.last])


def may_have_updates(closed: Any) -> bool:
    """Return whether a step may have updates. This takes less time than inlining its calls.

    The jaxpr of each call is searched, too. In the jaxpr that contains the call, the call is one equation.
    """
    left, seen = [_compat.open_jaxpr(closed)], set[int]()
    while left:
        jaxpr = left.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        search = _Search(jaxpr)
        products = search.products()
        for some in (products[:_FEW_PRODUCTS], products[_FEW_PRODUCTS:]):
            for first, inside in search.regions(some).items():
                last = search.last(first, inside)
                if last is not None and last.aval.shape == first.aval.shape:
                    return True
        calls = (call_of(eqn) for eqn in jaxpr.eqns if eqn.primitive.name not in _PRODUCTS)
        left += [_compat.open_jaxpr(called) for called in calls if called is not None]
    return False


class _Search:
    def __init__(self, jaxpr: Any):
        self.eqns: Sequence[Any] = jaxpr.eqns
        self.maker: Mapping[Any, int] = {x: n for n, eqn in enumerate(self.eqns) for x in eqn.outvars}
        self.results = {x for x in jaxpr.outvars if not isinstance(x, _compat.Literal)}

    @cached_property
    def users(self) -> Mapping[Any, list[int]]:
        """The positions of the equations that take a value."""
        found: dict[Any, list[int]] = {}
        for n, eqn in enumerate(self.eqns):
            for x in eqn.invars:
                if not isinstance(x, _compat.Literal):
                    found.setdefault(x, []).append(n)
        return found

    def products(self) -> list[int]:
        """Return the positions of the products whose operands are all computed from one array.

        The parent of an equation is its immediate dominator: the last equation or input through which everything
        passes that the equation is computed from. The products of a model have none, because they take data and
        parameters.
        """
        parent: dict[Any, Any] = {}  # position or input -> its parent; None if it has none
        depth: dict[Any, int] = {None: 0}
        found = []
        for position, eqn in enumerate(self.eqns):
            made = {self.maker.get(x, x) for x in eqn.invars if not is_coefficient(x)}
            common, *others = [x for x in made if not isinstance(x, int) or x in depth] or [position]
            if common is position:  # it takes no array, such as iota
                continue
            for x in others:
                while common != x:
                    if depth.get(common, 1) < depth.get(x, 1):
                        common, x = x, common
                    common = parent.get(common)
            parent[position], depth[position] = common, depth.get(common, 1) + 1
            if common is not None and _has_product(eqn):
                found.append(position)
        return found

    def regions(self, products: Sequence[int]) -> dict[Any, set[int]]:
        """Group products by the array that they are computed from: the array -> the positions of the equations."""
        found: dict[Any, set[int]] = {}
        owner: dict[int, Any] = {}  # position -> the array of its region
        changed: set[Any] = set()  # arrays whose regions are not closed by `last` yet
        for position in products:
            start = self.start(position)
            if start is None:
                continue
            of, inside = start
            if of not in found:  # an iteration starts from the result of the previous one, in the same region
                maker = self.maker.get(of, -1)
                if maker not in owner:
                    for x in changed:
                        self.last(x, found[x])
                        owner |= dict.fromkeys(found[x], x)
                    changed.clear()
                of = owner.get(maker, of)
            region = found.setdefault(of, set())
            for x in {owner[n] for n in inside if n in owner} - {of}:  # this region contains that one
                region |= found.pop(x)
                changed.discard(x)
            region |= inside
            owner |= dict.fromkeys(region, of)
            changed.add(of)
        return found

    def start(self, position: int) -> tuple[Any, set[int]] | None:
        """Return the array that an equation is computed from, and the equations in between; None if there are several.

        Adds the equations that compute its operands, the last one first, until only one array is left.
        """
        inside, arrays = {position}, self._arrays(position)
        while len(arrays) > 1:
            at, x = max((self.maker.get(x, -1), n) for n, x in enumerate(arrays))
            given = sum(y not in self.maker for y in arrays)
            if at < 0 or given > 1 or len(inside) > _MOST_OPERATORS or self.eqns[at].effects:
                return None
            inside.add(at)
            made = {*self.eqns[at].outvars}
            arrays = list(dict.fromkeys([*(y for y in arrays if y not in made), *self._arrays(at)]))
        return (arrays[0], inside) if arrays else None

    def _arrays(self, position: int) -> list[Any]:
        """Return the operands of an equation, without coefficients."""
        return list(dict.fromkeys(x for x in self.eqns[position].invars if not is_coefficient(x)))

    def last(self, first: Any, inside: set[int]) -> Any:
        """Add equations to a region until it has one result, and return the result; None if there is no such region.

        Only equations that take nothing else are added. The region grows until it contains all uses of its first
        array. If that is impossible, it is the largest region with one result.

        Args:
            first: the first array of the region.
            inside: the positions of its equations, which are changed.
        """
        found, fewest = None, {*inside}
        while len(inside) <= _MOST_OPERATORS:
            results = self._results_of(inside)
            if len(results) == 1:
                found, fewest = results[0], {*inside}
                if inside.issuperset(self.users[first]):
                    break
            known = {first, *(x for n in inside for x in self.eqns[n].outvars)}
            more = min(
                (n for x in known for n in self.users.get(x, ()) if n not in inside and self._needs_only(n, known)),
                default=None,
            )
            if more is None:
                break
            inside.add(more)
        inside &= fewest
        return found

    def _needs_only(self, position: int, known: set[Any]) -> bool:
        return all(x in known for x in self._arrays(position)) and not self.eqns[position].effects

    def _results_of(self, inside: set[int]) -> list[Any]:
        made = [x for n in sorted(inside) for x in self.eqns[n].outvars]
        return [x for x in made if x in self.results or any(n not in inside for n in self.users.get(x, ()))]

    def sources(self, value: Any, also: frozenset[str] = frozenset()) -> set[Any]:
        """Return a value and the values of the same size that elementwise operators compute it from.

        Args:
            value: the value.
            also: the names of further operators that are followed.
        """
        size, seen, left = math.prod(value.aval.shape), {value}, [value]
        while left:
            n = self.maker.get(left.pop())
            if n is None or not (_is_elementwise(self.eqns[n]) or self.eqns[n].primitive.name in also):
                continue
            for y in self.eqns[n].invars:
                if not isinstance(y, _compat.Literal) and math.prod(y.aval.shape) == size and y not in seen:
                    seen.add(y)
                    left.append(y)
        return seen


def _is_elementwise(eqn: Any) -> bool:
    return eqn.primitive.name in ELEMENTWISE | _MORE_ELEMENTWISE | _MOVES


def _is_known(eqn: Any) -> bool:
    """Whether the operator of an equation has a rule, and so have those inside it."""
    inner = [*_inner(eqn)]
    return all(map(_is_known, inner)) if inner else has_rule(eqn.primitive) and not eqn.effects


def _inner(eqn: Any) -> Iterator[Any]:
    """Yield the equations of the jaxprs in an equation's parameters."""
    for jaxpr in jaxprs_of(eqn):
        yield from _compat.open_jaxpr(jaxpr).eqns


def is_coefficient(x: Any) -> bool:
    """Whether an operand has at most `_MOST_COEFFICIENTS` elements."""
    return isinstance(x, _compat.Literal) or math.prod(x.aval.shape) <= _MOST_COEFFICIENTS


def has_batches(jaxpr: Any) -> bool:
    """Whether a program multiplies several matrices at once: one of its products has a batch dimension."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _PRODUCTS:
            (_, _), (batch, _) = eqn.params["dimension_numbers"]
            if any(eqn.invars[0].aval.shape[d] > 1 for d in batch):
                return True
        if any(has_batches(_compat.open_jaxpr(inner)) for inner in jaxprs_of(eqn)):
            return True
    return False


def _has_product(eqn: Any) -> bool:
    """Whether an equation is a product, or a loop or branch with one."""
    if eqn.primitive.name in _PRODUCTS:
        return True
    return any(map(_has_product, _inner(eqn)))
