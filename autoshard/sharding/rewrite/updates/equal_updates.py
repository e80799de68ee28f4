"""Finds equal updates: two updates have equal keys if they apply the same function to matrices of one shape."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from autoshard import _compat
from autoshard.sharding.rewrite.updates.matrix_updates import MatrixUpdate, is_coefficient

# Most equations in a row that are followed to compare two coefficients. Source: chosen; optax's Muon has one, the cast
# of the coefficients to the dtype of each matrix.
_MOST_EQUATIONS = 16


class UpdateKeys:
    """The keys of the updates of a step."""

    def __init__(self, jaxpr: Any):
        self._eqns = jaxpr.eqns
        self._maker: Mapping[Any, tuple[int, int]] = {
            x: (n, at) for n, eqn in enumerate(jaxpr.eqns) for at, x in enumerate(eqn.outvars)
        }
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Any, Hashable] = {}

    def of(self, one: MatrixUpdate) -> Hashable:
        """Return the key of an update. It does not depend on the values of the coefficients."""
        names: dict[Any, Hashable] = {one.first: 0, **{x: (n, str(x.aval)) for n, x in enumerate(one.others)}}
        written: list[Hashable] = []
        for position in one.inside:
            eqn = self._eqns[position]
            operands = tuple(_literal(x) if isinstance(x, _compat.Literal) else names[x] for x in eqn.invars)
            written.append((eqn.primitive.name, _params(eqn), operands))
            for x in eqn.outvars:
                names[x] = len(names)
        return one.first.aval.shape, str(one.first.aval.dtype), tuple(written), names[one.last]

    def coefficient(self, x: Any, most: int = _MOST_EQUATIONS) -> Hashable:
        """Return a key that is equal for two coefficients if they are computed in the same way."""
        if isinstance(x, _compat.Literal):
            return _literal(x)
        if x not in self._known:
            self._known[x] = self._computed(x, most)
        return self._known[x]

    def _computed(self, x: Any, most: int) -> Hashable:
        if x not in self._maker or most == 0:
            return x
        position, at = self._maker[x]
        eqn = self._eqns[position]
        if eqn.effects or not all(map(is_coefficient, eqn.invars)):
            return x
        key = eqn.primitive.name, _params(eqn), tuple(self.coefficient(y, most - 1) for y in eqn.invars), at
        return "computed", self._numbers.setdefault(key, len(self._numbers))


def _literal(x: Any) -> Hashable:
    return "literal", _array(x.val), str(x.aval)


def _params(eqn: Any) -> Hashable:
    return tuple((name, _written(value)) for name, value in sorted(eqn.params.items()))


def _written(value: Any) -> Hashable:
    """Return a key of a parameter: its text, and for a jaxpr also its arrays, which JAX abbreviates in the text."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_written, value))
    if not _compat.is_jaxpr(value):
        return str(value)
    jaxpr = _compat.open_jaxpr(value)
    literals = [x.val for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, _compat.Literal)]
    inner = tuple(_params(eqn) for eqn in jaxpr.eqns)
    return str(jaxpr), tuple(map(_array, (*_compat.constants(value), *literals))), inner


def _array(value: Any) -> Hashable:
    return str(value) if getattr(value, "shape", ()) == () else id(value)
