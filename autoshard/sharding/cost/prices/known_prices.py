"""Prices of operators that were computed before in this process.

The variants of one program have mostly equal operators: another remat policy or another schedule of a pipeline changes
where they run, not what they cost. A price depends on the operator, its kernel and the sharding of its values, so equal
ones have equal prices, whatever program they come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from autoshard._caches import drop_older_half
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.axes.weights.loop_sums import is_loop_term
from autoshard.sharding.cost.constants import MOST_KNOWN_PRICES
from autoshard.sharding.cost.equivalence_classes import OperatorClass, moves_operands
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.cost.prices.canonical_layout import CanonicalSpecs
from autoshard.sharding.cost.prices.price import Price
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.program.operator_kinds import is_decision_point

_numbers: dict[Any, tuple[int, Any]] = {}  # key of an operator class -> its number, and its rule, which keeps its id
_prices: dict[Any, Price] = {}
_counter = itertools.count()  # no number is used again, because models keep the numbers of their classes


def _drop_older_half(needed: int) -> None:
    """Delete the older half of the prices. Also delete the classes that have no price left, except number `needed`."""
    drop_older_half(_prices)
    kept = {needed, *(number for number, *_ in _prices)}
    for key in [key for key, (number, _) in _numbers.items() if number not in kept]:
        del _numbers[key]


class KnownPrices:
    """The prices that the operator classes of one program share with other programs on the same machine.

    Args:
        axes: the logical axes of the program.
        roles: the roles of its inputs and axes.
        fusion: its kernels.
        target: the machine.
    """

    def __init__(self, axes: LogicalAxes, roles: Roles, fusion: Fusion, target: Target):
        self.axes, self.roles, self.fusion, self.target = axes, roles, fusion, target
        self._number_of: dict[int, int | None] = {}

    def __call__(self, op_class: OperatorClass, specs: CanonicalSpecs, compute: Callable[[], Price]) -> Price:
        """Return the price of a class's operator.

        Args:
            op_class: the class, one of the program's.
            specs: the sharding of what it takes, returns, reads and writes.
            compute: computes the price if it is not known.
        """
        name = id(op_class)
        if name not in self._number_of:
            self._number_of[name] = self._number(op_class)
        number = self._number_of[name]
        if number is None:
            return compute()
        key = number, specs.specs, tuple(specs.sizes.items()), tuple(specs.sequence.items())
        found = _prices.get(key)
        if found is None:
            if len(_prices) >= MOST_KNOWN_PRICES:
                _drop_older_half(number)
            found = _prices[key] = compute()
        return found

    def _number(self, op_class: OperatorClass) -> int | None:
        """Return the number that equal classes have in every program; None for operators that cannot be compared."""
        op, axes = op_class.op, self.axes
        if op.blocks:
            return None
        arrays = (*op.operands, *op.results)
        position = {v: n for n, v in enumerate(arrays) if v >= 0}
        facts = op_class.facts(axes, self.roles, self.fusion)
        types = [(v.aval.shape, v.aval.dtype) for v in (*op.eqn.invars, *op.eqn.outvars)]
        is_literal = tuple([v < 0 for v in arrays])
        key = (
            self.target, op.name, id(op.rule), tuple(op.eqn.params.items()), tuple(types), is_literal,
            tuple(facts.transfer_bytes), tuple([(position.get(v), *rest) for v, *rest in facts.memory]),
            is_loop_term(self.roles.loop_sums, op), facts.rounded,
            None if is_decision_point(op) else (moves_operands(op, axes, self.roles), self._logical_axes(arrays)),
        )  # fmt: skip
        try:
            found = _numbers.get(key)
        except TypeError:  # a parameter is not hashable
            return None
        if found is None:
            found = _numbers[key] = next(_counter), op.rule
        return found[0]

    def _logical_axes(self, arrays: tuple[int, ...]) -> Any:
        """Return the logical axes of some values, numbered by their first occurrence; their sizes; those of rows."""
        number: dict[int, int] = {}
        of_value = [self.axes.of_value[v] if v >= 0 else None for v in arrays]
        dims = [
            leaves and tuple(tuple(number.setdefault(c, len(number)) for c in dim) for dim in leaves)
            for leaves in of_value
        ]
        rows = tuple(n for c, n in number.items() if c in self.roles.rows)
        return tuple(dims), tuple(self.axes.sizes[c] for c in number), rows
