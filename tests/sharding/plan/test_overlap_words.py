"""The table of `overlap=`, given as a mapping or as text."""

import pytest

from autoshard.errors import PlanError
from autoshard.sharding.plan.overlap_words import overlap_text, read_overlap

TABLE = {"experts/*": {"gather": "off"}, "*/wq": {"gather": "on", "matmul": "off"}}


@pytest.mark.parametrize("given", [
    TABLE,
    "experts/*:gather=off */wq:gather=on,matmul=off",
    ["experts/*:gather=off", "*/wq:gather=on", "*/wq:matmul=off"],
])  # fmt: skip
def test_forms_of_one_table(given):
    assert read_overlap(given) == TABLE
    assert read_overlap(overlap_text(read_overlap(given))) == TABLE


def test_no_table():
    assert read_overlap(None) == read_overlap({}) == read_overlap("") == {}


@pytest.mark.parametrize(("given", "message"), [
    ({"wq": {"gathers": "off"}}, "no kind 'gathers'; the kinds are gather, reduce, matmul"),
    ({"wq": {"gather": False}}, "gather is False; it must be 'on' or 'off'"),
    ({"wq": "off"}, "give {path: {kind: 'on' or 'off'}}"),
    ({"wq": {}}, "give {path: {kind: 'on' or 'off'}}"),
    (3, "overlap is 3"),
    ("wq", "write PATH:KIND=on or off"),
    ("wq:gather", "write PATH:KIND=on or off"),
    (["wq:gather=on", "wq:gather=off"], "gather is both 'on' and 'off'"),
])  # fmt: skip
def test_invalid_tables(given, message):
    with pytest.raises(PlanError) as raised:
        read_overlap(given)
    assert message in str(raised.value)
