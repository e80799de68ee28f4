"""The rule by which texts name paths, and the suggestions for texts that name none."""

import pytest

from autoshard.sharding.program.path_patterns import AmbiguousPathError, find_paths, suggestions

PATHS = ["0/params/up", "0/params/down", "0/mu/up", "0/mu/down", "0/count", "1"]


@pytest.mark.parametrize(
    ("text", "found", "is_glob"),
    [
        ("0/params/up", [0], False),
        ("/0/params/up/", [0], False),
        ("1", [5], False),
        ("*/up", [0, 2], True),
        ("*/params/*", [0, 1], True),
        ("params/up", [0], False),
        ("count", [4], False),
    ],
)
def test_paths_then_globs_then_ends(text, found, is_glob):
    actual = find_paths(text, PATHS)
    assert actual is not None
    assert (list(actual.indices), actual.is_glob) == (found, is_glob)


@pytest.mark.parametrize("text", ["p", "ount", "params", "", "0/params/up/x", "*/left"])
def test_other_texts_name_nothing(text):
    assert find_paths(text, PATHS) is None


def test_an_exact_path_takes_precedence_over_a_longer_one_with_this_end():
    actual = find_paths("up", ["0/up", "up"])
    assert actual is not None and actual.indices == (1,)
    of_results = find_paths("loss", ["0/loss"], ["loss"])
    assert of_results is not None and (of_results.group, of_results.indices) == (1, (0,))


def test_the_end_of_several_paths_is_an_error():
    with pytest.raises(
        AmbiguousPathError,
        match="'up' is the end of 2 paths: 0/params/up, 0/mu/up. Give a longer path, such as 'mu/up', or",
    ):
        find_paths("up", PATHS)


def test_similar_paths_are_suggested():
    assert suggestions("upp", PATHS) == "Similar paths: 0/params/up"
