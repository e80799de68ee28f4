"""Blocks of 8 bits: values, ranges, and codes and scales that come back."""

import ml_dtypes
import numpy as np
import pytest

from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.models.pretrained.quantized.fp8_blocks import Fp8Blocks
from tests.models.pretrained.quantized.folders import random_fp8

SCHEME = Fp8Blocks(12, 10)


def tensor(values):
    return Tensor("x", values.shape, str(values.dtype), lambda: values)


def plain(codes, scales):
    """Returns the values, one after the other."""
    found = codes.astype(np.float32)
    for row, column in np.ndindex(codes.shape):
        found[row, column] *= scales[row // 12, column // 10]
    return found


@pytest.mark.parametrize(
    "index", [(slice(0, 30), slice(0, 25)), (slice(5, 26), slice(9, 21)), (slice(12, 13), slice(20, 25))]
)
def test_ranges_of_values(index):
    codes, scales = random_fp8((30, 25), (12, 10), 0)
    assert scales.shape == SCHEME.scale_shape((30, 25)) == (3, 3)
    found = SCHEME.decode(tensor(codes), tensor(scales), index)
    assert found.tobytes() == plain(codes, scales)[index].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unchanged_blocks_keep_their_codes_and_scales(dtype):
    codes, scales = random_fp8((30, 25), (12, 10), 1)
    codes[13, 3] = np.uint8(0xFF).view(ml_dtypes.float8_e4m3fn)  # not a number
    values = plain(codes, scales).astype(dtype)
    for found, kept in zip(SCHEME.encode(values, codes, scales), (codes, scales), strict=True):
        assert found.tobytes() == kept.tobytes()
    values[14:, 12] *= 3  # changes two blocks
    new_codes, new_scales = SCHEME.encode(values, codes, scales)
    changed = np.argwhere(new_scales != scales)
    assert changed.tolist() == [[1, 1], [2, 1]]
    error = np.abs(plain(new_codes, new_scales) - values.astype(np.float32))[:, 10:20]
    assert np.nanmax(error) <= np.abs(values[12:, 10:20].astype(np.float32)).max() / 16  # 3 bits behind the first one
    assert (new_codes != codes)[:, 10:20].any() and not (new_codes.view("u1") != codes.view("u1"))[:, 20:].any()


def test_new_scales_put_the_largest_magnitude_at_the_end_of_the_range():
    codes, scales = random_fp8((12, 20), (12, 10), 2)
    values = np.random.default_rng(0).normal(size=(12, 20)).astype(np.float32)
    values[:, 10:] = 0
    new_codes, new_scales = SCHEME.encode(values, codes, scales)
    largest = np.abs(values).max()
    assert new_scales.tolist() == [[largest / np.float32(448), 1.0]]
    assert np.abs(new_codes.astype(np.float32)).max() == 448
    _, powers = Fp8Blocks(12, 10, powers=True).encode(values, codes, scales)
    assert np.log2(powers[0, 0]) == np.ceil(np.log2(largest / 448))
