"""Labels of groups of tensors: short, and never the same for two groups."""

import pytest

from autoshard.sharding.report.tensor_labels import LABEL_WIDTH, label, labels, shortened


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["0/params/attention/wq"], "attention/wq"),
        (["0/attention/wq", "0/attention/wk"], "attention/{wq,wk}"),
        (["0/layers/0/wq", "0/layers/1/wq"], "layers/wq"),
        (["0/layers/1/wq"], "layers/1/wq"),
        (["mu/embed", "nu/embed"], "{mu,nu}/embed"),
        (["a/b", "c/d", "e/f"], "a/b +2"),
        ([f"block/a_long_name_{i}" for i in range(9)], "block/a_long_name_0 +8"),
        (["0"], "0"),
        ([""], "(the argument)"),
    ],
)
def test_label_of_several_paths(paths, text):
    assert label(paths) == text


@pytest.mark.parametrize(
    ("groups", "texts"),
    [
        ([["0/d/0"], ["0/d/1"]], ["d/0", "d/1"]),
        ([["a/b/x/w"], ["a/c/x/w"]], ["b/x/w", "c/x/w"]),
        ([["x/0/w", "x/2/w"], ["x/1/w", "x/3/w"]], ["x/{0,2}/w", "x/{1,3}/w"]),
        ([["a/b"], ["c/b"], ["c/d"]], ["a/b", "c/b", "c/d"]),
        ([["p/a/w", "q/c/v"], ["r/a/w", "s/d/v"]], ["p/a/w +1", "r/a/w +1"]),
    ],
)
def test_groups_of_equal_ends_show_more_of_their_paths(groups, texts):
    assert labels(groups) == texts


def test_shortened_labels_stay_distinct():
    long = [f"{'very_' * 9}long/{name}/{'very_' * 9}long" for name in "ab"]
    assert shortened(long) == long
    (short,) = shortened(long[:1])
    assert len(short) == LABEL_WIDTH
