"""A residual network of wide bottleneck blocks in Flax NNX, written for one device.

    x = pool(relu(norm(conv(image))))                       7x7, stride 2; then 3x3 max pooling, stride 2
    x = relu(shortcut(x) + norm(conv(relu(norm(conv(relu(norm(conv(x)))))))))      for each block: 1x1, 3x3, 1x1
    logits = mean(x) @ head

In stage i, the 3x3 convolution of a block has `width_factor * channels * 2^i` output channels, and the block has
`4 * channels * 2^i`. The first block of every stage but the first has stride 2, in its 3x3 convolution.

Batch norm uses the mean and the variance of the whole batch, in float32. It keeps running averages of both for
evaluation, as `nnx.BatchStat` variables. Convolutions compute in `dtype`.

Sources: ResNet (arXiv:1512.03385); stride in the 3x3 convolution and blocks that start as the identity
(arXiv:1706.02677); wide blocks (arXiv:1605.07146); batch norm (arXiv:1502.03167).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard.models.loss import cross_entropy
from autoshard.models.remat.policies import REMAT_POLICIES, remat_policies, remat_problems


@dataclasses.dataclass(frozen=True)
class WideResNetConfig:
    """Shape and numerics of a `WideResNet`. The default stages are those of ResNet-50.

    Args:
        stages: number of blocks in each stage. The first stage keeps the size of its input, each later stage halves it.
        channels: output channels of the first convolution; they double from stage to stage.
        width_factor: factor of the output channels of each block's 3x3 convolution.
        image_size: height and width of the images.
        classes: number of distinct labels.
        remat: what a block saves for its backward pass: a name in `REMAT_POLICIES`, or several, separated by commas,
            that alternate over the blocks.
        momentum: weight of the old running average in a step, from 0 to below 1.
        norm_eps: added to the variance before its square root.
        dtype: dtype of convolutions and of the head. Norms and the loss always use float32.
        param_dtype: dtype in which parameters are stored.

    Raises:
        ValueError: if a field is invalid; the message names every invalid field.
    """

    stages: tuple[int, ...] = (3, 4, 6, 3)
    channels: int = 64
    width_factor: int = 2
    image_size: int = 224
    classes: int = 1024
    remat: str = "full"
    momentum: float = 0.9
    norm_eps: float = 1e-5
    dtype: str = "bfloat16"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("channels", "width_factor", "image_size", "classes")}
        sizes |= {f"stages[{i}]": blocks for i, blocks in enumerate(self.stages)}
        problems = [f"{name} is {size}; it must be at least 1" for name, size in sizes.items() if size < 1]
        if not self.stages:
            problems.append("stages is empty; give the number of blocks of each stage")
        problems += remat_problems(self.remat, sum(self.stages), scan=False, has_named_values=False)
        if not 0.0 <= self.momentum < 1.0:
            problems.append(f"momentum is {self.momentum}; it must be at least 0 and below 1")
        if not 0.0 < self.norm_eps < float("inf"):
            problems.append(f"norm_eps is {self.norm_eps}; it must be a finite number above 0")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16"):
                problems.append(f"{name} is {getattr(self, name)!r}; choose one of float32, bfloat16, float16")
        if problems:
            raise ValueError("WideResNetConfig: " + "; ".join(problems))


class Conv(nnx.Module):
    """A convolution without bias, with kernel `[height, width, in, out]`, padded so that stride 1 keeps the size."""

    def __init__(self, cfg: WideResNetConfig, key: jax.Array, size: int, inputs: int, outputs: int, stride: int = 1):
        self.stride = stride
        # He initialization (arXiv:1502.01852) by fan-out, which preserves the variance of gradients.
        std = (2.0 / (size * size * outputs)) ** 0.5
        self.kernel = nnx.Param(std * jax.random.normal(key, (size, size, inputs, outputs), jnp.dtype(cfg.param_dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, height, width, in]` to `[batch, height / stride, width / stride, out]` in x's dtype."""
        kernel = self.kernel[...].astype(x.dtype)
        pad = (kernel.shape[0] // 2, (kernel.shape[0] - 1) // 2)
        return lax.conv_general_dilated(
            x, kernel, (self.stride, self.stride), (pad, pad), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


class BatchNorm(nnx.Module):
    """Normalizes each channel by its mean and variance over the batch, or in evaluation by their running averages."""

    def __init__(self, cfg: WideResNetConfig, channels: int, scale: float = 1.0):
        self.cfg = cfg
        dtype = jnp.dtype(cfg.param_dtype)
        self.scale, self.bias = nnx.Param(jnp.full(channels, scale, dtype)), nnx.Param(jnp.zeros(channels, dtype))
        self.mean = nnx.BatchStat(jnp.zeros(channels, jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones(channels, jnp.float32))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Normalize `[batch, height, width, channels]` in float32. In training, update the running averages."""
        y = x.astype(jnp.float32)
        if train:
            mean = jnp.mean(y, axis=(0, 1, 2))
            variance = jnp.mean(jnp.square(y - _channels(mean)), axis=(0, 1, 2))
            self._update_average(self.mean, mean)
            self._update_average(self.variance, variance)
        else:
            mean, variance = self.mean[...], self.variance[...]
        scale = self.scale[...].astype(jnp.float32) * lax.rsqrt(variance + self.cfg.norm_eps)
        y = (y - _channels(mean)) * _channels(scale) + _channels(self.bias[...].astype(jnp.float32))
        return y.astype(x.dtype)

    def _update_average(self, average: nnx.BatchStat, value: jax.Array) -> None:
        keep = self.cfg.momentum
        average[...] = keep * average[...] + (1.0 - keep) * lax.stop_gradient(value)


def _channels(x: jax.Array) -> jax.Array:
    """Reshape `[channels]` to `[1, 1, 1, channels]`, so that no broadcast is implicit."""
    return x.reshape(1, 1, 1, -1)


class Bottleneck(nnx.Module):
    """Convolutions 1x1 to `channels`, 3x3 to `width_factor * channels`, 1x1 to `4 * channels`, plus a shortcut."""

    def __init__(self, cfg: WideResNetConfig, key: jax.Array, inputs: int, channels: int, stride: int):
        keys = jax.random.split(key, 4)
        wide, outputs = cfg.width_factor * channels, 4 * channels
        self.conv1, self.norm1 = Conv(cfg, keys[0], 1, inputs, channels), BatchNorm(cfg, channels)
        self.conv2, self.norm2 = Conv(cfg, keys[1], 3, channels, wide, stride), BatchNorm(cfg, wide)
        # The last scale is 0, so that a block initially equals its shortcut.
        self.conv3, self.norm3 = Conv(cfg, keys[2], 1, wide, outputs), BatchNorm(cfg, outputs, scale=0.0)
        changes_shape = inputs != outputs or stride != 1
        self.shortcut = Conv(cfg, keys[3], 1, inputs, outputs, stride) if changes_shape else None
        self.shortcut_norm = BatchNorm(cfg, outputs) if changes_shape else None

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Map `[batch, height, width, in]` to `[batch, height / stride, width / stride, 4 * channels]`."""
        y = jax.nn.relu(self.norm1(self.conv1(x), train))
        y = jax.nn.relu(self.norm2(self.conv2(y), train))
        y = self.norm3(self.conv3(y), train)
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x), train)
        return jax.nn.relu(x + y)


class WideResNet(nnx.Module):
    """A wide residual network: maps images `[batch, image_size, image_size, 3]` to logits `[batch, classes]`.

    Args:
        cfg: shape and numerics of the model.
        rngs: its `params` stream initializes the parameters.

    >>> cfg = WideResNetConfig(stages=(1, 1), channels=4, image_size=16, classes=5)
    >>> model = WideResNet(cfg, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 16, 16, 3))).shape
    (2, 5)
    """

    def __init__(self, cfg: WideResNetConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        stem_key, head_key, blocks_key = jax.random.split(rngs.params(), 3)
        self.stem, self.stem_norm = Conv(cfg, stem_key, 7, 3, cfg.channels, 2), BatchNorm(cfg, cfg.channels)
        self.blocks = nnx.List([])
        inputs, keys = cfg.channels, jax.random.split(blocks_key, sum(cfg.stages))
        for stage, count in enumerate(cfg.stages):
            channels = cfg.channels * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(Bottleneck(cfg, keys[len(self.blocks)], inputs, channels, stride))
                inputs = 4 * channels
        head = inputs**-0.5 * jax.random.normal(head_key, (inputs, cfg.classes), jnp.dtype(cfg.param_dtype))
        self.head, self.head_bias = nnx.Param(head), nnx.Param(jnp.zeros(cfg.classes, jnp.dtype(cfg.param_dtype)))

    def __call__(self, images: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Compute the logits of each image's label.

        Args:
            images: `[batch, image_size, image_size, 3]`.
            deterministic: True for evaluation with the running averages. False for training, which uses the batch's
                statistics and updates the running averages.

        Returns:
            `[batch, classes]` in `cfg.dtype`.
        """
        cfg, train = self.cfg, not deterministic
        if images.shape[1:] != (cfg.image_size, cfg.image_size, 3):
            expected = f"[batch, {cfg.image_size}, {cfg.image_size}, 3]"
            raise ValueError(f"WideResNet: images must be {expected}, not {list(images.shape)}")
        x = jax.nn.relu(self.stem_norm(self.stem(images.astype(cfg.dtype)), train))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        for block, remat in zip(self.blocks, itertools.cycle(remat_policies(cfg.remat))):
            x = _run_block(block, x, train, remat)
        x = jnp.mean(x.astype(jnp.float32), axis=(1, 2)).astype(x.dtype)
        return jnp.einsum("bc,cn->bn", x, self.head[...].astype(x.dtype)) + self.head_bias[...].astype(x.dtype)[None]

    def loss(self, batch: Mapping[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """Return the cross-entropy in nats of `images` and `labels [batch]`, summed over images, and their number."""
        return cross_entropy(self(batch["images"], deterministic=deterministic), batch["labels"])


def _run_block(block: Bottleneck, x: jax.Array, train: bool, remat: str) -> jax.Array:
    """Apply a block. With remat it is a pure function of its state, which returns the running averages."""
    if remat == "none":
        return block(x, train)
    graph, state = nnx.split(block)

    def run(state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        copy = nnx.merge(graph, state)
        return copy(x, train), nnx.state(copy, nnx.BatchStat)

    x, averages = jax.checkpoint(run, policy=REMAT_POLICIES[remat])(state, x)
    nnx.update(block, averages)
    return x
