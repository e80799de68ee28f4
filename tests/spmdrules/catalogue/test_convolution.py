"""Compares the catalogue's convolutions, pooling and resizing with NumPy and SciPy."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.spmdrules.catalogue import convolution
from tests.spmdrules.catalogue.compiled import compiled

ops = compiled(convolution)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 6, 8, 4)).astype(np.float32)
KERNEL = RNG.normal(size=(3, 3, 4, 5)).astype(np.float32)
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-5}


def correlated(x, kernel):
    """Cross-correlation with zero padding: [batch, ..., in], [..., in, out]."""
    from scipy import signal  # takes a second

    pairs = itertools.product(range(x.shape[0]), range(kernel.shape[-1]))
    planes = [
        sum(signal.correlate(x[b, ..., i], kernel[..., i, o], "same") for i in range(x.shape[-1])) for b, o in pairs
    ]
    return np.moveaxis(np.reshape(planes, (x.shape[0], kernel.shape[-1], *x.shape[1:-1])), 1, -1)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_convolution(spatial):
    x, kernel = RNG.normal(size=(2, 6, 5, 4)[: 1 + spatial] + (3,)), RNG.normal(size=(3,) * spatial + (3, 2))
    actual = ops.convolution(x.astype(np.float32), kernel.astype(np.float32))
    np.testing.assert_allclose(actual, correlated(x, kernel), **CLOSE)


def test_strides_dilation_and_groups():
    np.testing.assert_allclose(
        ops.convolution(X, KERNEL, 2, padding=[(1, 1)] * 2), correlated(X, KERNEL)[:, ::2, ::2], **CLOSE
    )
    wide = np.zeros((5, 5, 4, 5), np.float32)
    wide[::2, ::2] = KERNEL
    np.testing.assert_allclose(ops.convolution(X, KERNEL, dilation=2), correlated(X, wide), **CLOSE)
    halves = [correlated(X[..., :2], KERNEL[:, :, :2, :2]), correlated(X[..., 2:], KERNEL[:, :, :2, 2:4])]
    np.testing.assert_allclose(ops.convolution(X, KERNEL[:, :, :2, :4], groups=2), np.concatenate(halves, -1), **CLOSE)


def test_depthwise_and_separable():
    kernel = RNG.normal(size=(3, 3, 1, 8)).astype(np.float32)
    expected = [correlated(X[..., c : c + 1], kernel[..., 2 * c : 2 * c + 2]) for c in range(4)]
    depthwise = np.concatenate(expected, -1)
    np.testing.assert_allclose(ops.depthwise_convolution(X, kernel), depthwise, **CLOSE)
    mix = RNG.normal(size=(1, 1, 8, 3)).astype(np.float32)
    np.testing.assert_allclose(ops.separable_convolution(X, kernel, mix), depthwise @ mix[0, 0], **CLOSE)


def test_transposed_convolution_adds_the_kernel_at_each_element():
    x, kernel = RNG.normal(size=(1, 5, 3)).astype(np.float32), RNG.normal(size=(2, 3, 4)).astype(np.float32)
    actual = np.asarray(ops.transposed_convolution(x, kernel))
    expected = np.zeros((1, 10, 4))
    for t, k in itertools.product(range(5), range(2)):
        expected[:, 2 * t + k] += x[:, t] @ kernel[1 - k]
    np.testing.assert_allclose(actual, expected, **CLOSE)


def test_causal_convolution_reads_no_later_position():
    x, kernel = RNG.normal(size=(2, 7, 4)).astype(np.float32), RNG.normal(size=(3, 1, 4)).astype(np.float32)
    past = np.pad(x, ((0, 0), (2, 0), (0, 0)))
    expected = sum(past[:, k : k + 7] * kernel[k] for k in range(3))
    np.testing.assert_allclose(ops.causal_convolution(x, kernel), expected, **CLOSE)


def test_local_convolution_has_a_kernel_for_each_position():
    x, kernel = RNG.normal(size=(2, 7, 4)).astype(np.float32), RNG.normal(size=(5, 12, 3)).astype(np.float32)
    actual = np.asarray(ops.local_convolution(x, kernel, 3))
    for t in range(5):
        values = x[:, t : t + 3].swapaxes(1, 2).reshape(2, 12)  # channel-major, then the window
        np.testing.assert_allclose(actual[:, t], values @ kernel[t], **CLOSE)


@pytest.mark.parametrize(
    ("pool", "fold"),
    [
        (ops.max_pool, np.max),
        (ops.min_pool, np.min),
        (ops.sum_pool, np.sum),
        (ops.avg_pool, np.mean),
        (ops.lp_pool, lambda x, axis: np.sqrt(np.sum(x**2, axis))),
    ],
)
def test_pooling(pool, fold):
    blocks = X.reshape(2, 3, 2, 4, 2, 4)
    np.testing.assert_allclose(pool(X), fold(blocks, axis=(2, 4)), **CLOSE)


def test_padding_does_not_change_means_and_maxima():
    actual = ops.avg_pool(X, 3, 2, "SAME")
    h, w = 4, 6  # the last window extends beyond both borders
    np.testing.assert_allclose(actual[:, 2, 3], X[:, h:, w:].mean((1, 2)), **CLOSE)
    actual = ops.max_pool(-np.abs(X), 3, 2, [(1, 1), (1, 1)])
    np.testing.assert_array_equal(actual[:, 0, 0], (-np.abs(X))[:, :2, :2].max((1, 2)))


def test_adaptive_pool():
    np.testing.assert_allclose(ops.adaptive_pool(X, (2, 2)), X.reshape(2, 2, 3, 2, 4, 4).mean((2, 4)), **CLOSE)
    np.testing.assert_allclose(ops.adaptive_pool(X, (3, 1), jnp.max), X.reshape(2, 3, 2, 1, 8, 4).max((2, 4)))


def test_resize():
    np.testing.assert_array_equal(ops.resize(X, 2, "nearest"), X.repeat(2, 1).repeat(2, 2))
    line = np.array([[[0.0], [4.0]]], np.float32)
    np.testing.assert_allclose(ops.resize(line, 2, "linear")[0, :, 0], [0, 1, 3, 4], **CLOSE)
    np.testing.assert_allclose(ops.downsample(np.full_like(X, 3.0)), np.full((2, 3, 4, 4), 3.0), rtol=1e-5)


def test_unfold_and_its_transpose():
    actual = np.asarray(ops.unfold(X, 3))
    around = np.pad(X, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for h, w in itertools.product(range(6), range(8)):
        window = around[:, h : h + 3, w : w + 3]
        np.testing.assert_array_equal(actual[:, h, w], np.moveaxis(window, -1, 1).reshape(2, 36))
    windows = RNG.normal(size=actual.shape).astype(np.float32)
    product = np.vdot(windows, actual)
    np.testing.assert_allclose(np.vdot(ops.fold(windows, 3), X), product, rtol=1e-3)


def test_grid_sample():
    from scipy import ndimage  # takes a second

    rows, columns = RNG.uniform(0, 5, (2, 7)).astype(np.float32), RNG.uniform(0, 7, (2, 7)).astype(np.float32)
    actual = np.asarray(ops.grid_sample(X, rows, columns))
    for b, c in itertools.product(range(2), range(4)):
        expected = ndimage.map_coordinates(X[b, ..., c], [rows[b], columns[b]], order=1)
        np.testing.assert_allclose(actual[b, :, c], expected, **CLOSE)
