"""Copies between arrays whose dimensions are ordered differently in memory."""

import numpy as np
import pytest

from autoshard.models.pretrained.constants import BLOCK
from autoshard.models.pretrained.fast_copy import copy_transposed


@pytest.mark.parametrize("shape, axes", [((), ()), ((3, 5), (0, 1)), ((BLOCK + 3, 2 * BLOCK + 1), (1, 0)),
                                         ((2, BLOCK + 1, 3), (2, 0, 1)), ((1, 7, 1), (0, 2, 1))])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_are_copied_and_cast(shape, axes, dtype):
    source = np.arange(np.prod(shape)).reshape(shape).astype("bfloat16").transpose(axes)
    target = np.zeros(source.shape, dtype)
    copy_transposed(target, source)
    assert np.array_equal(target, source.astype(dtype))
