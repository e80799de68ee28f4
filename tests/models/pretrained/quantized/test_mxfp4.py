"""Blocks of 4 bits: values, ranges, rounding, and codes and scales that come back."""

import numpy as np
import pytest

from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.models.pretrained.quantized.mxfp4 import Mxfp4
from tests.models.pretrained.quantized.folders import random_mxfp4

SCHEME = Mxfp4()
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of the specification, by the low three bits of a code


def tensor(values):
    return Tensor("x", values.shape, str(values.dtype), lambda: values)


def plain(codes, scales):
    """Returns the values `[experts, inputs, outputs]`, one after the other."""
    experts, outputs, blocks, _ = codes.shape
    found = np.zeros((experts, blocks * 32, outputs), np.float32)
    for expert, row, output in np.ndindex(*found.shape):
        byte = codes[expert, output, row // 32, row % 32 // 2]
        code = byte >> 4 if row % 2 else byte & 15
        sign = -1.0 if code & 8 else 1.0
        found[expert, row, output] = sign * NUMBERS[code & 7] * 2.0 ** (int(scales[expert, output, row // 32]) - 127)
    return found


@pytest.mark.parametrize(
    "index",
    [
        (slice(0, 2), slice(0, 96), slice(0, 3)),
        (slice(1, 2), slice(33, 70), slice(1, 3)),
        (slice(0, 1), slice(5, 9), slice(0, 2)),
    ],
)
def test_ranges_of_values(index):
    codes, scales = random_mxfp4((2, 96, 3), 0)
    found = SCHEME.decode(tensor(codes), tensor(scales), index)
    assert np.ascontiguousarray(found).tobytes() == plain(codes, scales)[index].tobytes()


def test_the_largest_byte_of_a_scale_is_nan():
    codes, scales = random_mxfp4((1, 64, 2), 0)
    scales[0, 1, 0] = 255
    found = SCHEME.decode(tensor(codes), tensor(scales), (slice(0, 1), slice(0, 64), slice(0, 2)))
    np.testing.assert_array_equal(np.isnan(found[0]), [[False, n < 32] for n in range(64)])
    for new, kept in zip(SCHEME.encode(np.array(found), codes, scales), (codes, scales), strict=True):
        assert new.tobytes() == kept.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unchanged_blocks_keep_their_codes_and_scales(dtype):
    codes, scales = random_mxfp4((2, 64, 5), 1)
    values = plain(codes, scales).astype(dtype)
    assert values.astype(np.float32).tobytes() == plain(codes, scales).tobytes()  # exact in bfloat16
    for found, kept in zip(SCHEME.encode(values, codes, scales), (codes, scales), strict=True):
        assert found.tobytes() == kept.tobytes()
    values[1, 40, 2] += 1
    new_codes, _ = SCHEME.encode(values, codes, scales)
    assert {tuple(at[:3]) for at in np.argwhere(new_codes != codes).tolist()} == {(1, 2, 1)}


def test_new_blocks_round_to_the_nearest_number_and_ties_to_even_codes():
    codes, scales = random_mxfp4((1, 32, 2), 2)
    numbers = [5.1, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.2, 7.9]
    values = np.zeros((1, 32, 2), np.float32)
    values[0, : len(numbers), 0] = numbers
    found = plain(*SCHEME.encode(values / 8, codes, scales)) * 8
    assert found[0, : len(numbers), 0].tolist() == [6, 0, 0.5, 1, 1, 2, 2, 4, 4, -4, 0, 6]
    assert not SCHEME.encode(np.zeros_like(values), codes, scales)[0][0, 0].any()
