"""Every row of every family is run: on the shards that its rule declares, and by the partitioner."""

import pytest

from autoshard.sharding.oracle import Finding, check_case
from autoshard.sharding.oracle_cases import collect
from autoshard.spmdrules.registry import registered
from tests.spmdrules.rows import Row, all_rows

ROWS = all_rows()
# The partitioner's part takes most of the time: the quick suite runs it on each primitive's first row.
FIRST = list({row.primitive: row for row in reversed(ROWS)}.values())[::-1]


def examine(row: Row, partitioner: bool) -> list[Finding]:
    """What the oracle finds in the row's own equations."""
    cases = [case for case in collect(row.fn, row.args) if case.name == row.primitive]
    assert cases, f"{row.id}: no {row.primitive} was run"
    return [finding for case in cases for finding in check_case(case, partitioner=partitioner)]


def told(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_shards(row):
    findings = examine(row, partitioner=False)
    assert not findings, told(findings)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_partitioner(row):
    findings = examine(row, partitioner=True)
    assert not findings, told(findings)


def test_every_registered_primitive_has_a_row():
    rows = {row.primitive for row in ROWS}
    missing = [primitive.name for primitive, _ in registered() if primitive.name not in rows]
    assert not missing, f"no row for {', '.join(missing)}: add one to the table of its family"
