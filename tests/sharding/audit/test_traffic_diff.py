"""What was found against what was planned: each difference by its name."""

import pytest

from autoshard.sharding.audit.traffic_diff import WIDENED, Context, Found, compare, place

SIZES = {"dp": 2, "one": 1, "tp": 4}
LINE, OTHER = "/home/me/model.py:12:4 (loss)", "/home/me/model.py:40:4 (step)"
CONTEXT = Context(SIZES)


def found(kind, axes, size, line="/home/me/model.py:12 (loss)", trips=1.0, op_name="jit(step)/dot_general", **more):
    return Found(kind, axes, size, size, trips, line, False, size / 10 * trips, size / 10 * trips, op_name, **more)


def compared(theirs, ours, context=CONTEXT):
    unplanned, missing = compare(theirs, ours, context)
    return [(u.kind, u.axes, u.bytes, u.cause) for u in unplanned], [(m.kind, m.axes, m.bytes) for m in missing]


@pytest.mark.parametrize(
    "theirs",
    [
        [found("all-reduce", ("tp",), 1000)],
        [found("all-reduce", ("tp",), 250, trips=4.0)],
        [found("all-reduce", ("one", "tp"), 1000)],
        [found("all-reduce", ("tp",), 1000, line="/home/me/optimizer.py:3 (update)")],  # combined with another's
        [found("all-reduce", ("tp",), 500, line="elsewhere"), found("all-reduce", ("tp",), 500)],
        [found("reduce-scatter", ("tp",), 500), found("all-gather", ("tp",), 500)],  # its two halves
        [found("collective-permute", ("tp",), 100, trips=10.0)],
    ],
)
def test_the_same_traffic_in_another_form(theirs):
    assert compared(theirs, [("all-reduce", "tp", 1000.0, LINE)]) == ([], [])


@pytest.mark.parametrize(
    ("kind", "planned", "size", "lost", "cause"),
    [
        ("all-reduce", "reduce-scatter", 2000, 1000, "reduced in full where a part would do"),
        ("all-reduce", "all-gather", 2000, 1000, "gathered by summing with zeros"),
        ("all-gather", "all-to-all", 4000, 3000, "gathered whole where an exchange of parts would do"),
    ],
)
def test_what_another_form_costs_more(kind, planned, size, lost, cause):
    theirs = [found(kind, ("tp",), size)]
    assert compared(theirs, [(planned, "tp", 1000.0, LINE)]) == ([(kind, ("tp",), lost, cause)], [])


def test_sums_are_set_off_before_gathers():
    ours = [("all-gather", "tp", 1000.0, LINE), ("reduce-scatter", "tp", 1000.0, LINE)]
    theirs = [found("all-reduce", ("tp",), 2000), found("all-gather", ("tp",), 1000)]
    assert compared(theirs, ours)[0] == [("all-reduce", ("tp",), 1000, "reduced in full where a part would do")]


def test_what_is_not_there():
    assert compared([], [("all-gather", "tp", 1000.0, LINE)]) == ([], [("all-gather", ("tp",), 1000)])


@pytest.mark.parametrize(
    ("one", "cause"),
    [
        (found("all-gather", ("tp",), 500, op_name="jit(f)/sort"), "the partitioner makes an array whole at sort"),
        (found("all-reduce", ("tp",), 500), "a sum over devices that is not planned, at dot_general"),
        (found("all-to-all", ("tp",), 500, op_name="jit(f)/sharding_constraint"),
         "the partitioner moves a cut from one dimension to another at a layout that the plan asks for"),
        (found("collective-permute", ("tp",), 500), "the partitioner sends pieces to neighbours at dot_general"),
        (found("all-gather", (), 500, devices="{0,1}{2,3}"), "over devices that are no mesh axis's, at dot_general"),
        (found("all-gather", ("tp",), 500, op_name="jit(f)/(a/mul:b/reduce_sum)"),
         "the partitioner makes an array whole at reduce_sum"),
        (found("all-gather", ("tp",), 500, op_name=""),
         "the partitioner makes an array whole at an operator without a name"),
    ],
)  # fmt: skip
def test_why_something_moves_that_is_not_planned(one, cause):
    (unplanned,), _ = compare([one], [], CONTEXT)
    assert (unplanned.bytes, unplanned.us, unplanned.cause) == (500, 50, cause)


def test_more_than_planned():
    theirs = [found("all-gather", ("tp",), 500, trips=4.0)]
    cause = "more than the all-gather that is planned on this line, at dot_general"
    assert compared(theirs, [("all-gather", "tp", 500.0, LINE)]) == ([("all-gather", ("tp",), 1500, cause)], [])


def test_operators_without_a_rule_and_remarks_are_named():
    context = Context(SIZES, {place(LINE): "cumsum"}, ())
    assert "no rule for 'cumsum'" in compared([found("all-gather", ("tp",), 500)], [], context)[0][0][3]
    context = Context(SIZES, {}, {"jit(step)/dot_general"})
    cause = "involuntary full rematerialization at dot_general"
    assert compared([found("all-gather", ("tp",), 500)], [], context)[0][0][3] == cause


def test_axes_that_overlap_are_set_off_last():
    ours = [("all-reduce", "dp", 500.0, LINE), ("all-reduce", "tp", 500.0, OTHER)]
    assert compared([found("all-reduce", ("dp", "tp"), 1000)], ours) == ([], [])
    apart = [found("all-reduce", ("dp",), 500), found("all-reduce", ("tp",), 500)]
    assert compared(apart, [("all-reduce", "dp tp", 1000.0, LINE)]) == ([], [])
    assert compared([found("all-reduce", ("dp",), 500)], [("all-reduce", "tp", 500.0, LINE)])[0]


def test_an_exchange_elsewhere_does_not_stand_for_a_gather():
    theirs = [found("all-to-all", ("tp",), 500, line="/home/me/optimizer.py:3 (update)")]
    unplanned, missing = compared(theirs, [("all-gather", "tp", 500.0, LINE)])
    assert [u[:3] for u in unplanned] == [("all-to-all", ("tp",), 500)]
    assert missing == [("all-gather", ("tp",), 500)]


def test_wider_numbers_cost_half_of_what_is_sent():
    theirs = [found("all-gather", ("tp",), 1000, widened=True)]
    assert compared(theirs, [("all-gather", "tp", 500.0, LINE)]) == ([("all-gather", ("tp",), 500, WIDENED)], [])


def test_next_to_nothing_is_no_finding():
    theirs = [found("all-gather", ("tp",), 100_000), found("all-reduce", ("dp",), 8)]
    assert compared(theirs, [("all-gather", "tp", 100_000.0, LINE), ("all-to-all", "dp", 8.0, LINE)]) == ([], [])


def test_findings_alike_are_one():
    theirs = [found("all-gather", ("tp",), 100), found("all-gather", ("tp",), 300), found("all-gather", ("dp",), 500)]
    unplanned, _ = compare(theirs, [], CONTEXT)
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
    assert place(line) == expected
