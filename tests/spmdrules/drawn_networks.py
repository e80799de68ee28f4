"""Random convolutional networks, with which XLA's partitioner has the most trouble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

Draw = Callable[..., Any]


@dataclass(frozen=True)
class Layer:
    """A convolution and the operator after it.

    `features` is the number of input features of each group, `outputs` that of output features of all groups.
    """

    window: tuple[int, int]
    features: int
    outputs: int
    groups: int
    strides: tuple[int, int]
    dilation: tuple[int, int]
    padding: str
    then: str

    def __call__(self, kernel: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(
            x, kernel, self.strides, self.padding, rhs_dilation=self.dilation, feature_group_count=self.groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        around = (1, 2, 2, 1), (1, 2, 2, 1)
        if self.then == "max" and min(y.shape[1:3]) >= 2:
            y = lax.reduce_window(y, -jnp.inf, lax.max, *around, "VALID")
        if self.then == "mean" and min(y.shape[1:3]) >= 2:
            y = lax.reduce_window(y, 0.0, lax.add, *around, "SAME") / 4
        if self.then == "norm":
            y = (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-3)
        return jnp.tanh(y)


@st.composite
def networks(draw: Draw) -> tuple[Callable[..., Any], list[np.ndarray], np.ndarray]:
    """A train step of a network of one to three layers, its kernels and a batch of images."""
    features, size = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([8, 16]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.normal(size=(8, size, size, features)).astype(np.float32)
    layers: list[Layer] = []
    for _ in range(draw(st.integers(1, 3))):
        groups = draw(st.sampled_from([n for n in (1, 1, 1, 2, 4) if features % n == 0]))
        pair = lambda *sizes: tuple(draw(st.lists(st.sampled_from(sizes), min_size=2, max_size=2)))  # noqa: E731
        outputs = groups * draw(st.sampled_from([1, 2, 4]))
        layers.append(Layer(pair(1, 2, 3), features // groups, outputs, groups, pair(1, 1, 2), pair(1, 1, 2),
                            draw(st.sampled_from(["SAME", "VALID"])),
                            draw(st.sampled_from(["", "max", "mean", "norm"]))))  # fmt: skip
        features = outputs
    shapes = [(*layer.window, layer.features, layer.outputs) for layer in layers]
    kernels = [rng.normal(size=s).astype(np.float32) / np.float32(s[0] * s[1] * s[2]) ** 0.5 for s in shapes]

    def step(kernels: list[Any], x: Any) -> Any:
        def loss_of(kernels: list[Any], x: Any) -> Any:
            for layer, kernel in zip(layers, kernels, strict=True):
                x = layer(kernel, x)
            return (x**2).sum() / 64 + x.sum() / 100

        loss, (gradients, back) = jax.value_and_grad(loss_of, (0, 1))(kernels, x)
        return [k - 0.1 * g for k, g in zip(kernels, gradients, strict=True)], loss, gradients, back

    return step, kernels, x
