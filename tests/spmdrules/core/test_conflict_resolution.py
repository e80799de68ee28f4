"""Conflicts are settled by the bytes that move, each value and each wish counted once."""

import jax
import pytest

from autoshard.spmdrules.core.conflict_resolution import Operand, resolve
from autoshard.spmdrules.core.placement import Placement
from autoshard.spmdrules.core.rule import Rule

MESH = {"a": 4}
BY_ROWS, COLUMNS, WHOLE = Placement((("a",), ())), Placement(((), ("a",))), Placement(((), ()))
SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")


def test_a_value_that_is_taken_twice_moves_once():
    rule = Rule.parse("i j, i j, i j -> i j", SQUARE, SQUARE, SQUARE)
    for first_twin, where in ((0, COLUMNS), (1, BY_ROWS)):  # one value of 100 bytes twice, or two of them
        operands = [
            Operand(BY_ROWS, 100, False, 0),
            Operand(BY_ROWS, 100, False, first_twin),
            Operand(COLUMNS, 150, False, 2),
        ]
        found = resolve(rule, operands, [0], [None], MESH)
        assert found.operands == (where,) * 3 and found.results == (where,)


@pytest.mark.parametrize(("wanted", "where"), [(None, BY_ROWS), (BY_ROWS.spec, BY_ROWS), (COLUMNS.spec, COLUMNS)])
def test_where_a_result_is_wanted_decides_between_equals(wanted, where):
    rule = Rule.parse("m k, k n -> m n; reduce k", SQUARE, SQUARE)
    operands = [Operand(BY_ROWS, 256, False, 0), Operand(COLUMNS, 256, False, 1)]
    assert resolve(rule, operands, [256], [wanted], MESH).results == (where,)


def test_a_partial_result_counts_what_makes_it_whole():
    rule = Rule.parse("m k, k n -> m n; reduce k", SQUARE, SQUARE)
    operands = [Operand(COLUMNS, 256, False, 0), Operand(WHOLE, 256, False, 1)]
    small, large = (resolve(rule, operands, [size], [None], MESH).results[0] for size in (8, 1 << 20))
    assert small == large == Placement(((), ()), (("a", "sum"),))  # the operands agree: nothing is priced
    turned = [Operand(COLUMNS, 256, False, 0), Operand(COLUMNS, 200, False, 1)]
    assert resolve(rule, turned, [8], [None], MESH).results == (Placement(((), ()), (("a", "sum"),)),)
    assert resolve(rule, turned, [1 << 20], [None], MESH).results == (COLUMNS,)
