"""The oracle detects broken rules by running them, without an expected map to compare with."""

import pytest

from autoshard.spmdrules import Rule
from tests.spmdrules.mutants import mutants, survivors
from tests.spmdrules.rows import all_rows

ROWS_BY_ID = {row.id: row for row in all_rows()}
SAMPLE = (
    "add",
    "argmax",
    "broadcast_in_dim",
    "concatenate",
    "cumsum",
    "dot_general",
    "reduce_max",
    "reduce_sum",
    "transpose",
)


def first_row(primitive: str):
    return next(row for row in ROWS_BY_ID.values() if row.primitive == primitive)


@pytest.mark.few(2)
@pytest.mark.whole
@pytest.mark.parametrize("primitive", SAMPLE)
def test_mistakes_in_common_rules_are_detected(primitive):
    count, survived = survivors(first_row(primitive))
    assert count and not survived, [m.how for m in survived]


def test_every_kind_of_mistake_is_generated():
    mistakes = {m.how for m in mutants(Rule.parse("b m k, b k n -> b m n; reduce k; linear 0; linear 1"))}
    expected = {"k is whole", "k:max", "k is not reduced", "m dropped from result 0", "not linear in (0,)"}
    assert expected <= mistakes and "operands 1: dimensions 0 and 2 swapped" in mistakes


@pytest.mark.slow
def test_nearly_every_mistake_in_any_rule_is_detected():
    survivors_of = {name: survivors(row) for name, row in ROWS_BY_ID.items()}
    total, alive = (
        sum(count for count, _ in survivors_of.values()),
        sum(len(survived) for _, survived in survivors_of.values()),
    )
    missed = [f"{name}: {m.how}" for name, (_, survived) in survivors_of.items() for m in survived]
    print(f"{total - alive} of {total} mutants caught")
    assert alive <= 0.02 * total, missed
