"""Conflicts are resolved by the bytes that move; each value and each requested spec counts once."""

import jax
import pytest

from autoshard.spmdrules.core.conflict_resolution import Operand, resolve
from autoshard.spmdrules.core.placement import Placement
from autoshard.spmdrules.core.rule import Rule

MESH = {"a": 4}
ROWS, COLUMNS, REPLICATED = Placement((("a",), ())), Placement(((), ("a",))), Placement(((), ()))
SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")


def test_a_value_that_is_used_twice_moves_once():
    rule = Rule.parse("i j, i j, i j -> i j", SQUARE, SQUARE, SQUARE)
    for same_as, where in ((0, COLUMNS), (1, ROWS)):  # one value of 100 bytes used twice, or two such values
        operands = [
            Operand(ROWS, 100, False, 0),
            Operand(ROWS, 100, False, same_as),
            Operand(COLUMNS, 150, False, 2),
        ]
        actual = resolve(rule, operands, [0], [None], MESH)
        assert actual.operands == (where,) * 3 and actual.results == (where,)


@pytest.mark.parametrize(("requested", "where"), [(None, ROWS), (ROWS.spec, ROWS), (COLUMNS.spec, COLUMNS)])
def test_the_requested_spec_breaks_a_tie(requested, where):
    rule = Rule.parse("m k, k n -> m n; reduce k", SQUARE, SQUARE)
    operands = [Operand(ROWS, 256, False, 0), Operand(COLUMNS, 256, False, 1)]
    assert resolve(rule, operands, [256], [requested], MESH).results == (where,)


def test_a_partial_result_costs_its_reduction():
    rule = Rule.parse("m k, k n -> m n; reduce k", SQUARE, SQUARE)
    operands = [Operand(COLUMNS, 256, False, 0), Operand(REPLICATED, 256, False, 1)]
    small, large = (resolve(rule, operands, [size], [None], MESH).results[0] for size in (8, 1 << 20))
    assert small == large == Placement(((), ()), (("a", "sum"),))  # the operands agree, so nothing is priced
    conflict = [Operand(COLUMNS, 256, False, 0), Operand(COLUMNS, 200, False, 1)]
    assert resolve(rule, conflict, [8], [None], MESH).results == (Placement(((), ()), (("a", "sum"),)),)
    assert resolve(rule, conflict, [1 << 20], [None], MESH).results == (COLUMNS,)
