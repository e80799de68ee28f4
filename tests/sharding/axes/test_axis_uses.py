"""What operators say of their axes: which of their matrices count."""

import pytest

from autoshard.sharding.axes.axis_uses import _without_scales

CODES = (("e0",), ("e1",), ("f0", "f1"))
SCALES = (("e0",), ("f0",))
DOWN = (("f0", "f1"), ("e0", "e1"))


@pytest.mark.parametrize(
    ("matrices", "kept"),
    [
        ([CODES, SCALES], [CODES]),  # the scales of blocks have some of the factors of the codes
        ([SCALES, CODES], [CODES]),
        ([CODES, DOWN], [CODES, DOWN]),  # the same factors: both are matrices
        ([SCALES], [SCALES]),  # a matrix of its own
        ([CODES, (("e0",), ("g",))], [CODES, (("e0",), ("g",))]),
    ],
)
def test_scales_of_blocks_are_no_matrices_of_their_own(matrices, kept):
    found = _without_scales([(frozenset({n}), dims) for n, dims in enumerate(matrices)])
    assert [dims for _, dims in found] == kept
