"""Convolutions, pooling and resizing of [batch, ..., channels] with one, two or three spatial dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32

_LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def convolution(
    x: jax.Array, kernel: jax.Array, stride: int = 1, dilation: int = 1, groups: int = 1, padding: Any = "SAME"
) -> jax.Array:
    """A convolution over all dimensions between batch and channels: [batch, ..., in], [..., in / groups, out]."""
    spatial = x.ndim - 2
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride,) * spatial,
        padding,
        rhs_dilation=(dilation,) * spatial,
        dimension_numbers=_LAYOUTS[spatial],
        feature_group_count=groups,
    )


def transposed_convolution(x: jax.Array, kernel: jax.Array, stride: int = 2) -> jax.Array:
    """A convolution that makes spatial dimensions `stride` times as large: [batch, ..., in], [..., in, out]."""
    spatial = x.ndim - 2
    return lax.conv_transpose(x, kernel, (stride,) * spatial, "SAME", dimension_numbers=_LAYOUTS[spatial])


def depthwise_convolution(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves each channel with its own kernels: [batch, ..., channels], [..., 1, channels * multiplier]."""
    return convolution(x, kernel, stride, groups=x.shape[-1])


def separable_convolution(x: jax.Array, depthwise: jax.Array, pointwise: jax.Array) -> jax.Array:
    """A depthwise convolution, then a pointwise one that mixes the channels of each pixel."""
    return convolution(depthwise_convolution(x, depthwise), pointwise)


def causal_convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves each channel with its own kernel over current and earlier positions, as state-space models do."""
    before = kernel.shape[0] - 1
    return convolution(x, kernel, groups=x.shape[-1], padding=[(before, 0)])


def local_convolution(x: jax.Array, kernel: jax.Array, window: int) -> jax.Array:
    """A convolution with a separate kernel for each position: [batch, seq, in], [positions, window * in, out]."""
    return lax.conv_general_dilated_local(x, kernel, (1,), "VALID", (window,), dimension_numbers=_LAYOUTS[1])


def _reduce_windows(x: jax.Array, start: float, combine: Any, window: int, stride: int, padding: Any) -> jax.Array:
    spatial = x.ndim - 2
    paddings = padding if isinstance(padding, str) else [(0, 0), *padding, (0, 0)]
    windows, strides = (1, *(window,) * spatial, 1), (1, *(stride,) * spatial, 1)
    return lax.reduce_window(x, np.asarray(start, x.dtype), combine, windows, strides, paddings)


def max_pool(x: jax.Array, window: int = 2, stride: int = 2, padding: Any = "VALID") -> jax.Array:
    """The largest element of each window."""
    return _reduce_windows(x, -jnp.inf, lax.max, window, stride, padding)


def min_pool(x: jax.Array, window: int = 2, stride: int = 2, padding: Any = "VALID") -> jax.Array:
    """The smallest element of each window."""
    return _reduce_windows(x, jnp.inf, lax.min, window, stride, padding)


def sum_pool(x: jax.Array, window: int = 2, stride: int = 2, padding: Any = "VALID") -> jax.Array:
    """The sum of each window."""
    return _reduce_windows(x, 0.0, lax.add, window, stride, padding)


def avg_pool(x: jax.Array, window: int = 2, stride: int = 2, padding: Any = "VALID") -> jax.Array:
    """The mean of each window. Padding does not count."""
    counts = sum_pool(jnp.ones((1, *x.shape[1:-1], 1), x.dtype), window, stride, padding)
    return sum_pool(x, window, stride, padding) / counts


def lp_pool(x: jax.Array, power: int = 2, window: int = 2, stride: int = 2) -> jax.Array:
    """The p-norm of each window."""
    return sum_pool(jnp.abs(x) ** power, window, stride) ** (1 / power)


def adaptive_pool(x: jax.Array, counts: Sequence[int], reduce: Any = jnp.mean) -> jax.Array:
    """Pools [batch, height, width, channels] to `counts` windows per dimension, which divide height and width."""
    shape, axes = [x.shape[0]], []
    for size, count in zip(x.shape[1:-1], counts, strict=True):
        axes.append(len(shape) + 1)
        shape += [count, size // count]
    return reduce(x.reshape(*shape, x.shape[-1]), tuple(axes))


def resize(x: jax.Array, factor: int, method: str) -> jax.Array:
    """Makes all spatial dimensions `factor` times as large."""
    shape = (x.shape[0], *(n * factor for n in x.shape[1:-1]), x.shape[-1])
    return jax.image.resize(x, shape, method)


def downsample(x: jax.Array, factor: int = 2) -> jax.Array:
    """Divides the size of all spatial dimensions by `factor`, with antialiasing."""
    shape = (x.shape[0], *(n // factor for n in x.shape[1:-1]), x.shape[-1])
    return jax.image.resize(x, shape, "linear")


def unfold(x: jax.Array, window: int = 3, stride: int = 1) -> jax.Array:
    """The windows of an image, each flattened to channels * window² values."""
    return lax.conv_general_dilated_patches(
        x, (window, window), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def fold(windows: jax.Array, window: int = 2) -> jax.Array:
    """The transpose of `unfold` with SAME padding and stride one: sums the values that came from each pixel."""
    *image, values = windows.shape
    image_type = jax.ShapeDtypeStruct((*image, values // window**2), windows.dtype)
    return jax.linear_transpose(partial(unfold, window=window), image_type)(windows)[0]


def grid_sample(x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Samples images bilinearly between pixels: [batch, height, width, channels], [batch, n] -> [batch, n, c]."""

    def sample(image: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        plane = partial(jax.scipy.ndimage.map_coordinates, coordinates=[row, column], order=1)
        return jax.vmap(plane, 2, 1)(image)

    return jax.vmap(sample)(x, rows, columns)


_LINE, _IMAGE, _VOLUME = f32(4, 16, 12), f32(4, 8, 16, 12), f32(4, 8, 6, 10, 12)
_SAME = [(1, 1), (1, 1)]

_CONVOLUTIONS = (
    Operator("conv1d", convolution, (_LINE, f32(3, 12, 8)), (0, 1)),
    Operator("conv2d", convolution, (_IMAGE, f32(3, 3, 12, 20)), (0, 1)),
    Operator("conv3d", convolution, (_VOLUME, f32(3, 3, 3, 12, 20)), (0, 1)),
    Operator("conv2d_pointwise", convolution, (_IMAGE, f32(1, 1, 12, 20)), (0, 1)),
    Operator("conv2d_strided", partial(convolution, stride=2), (_IMAGE, f32(3, 3, 12, 20)), (0, 1)),
    Operator("conv2d_patches", partial(convolution, stride=4, padding="VALID"), (_IMAGE, f32(4, 4, 12, 20)), (0, 1)),
    Operator("conv2d_dilated", partial(convolution, dilation=2), (_IMAGE, f32(3, 3, 12, 20)), (0, 1)),
    Operator("conv2d_grouped", partial(convolution, groups=4), (_IMAGE, f32(3, 3, 3, 20)), (0, 1)),
    Operator("conv1d_causal", causal_convolution, (_LINE, f32(3, 1, 12)), (0, 1)),
    Operator("conv1d_local", partial(local_convolution, window=3), (f32(4, 18, 12), f32(16, 36, 8)), (0, 1)),
    Operator("conv2d_depthwise", depthwise_convolution, (_IMAGE, f32(3, 3, 1, 24)), (0, 1)),
    Operator("conv2d_separable", separable_convolution, (_IMAGE, f32(3, 3, 1, 24), f32(1, 1, 24, 20)), (0, 1, 2)),
    Operator("conv1d_transposed", transposed_convolution, (_LINE, f32(3, 12, 8)), (0, 1)),
    Operator("conv2d_transposed", transposed_convolution, (_IMAGE, f32(3, 3, 12, 20)), (0, 1)),
    Operator("conv3d_transposed", transposed_convolution, (f32(4, 5, 6, 3, 8), f32(3, 3, 3, 8, 12)), (0, 1)),
)
_POOLING = (
    Operator("max_pool1d", max_pool, (_LINE,)),
    Operator("max_pool2d", max_pool, (_IMAGE,)),
    Operator("max_pool3d", max_pool, (_VOLUME,)),
    Operator("max_pool2d_overlapping", partial(max_pool, window=3, padding=_SAME), (_IMAGE,)),
    Operator("min_pool2d", min_pool, (_IMAGE,)),
    Operator("avg_pool1d", avg_pool, (_LINE,)),
    Operator("avg_pool2d", avg_pool, (_IMAGE,)),
    Operator("avg_pool3d", avg_pool, (_VOLUME,)),
    Operator("avg_pool2d_overlapping", partial(avg_pool, window=3, padding="SAME"), (_IMAGE,)),
    Operator("sum_pool2d", sum_pool, (_IMAGE,)),
    Operator("lp_pool2d", lp_pool, (_IMAGE,)),
    Operator("adaptive_avg_pool2d", partial(adaptive_pool, counts=(8, 16)), (f32(4, 16, 32, 12),)),
    Operator("adaptive_max_pool2d", partial(adaptive_pool, counts=(8, 16), reduce=jnp.max), (f32(4, 16, 32, 12),)),
    Operator("global_avg_pool2d", partial(jnp.mean, axis=(1, 2)), (_IMAGE,)),
    Operator("global_max_pool2d", partial(jnp.max, axis=(1, 2)), (_IMAGE,)),
)
_RESIZING = (
    Operator("upsample_nearest", partial(resize, factor=2, method="nearest"), (_IMAGE,)),
    Operator("upsample_linear", partial(resize, factor=2, method="linear"), (_LINE,)),
    Operator("upsample_bilinear", partial(resize, factor=2, method="linear"), (_IMAGE,)),
    Operator("upsample_bicubic", partial(resize, factor=2, method="cubic"), (_IMAGE,)),
    Operator("downsample_bilinear", downsample, (_IMAGE,)),
    Operator("unfold", unfold, (_IMAGE,)),
    Operator("fold", fold, (f32(4, 8, 16, 48),)),
    Operator("grid_sample", grid_sample, (_IMAGE, f32(4, 20), f32(4, 20)), (0, 1, 2)),
)
OPERATORS: tuple[Operator, ...] = (*_CONVOLUTIONS, *_POOLING, *_RESIZING)
