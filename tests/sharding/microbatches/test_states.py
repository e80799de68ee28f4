"""Rows of microbatches, and where an operator's rule has them."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.sharding.microbatches.states import Cut, NotCut, Split, factor_at, split_of
from autoshard.spmdrules.core.rule import Rule


@pytest.mark.parametrize("split", [Split(0), Split(1, 3), Split(1, 1)])
def test_parts_are_joined_again(split):
    x = jnp.arange(8 * 12).reshape(8, 12)
    pieces = Cut(4).parts(x, split)
    np.testing.assert_array_equal(Cut(4).joined(pieces, split), x)
    for number in range(4):
        np.testing.assert_array_equal(Cut(4).part(x, split, number), pieces[number])


@pytest.mark.parametrize("split", [Split(0), Split(1, 3)])
def test_parts_of_replicas_are_joined_again(split):
    x = jnp.arange(8 * 24).reshape(8, 24)
    cut = Cut(2, 4, rows=8)
    pieces = cut.parts(x, split)
    assert pieces.shape[:2] == (2, 4)
    np.testing.assert_array_equal(cut.joined(pieces, split), x)
    for number in range(2):
        for replica in range(4):
            np.testing.assert_array_equal(cut.part(x, split, number, replica), pieces[number, replica])


def test_replicas_have_consecutive_rows():
    np.testing.assert_array_equal(Cut(2, 2, rows=8).parts(jnp.arange(8), Split(0))[1], [[1, 3], [5, 7]])
    with pytest.raises(NotCut, match="merged behind another dimension"):
        Cut(2, 2, rows=4).parts(jnp.arange(8), Split(0))
    # Without replicas, rows may be a part of a dimension that a reshape splits. With them, they may not.
    split = Rule.parse("(a b) -> a b; where a=4 b=4", jnp.zeros(16))
    assert factor_at(split, split.operands[0], Split(0), 4) == ("b", 1)
    assert factor_at(split, split.operands[0], Split(0), 4, rows=16) is None


def test_a_microbatch_has_every_nth_row():
    np.testing.assert_array_equal(Cut(4).parts(jnp.arange(8), Split(0))[1], [1, 5])


def test_rows_that_were_merged_with_another_dimension():
    merged = Rule.parse("b s e -> (b s) e", jnp.zeros((8, 6, 4)))
    assert factor_at(merged, merged.operands[0], Split(0), 4) == ("b", 1)
    assert split_of(merged, merged.results[0], "b", 1) == Split(0, 6)
    flat = Rule.parse("n e, e f -> n f; reduce e", jnp.zeros((48, 4)), jnp.zeros((4, 4)))
    assert factor_at(flat, flat.operands[0], Split(0, 6), 4) == ("n", 6)
    assert split_of(flat, flat.results[0], "n", 6) == Split(0, 6)


def test_rows_that_a_reshape_splits_among_two_dimensions():
    split = Rule.parse("(a b) -> a b; where a=4 b=2", jnp.zeros(8))
    assert factor_at(split, split.operands[0], Split(0), 2) == ("b", 1)
    assert factor_at(split, split.operands[0], Split(0), 4) is None
