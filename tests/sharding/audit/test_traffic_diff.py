"""The traffic of a compiled program compared with the planned traffic: every difference has a cause."""

import pytest

from autoshard.sharding.audit.traffic_diff import WIDENED, CompiledCollective, Context, compare, file_and_line

SIZES = {"dp": 2, "one": 1, "tp": 4}
LINE, OTHER = "/home/me/model.py:12:4 (loss)", "/home/me/model.py:40:4 (step)"
CONTEXT = Context(SIZES)


def compiled(kind, axes, size, line="/home/me/model.py:12 (loss)", trips=1.0, op_name="jit(step)/dot_general", **more):
    return CompiledCollective(
        kind, axes, size, size, trips, line, False, size / 10 * trips, size / 10 * trips, op_name, **more
    )


def compared(compiled_traffic, planned_traffic, context=CONTEXT):
    unplanned, missing = compare(compiled_traffic, planned_traffic, context)
    return [(u.kind, u.axes, u.bytes, u.cause) for u in unplanned], [(m.kind, m.axes, m.bytes) for m in missing]


@pytest.mark.parametrize(
    "compiled_traffic",
    [
        [compiled("all-reduce", ("tp",), 1000)],
        [compiled("all-reduce", ("tp",), 250, trips=4.0)],
        [compiled("all-reduce", ("one", "tp"), 1000)],
        [compiled("all-reduce", ("tp",), 1000, line="/home/me/optimizer.py:3 (update)")],  # combined
        [compiled("all-reduce", ("tp",), 500, line="elsewhere"), compiled("all-reduce", ("tp",), 500)],
        [compiled("reduce-scatter", ("tp",), 500), compiled("all-gather", ("tp",), 500)],  # its two halves
        [compiled("collective-permute", ("tp",), 100, trips=10.0)],
    ],
)
def test_same_traffic_as_other_collectives(compiled_traffic):
    assert compared(compiled_traffic, [("all-reduce", "tp", 1000.0, LINE)]) == ([], [])


@pytest.mark.parametrize(
    ("kind", "planned", "size", "excess", "cause"),
    [
        ("all-reduce", "reduce-scatter", 2000, 1000, "an all-reduce instead of a reduce-scatter"),
        ("all-reduce", "all-gather", 2000, 1000, "gathered by a sum with zeros"),
        ("all-gather", "all-to-all", 4000, 3000, "an all-gather instead of an all-to-all"),
    ],
)
def test_substitute_that_sends_more(kind, planned, size, excess, cause):
    compiled_traffic = [compiled(kind, ("tp",), size)]
    assert compared(compiled_traffic, [(planned, "tp", 1000.0, LINE)]) == ([(kind, ("tp",), excess, cause)], [])


def test_reductions_match_before_gathers():
    planned_traffic = [("all-gather", "tp", 1000.0, LINE), ("reduce-scatter", "tp", 1000.0, LINE)]
    compiled_traffic = [compiled("all-reduce", ("tp",), 2000), compiled("all-gather", ("tp",), 1000)]
    assert compared(compiled_traffic, planned_traffic)[0] == [
        ("all-reduce", ("tp",), 1000, "an all-reduce instead of a reduce-scatter")
    ]


def test_missing_traffic():
    assert compared([], [("all-gather", "tp", 1000.0, LINE)]) == ([], [("all-gather", ("tp",), 1000)])


@pytest.mark.parametrize(
    ("one", "cause"),
    [
        (compiled("all-gather", ("tp",), 500, op_name="jit(f)/sort"), "the partitioner replicates an array at sort"),
        (compiled("all-reduce", ("tp",), 500), "a reduction over devices that is not planned, at dot_general"),
        (compiled("all-to-all", ("tp",), 500, op_name="jit(f)/sharding_constraint"),
         "the partitioner moves a sharding from one dimension to another at a sharding constraint of the plan"),
        (compiled("collective-permute", ("tp",), 500), "the partitioner sends shards to other devices at dot_general"),
        (compiled("all-gather", (), 500, devices="{0,1}{2,3}"),
         "groups of devices that are not those of mesh axes, at dot_general"),
        (compiled("all-gather", ("tp",), 500, op_name="jit(f)/(a/mul:b/reduce_sum)"),
         "the partitioner replicates an array at reduce_sum"),
        (compiled("all-gather", ("tp",), 500, op_name=""),
         "the partitioner replicates an array at an operator without a name"),
    ],
)  # fmt: skip
def test_causes_of_unplanned_traffic(one, cause):
    (unplanned,), _ = compare([one], [], CONTEXT)
    assert (unplanned.bytes, unplanned.us, unplanned.cause) == (500, 50, cause)


def test_more_than_planned():
    compiled_traffic = [compiled("all-gather", ("tp",), 500, trips=4.0)]
    cause = "more than the planned all-gather on this line, at dot_general"
    assert compared(compiled_traffic, [("all-gather", "tp", 500.0, LINE)]) == (
        [("all-gather", ("tp",), 1500, cause)],
        [],
    )


def test_operators_without_a_rule_and_rematerializations_are_causes():
    context = Context(SIZES, {file_and_line(LINE): "cumsum"}, ())
    assert "no rule for 'cumsum'" in compared([compiled("all-gather", ("tp",), 500)], [], context)[0][0][3]
    context = Context(SIZES, {}, {"jit(step)/dot_general"})
    cause = "involuntary full rematerialization at dot_general"
    assert compared([compiled("all-gather", ("tp",), 500)], [], context)[0][0][3] == cause


def test_overlapping_axes_match_last():
    planned_traffic = [("all-reduce", "dp", 500.0, LINE), ("all-reduce", "tp", 500.0, OTHER)]
    assert compared([compiled("all-reduce", ("dp", "tp"), 1000)], planned_traffic) == ([], [])
    separate = [compiled("all-reduce", ("dp",), 500), compiled("all-reduce", ("tp",), 500)]
    assert compared(separate, [("all-reduce", "dp tp", 1000.0, LINE)]) == ([], [])
    assert compared([compiled("all-reduce", ("dp",), 500)], [("all-reduce", "tp", 500.0, LINE)])[0]


def test_all_to_all_on_another_line_does_not_match_an_all_gather():
    compiled_traffic = [compiled("all-to-all", ("tp",), 500, line="/home/me/optimizer.py:3 (update)")]
    unplanned, missing = compared(compiled_traffic, [("all-gather", "tp", 500.0, LINE)])
    assert [u[:3] for u in unplanned] == [("all-to-all", ("tp",), 500)]
    assert missing == [("all-gather", ("tp",), 500)]


def test_widened_numbers_are_half_of_the_traffic():
    compiled_traffic = [compiled("all-gather", ("tp",), 1000, widened=True)]
    assert compared(compiled_traffic, [("all-gather", "tp", 500.0, LINE)]) == (
        [("all-gather", ("tp",), 500, WIDENED)],
        [],
    )


def test_negligible_traffic_is_not_reported():
    compiled_traffic = [compiled("all-gather", ("tp",), 100_000), compiled("all-reduce", ("dp",), 8)]
    assert compared(compiled_traffic, [("all-gather", "tp", 100_000.0, LINE), ("all-to-all", "dp", 8.0, LINE)]) == (
        [],
        [],
    )


def test_equal_findings_are_combined():
    compiled_traffic = [
        compiled("all-gather", ("tp",), 100),
        compiled("all-gather", ("tp",), 300),
        compiled("all-gather", ("dp",), 500),
    ]
    unplanned, _ = compare(compiled_traffic, [], CONTEXT)
    assert [(u.axes, u.bytes) for u in unplanned] == [(("dp",), 500), (("tp",), 400)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/a/b.py:12:4 (f.<locals>.g)", "/a/b.py:12"),
        ("/a/b.py:12 (f)", "/a/b.py:12"),
        ("/a/b.py:12", "/a/b.py:12"),
        ("C:\\a\\b.py:12:4 (f)", "C:\\a\\b.py:12"),
        ("parameters, before a loop", "parameters, before a loop"),
        ("", ""),
    ],
)
def test_places_of_lines(line, expected):
    assert file_and_line(line) == expected
