"""The order of the collectives of a reshard: each moves or gathers minor mesh axes."""

import itertools

import pytest

from autoshard.spmdrules.core.reshard_path import all_to_alls, minor_to, moves_axis, reshard_path

AXES = ("a", "b", "c")


def specs():
    """Every sharding of two dimensions by some of the axes, in every order."""
    for count in range(len(AXES) + 1):
        for axes in itertools.permutations(AXES, count):
            for split in range(count + 1):
                yield axes[:split], axes[split:]


def changes(before, after):
    """The kinds of collectives between two shardings, or None if a mesh axis that is not minor leaves a dimension."""
    dim_of = {axis: d for d, axes in enumerate(after) for axis in axes}
    kinds = set()
    for d, axes in enumerate(before):
        kept = [axis for axis in axes if dim_of.get(axis) == d]
        if list(axes[: len(kept)]) != kept or list(after[d][: len(kept)]) != kept:
            return None
        kinds |= {"all-to-all" if axis in dim_of else "all-gather" for axis in axes[len(kept) :]}
    return kinds


def test_every_path_ends_as_wanted_and_each_of_its_steps_needs_one_kind_of_collective():
    lengths = []
    for before, after in itertools.product(specs(), specs()):
        path = [before, *reshard_path(before, after)]
        assert path[-1] == after
        assert moves_axis(before, after) or len(path) == 2
        # XLA does the rest at the end: it adds mesh axes and changes their order.
        steps = [changes(*pair) for pair in itertools.pairwise(path)][:-1]
        assert all(step is not None and len(step) == 1 for step in steps), (before, path)
        lengths.append(len(path))
    assert {*lengths} == {2, 3, 4}


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        ((("a", "b"), (), ()), ((), ("b",), ("a",)), [(("a",), ("b",), ())]),
        ((("a", "b"), (), ()), ((), ("a",), ("b",)), [(("a",), (), ("b",))]),
        (((), ("b",), ("a",)), (("a", "b"), (), ()), [(("a",), ("b",), ())]),
        ((("a", "b"), (), ()), ((), ("a", "b"), ()), []),  # one all-to-all over both
        ((("a",), ("b",), (), ()), ((), (), ("a",), ("b",)), []),  # two that have no dimension in common
        ((("a", "b", "c"), (), ()), ((), ("b", "c"), ("a",)), [(("a",), ("b", "c"), ())]),
    ],
    ids=str,
)
def test_all_to_alls_with_a_common_dimension_follow_each_other(before, after, path):
    assert reshard_path(before, after) == [*path, after]


def test_mesh_axes_between_the_same_two_dimensions_move_at_once():
    before, after = (("a", "b", "c"), (), ()), ((), ("b", "c"), ("a",))
    assert all_to_alls(before, after, ["a", "b", "c"]) == [("a",), ("b", "c")]


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        ((("a", "b"), ()), (("a",), ("b",)), []),
        ((("a", "b"), ()), ((), ("a",)), [(("a",), ())]),
        ((("a", "b"), ()), ((), ("b",)), [(("a",), ("b",))]),
        ((("a",), ("b",)), (("b",), ()), [((), ("b",))]),
        ((("a", "b", "c"), ()), ((), ("a", "b")), [(("a", "b"), ())]),
        ((("a",), ("b",)), (("b",), ("a",)), []),  # a swap
    ],
    ids=str,
)
def test_gathers_come_before_the_move_of_an_axis_that_is_major_to_them_and_after_any_other(before, after, path):
    assert reshard_path(before, after) == [*path, after]


def test_only_axes_behind_a_moved_one_are_gathered_first():
    assert minor_to((("a", "b"), ("c",)), ["a"], ["b", "c"]) == ["b"]
    assert minor_to((("b", "a"), ("c",)), ["a"], ["b", "c"]) == []
