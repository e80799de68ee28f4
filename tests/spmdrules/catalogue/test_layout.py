"""Compares the catalogue's functions that move elements with NumPy."""

import itertools
from typing import Any

import numpy as np
import pytest

from autoshard.spmdrules.catalogue import layout

ops: Any = layout  # typed as Any, since the tests pass NumPy arrays

X = np.arange(2 * 4 * 6 * 8, dtype=np.float32).reshape(2, 4, 6, 8)


def test_pixel_shuffle_and_its_inverse(strict_numerics):
    actual = np.asarray(ops.pixel_shuffle(X, 2))
    assert actual.shape == (2, 8, 12, 2)
    for h, w, i, j in itertools.product(range(4), range(6), range(2), range(2)):
        np.testing.assert_array_equal(actual[:, 2 * h + i, 2 * w + j], X[:, h, w, 4 * i + 2 * j : 4 * i + 2 * j + 2])
    np.testing.assert_array_equal(ops.pixel_unshuffle(actual, 2), X)


def test_channel_shuffle(strict_numerics):
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    np.testing.assert_array_equal(ops.channel_shuffle(X, 2), X[..., order])


def test_patches_and_windows(strict_numerics):
    patches, windows = np.asarray(ops.patchify(X, 2)), np.asarray(ops.window_partition(X, 2))
    assert patches.shape == (2, 6, 32) and windows.shape == (12, 2, 2, 8)
    for b, h, w in itertools.product(range(2), range(2), range(3)):
        block = X[b, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2]
        np.testing.assert_array_equal(patches[b, 3 * h + w], block.ravel())
        np.testing.assert_array_equal(windows[6 * b + 3 * h + w], block)


def test_heads(strict_numerics):
    x = X.reshape(2, 24, 8)
    actual = np.asarray(ops.split_heads(x, 4))
    assert actual.shape == (2, 4, 24, 2)
    for head in range(4):
        np.testing.assert_array_equal(actual[:, head], x[..., 2 * head : 2 * head + 2])
    np.testing.assert_array_equal(ops.merge_heads(actual), x)


def test_token_shift(strict_numerics):
    x = X.reshape(2, 24, 8)
    actual = np.asarray(ops.token_shift(x))
    np.testing.assert_array_equal(actual[:, 1:], x[:, :-1])
    np.testing.assert_array_equal(actual[:, 0], 0)


@pytest.mark.parametrize(
    ("margins", "expected"),
    [((-1, -2, 0), [2]), ((2, 0, 0), [0, 0, 1, 2, 3, 4]), ((0, 0, 2), [1, 0, 0, 2, 0, 0, 3, 0, 0, 4])],
)
def test_pad_or_crop(margins, expected, strict_numerics):
    x = np.arange(1, 5, dtype=np.float32)[None]
    np.testing.assert_array_equal(ops.pad_or_crop(x, *margins), [expected])


def test_pairs(strict_numerics):
    np.testing.assert_array_equal(ops.stack_pair(X, -X), np.stack([X, -X], 1))
    np.testing.assert_array_equal(ops.concatenate_pair(X, -X[:, :1]), np.concatenate([X, -X[:, :1]], 1))


def test_diag_embed(strict_numerics):
    x = X[0, 0]
    np.testing.assert_array_equal(ops.diag_embed(x), x[:, :, None] * np.eye(8, dtype=np.float32))
