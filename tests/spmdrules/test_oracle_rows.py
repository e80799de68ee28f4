"""Runs every row of every family: on the shards that its rule declares, and by XLA's partitioner."""

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
# The partitioner checks take most of the time, so the quick suite runs them only for the most common operators.
COMMON = (
    "add", "broadcast_in_dim", "concatenate", "convert_element_type", "dot_general", "exp", "gather", "iota", "mul",
    "reduce_max", "reduce_sum", "reshape", "scatter-add", "select_n", "transpose",
)  # fmt: skip
SAMPLE = [row for row in {row.primitive: row for row in reversed(ROWS)}.values() if row.primitive in COMMON]


def examine(row: Row, partitioner: bool) -> list[Finding]:
    """Returns the oracle's findings for the equations of the row's primitive."""
    cases = [case for case in collect(row.fn, row.args) if case.name == row.primitive]
    assert cases, f"{row.id}: no {row.primitive} was run"
    return [finding for case in cases for finding in check_case(case, partitioner=partitioner)]


def report(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


# The default run checks a part of the rows, and `make test-all` checks all. Rows of the primitives in `VARIED` differ
# most, so the default run has every fourth of them. Other primitives share rules, and it has one row for each rule and
# expected map.
RULES = {primitive.name: rule for primitive, rule in registered()}
FIRST = {row.primitive: row for row in reversed(ROWS)}
KINDS = {(RULES[name], row.expected): row for name, row in FIRST.items()}
VARIED = ("conv_general_dilated", "dot_general", "gather", "reshape", "scatter-add", "shift_stages")
SOME = [*KINDS.values(), *[row for row in ROWS if row.primitive in VARIED][::4]]
SHARDED = [row for row in ROWS if any(row is each for each in SOME)]


@pytest.mark.whole
@pytest.mark.parametrize("row", SHARDED, ids=lambda row: row.id)
def test_shards(row):
    findings = examine(row, partitioner=False)
    assert not findings, report(findings)


@pytest.mark.few(4)
@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.id)
def test_partitioner_on_common_operators(row):
    findings = examine(row, partitioner=True)
    assert not findings, report(findings)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_partitioner(row):
    findings = examine(row, partitioner=True)
    if row.unpartitioned:
        assert {finding.kind for finding in findings} == {"partitioner"}, f"{row.id} works now: drop `unpartitioned`"
    else:
        assert not findings, report(findings)


@pytest.mark.whole
@pytest.mark.few(6)
@pytest.mark.parametrize("row", UNCHECKED, ids=lambda row: row.id)
def test_unchecked_rows_cannot_be_checked(row):
    if communicates(row.equation()):
        return  # its shards depend on each other
    try:
        findings = examine(row, partitioner=False)
    except Exception:  # any error means that it cannot run here
        return
    assert findings, f"{row.id} can be checked: drop `unchecked`"


def test_every_registered_primitive_has_a_row():
    rows = {row.primitive for row in ALL}
    ours = [p.name for p, _ in registered() if not is_operator(p)]  # other tests declare operators
    missing = [name for name in ours if name not in rows]
    assert not missing, f"no row for {', '.join(missing)}: add one to the table of its family"


def test_every_primitive_that_can_be_sharded_has_a_row_that_shards_it():
    tried: dict[str, bool] = {}
    for row in ROWS:
        rule = row.rule()
        shardable = any(factor.shardable for factor in rule.factors)
        tried[row.primitive] = tried.get(row.primitive, not shardable) or bool(strategies(rule))
    untried = [primitive for primitive, was_tried in tried.items() if not was_tried]
    assert not untried, f"no row of {', '.join(untried)} has a factor of even size: the oracle has nothing to run"
