"""Every row of every family is run: on the shards that its rule declares, and by the partitioner."""

import pytest

from autoshard.sharding.oracle.cases import collect
from autoshard.sharding.oracle.rule_check import Finding, check_case, strategies
from autoshard.spmdrules.core.registry import registered
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from autoshard.spmdrules.families.manual_sharding import communicates
from tests.spmdrules.rows import Row, all_rows

ALL = all_rows()
ROWS = [row for row in ALL if not row.unchecked]
UNCHECKED = [row for row in ALL if row.unchecked]
# The partitioner's part takes most of the time: the quick suite has it for what every model is made of.
COMMON = (
    "add", "broadcast_in_dim", "concatenate", "convert_element_type", "dot_general", "exp", "gather", "iota", "mul",
    "reduce_max", "reduce_sum", "reshape", "scatter-add", "select_n", "transpose",
)  # fmt: skip
SAMPLE = [row for row in {row.primitive: row for row in reversed(ROWS)}.values() if row.primitive in COMMON]


def examine(row: Row, partitioner: bool) -> list[Finding]:
    """What the oracle finds in the row's own equations."""
    cases = [case for case in collect(row.fn, row.args) if case.name == row.primitive]
    assert cases, f"{row.id}: no {row.primitive} was run"
    return [finding for case in cases for finding in check_case(case, partitioner=partitioner)]


def told(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


# Of each primitive the first row; the others are run with the partitioner, and those of what every model is made of.
FIRST = {row.primitive: row for row in reversed(ROWS)}
VARIED = ("conv_general_dilated", "dot_general", "gather", "reshape", "scatter-add")


@pytest.mark.whole
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row is FIRST[row.primitive] or row.primitive in VARIED], ids=lambda row: row.id
)
def test_shards(row):
    findings = examine(row, partitioner=False)
    assert not findings, told(findings)


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.id)
def test_partitioner_on_common_operators(row):
    findings = examine(row, partitioner=True)
    assert not findings, told(findings)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_partitioner(row):
    findings = examine(row, partitioner=True)
    if row.unpartitioned:
        assert {finding.kind for finding in findings} == {"partitioner"}, f"{row.id} is mended"
    else:
        assert not findings, told(findings)


@pytest.mark.parametrize("row", UNCHECKED, ids=lambda row: row.id)
def test_what_is_not_checked_cannot_be(row):
    if communicates(row.equation()):
        return  # its shards need each other
    try:
        findings = examine(row, partitioner=False)
    except Exception:  # whatever keeps it from running
        return
    assert findings, f"{row.id} can be checked"


def test_every_registered_primitive_has_a_row():
    rows = {row.primitive for row in ALL}
    ours = [p.name for p, _ in registered() if not is_operator(p)]  # tests declare operators of their own
    missing = [name for name in ours if name not in rows]
    assert not missing, f"no row for {', '.join(missing)}: add one to the table of its family"


def test_every_primitive_with_something_to_cut_has_a_row_that_cuts_it():
    tried: dict[str, bool] = {}
    for row in ROWS:
        rule = row.rule()
        cuttable = any(factor.shardable for factor in rule.factors)
        tried[row.primitive] = tried.get(row.primitive, not cuttable) or bool(strategies(rule))
    idle = [primitive for primitive, was_tried in tried.items() if not was_tried]
    assert not idle, f"no row of {', '.join(idle)} has a factor of even size: the oracle has nothing to run"
