"""A residual network of wide bottleneck blocks, written for one device.

    x = pool(relu(norm(conv(image))))                       7x7, stride 2; then 3x3 maximum, stride 2
    x = relu(shortcut(x) + norm(conv(relu(norm(conv(relu(norm(conv(x)))))))))      1x1, 3x3, 1x1 for each block
    logits = mean(x) @ head

The 3x3 convolution of a block in stage i makes `width_factor * channels * 2^i` channels, the block itself
`4 * channels * 2^i`; the first block of every later stage has stride 2, in its 3x3 convolution.

Batch norm takes the mean and the variance of the whole batch, in float32, and keeps running averages of both for
evaluation: the model's variables besides its parameters (`nnx.BatchStat`). Convolutions compute in `dtype`.

Sources: ResNet (arXiv:1512.03385), stride in the 3x3 convolution and blocks that start as the identity as in
arXiv:1706.02677, wide blocks (arXiv:1605.07146), batch norm (arXiv:1502.03167).
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
from autoshard.models.stack import REMAT_POLICIES, remat_policies, remat_problems


@dataclasses.dataclass(frozen=True)
class WideResNetConfig:
    """Shape and numerics of a `WideResNet`. The stages are those of ResNet-50 unless told otherwise.

    Args:
        stages: number of blocks in each stage; the first keeps the size of the image, each later one halves it.
        channels: channels of the first convolution, doubled from stage to stage.
        width_factor: how many times as many a block's 3x3 convolution makes.
        image_size: height and width of the images.
        classes: number of different labels.
        remat: what a block's backward pass keeps: a name in `REMAT_POLICIES`, or several with commas that blocks take
            in turn.
        momentum: how much of a running average a step keeps.
        norm_eps: added to the variance.
        dtype: what convolutions and the head are computed in; norms and the loss are float32 throughout.
        param_dtype: what parameters are stored in.

    Raises:
        ValueError: naming every field that does not fit.
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
            problems.append("stages is empty; give a number of blocks for each stage")
        problems += remat_problems(self.remat, sum(self.stages), scan=False)
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
    """A convolution without a bias, padded so that stride 1 keeps the size: kernel `[height, width, in, out]`."""

    def __init__(self, cfg: WideResNetConfig, key: jax.Array, size: int, inputs: int, outputs: int, stride: int = 1):
        self.stride = stride
        # He initialisation (arXiv:1502.01852) by the fan-out, which keeps gradients as they are.
        std = (2.0 / (size * size * outputs)) ** 0.5
        self.kernel = nnx.Param(std * jax.random.normal(key, (size, size, inputs, outputs), jnp.dtype(cfg.param_dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, height, width, in]` to `[batch, height / stride, width / stride, out]` in x's dtype."""
        kernel = self.kernel[...].astype(x.dtype)
        pad = (kernel.shape[0] // 2, (kernel.shape[0] - 1) // 2)
        return lax.conv_general_dilated(
            x, kernel, (self.stride, self.stride), (pad, pad), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


class BatchNorm(nnx.Module):
    """Normalises each channel over batch, height and width; in evaluation by running averages."""

    def __init__(self, cfg: WideResNetConfig, channels: int, scale: float = 1.0):
        self.cfg = cfg
        dtype = jnp.dtype(cfg.param_dtype)
        self.scale, self.bias = nnx.Param(jnp.full(channels, scale, dtype)), nnx.Param(jnp.zeros(channels, dtype))
        self.mean = nnx.BatchStat(jnp.zeros(channels, jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones(channels, jnp.float32))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Normalise `[batch, height, width, channels]` in float32, and in training move the running averages."""
        y = x.astype(jnp.float32)
        if train:
            mean = jnp.mean(y, axis=(0, 1, 2))
            variance = jnp.mean(jnp.square(y - _channels(mean)), axis=(0, 1, 2))
            self._move(self.mean, mean)
            self._move(self.variance, variance)
        else:
            mean, variance = self.mean[...], self.variance[...]
        scale = self.scale[...].astype(jnp.float32) * lax.rsqrt(variance + self.cfg.norm_eps)
        y = (y - _channels(mean)) * _channels(scale) + _channels(self.bias[...].astype(jnp.float32))
        return y.astype(x.dtype)

    def _move(self, average: nnx.BatchStat, value: jax.Array) -> None:
        keep = self.cfg.momentum
        average[...] = keep * average[...] + (1.0 - keep) * lax.stop_gradient(value)


def _channels(x: jax.Array) -> jax.Array:
    """`[channels]` to `[1, 1, 1, channels]`, so that broadcasting it is spelt out."""
    return x.reshape(1, 1, 1, -1)


class Bottleneck(nnx.Module):
    """1x1 to `channels`, 3x3 to `width_factor * channels`, 1x1 to `4 * channels`, added to the block's input."""

    def __init__(self, cfg: WideResNetConfig, key: jax.Array, inputs: int, channels: int, stride: int):
        keys = jax.random.split(key, 4)
        wide, outputs = cfg.width_factor * channels, 4 * channels
        self.conv1, self.norm1 = Conv(cfg, keys[0], 1, inputs, channels), BatchNorm(cfg, channels)
        self.conv2, self.norm2 = Conv(cfg, keys[1], 3, channels, wide, stride), BatchNorm(cfg, wide)
        # The last scale is 0: a block starts as its shortcut.
        self.conv3, self.norm3 = Conv(cfg, keys[2], 1, wide, outputs), BatchNorm(cfg, outputs, scale=0.0)
        changes = inputs != outputs or stride != 1
        self.shortcut = Conv(cfg, keys[3], 1, inputs, outputs, stride) if changes else None
        self.shortcut_norm = BatchNorm(cfg, outputs) if changes else None

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """`[batch, height, width, in]` to `[batch, height / stride, width / stride, 4 * channels]`."""
        y = jax.nn.relu(self.norm1(self.conv1(x), train))
        y = jax.nn.relu(self.norm2(self.conv2(y), train))
        y = self.norm3(self.conv3(y), train)
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x), train)
        return jax.nn.relu(x + y)


class WideResNet(nnx.Module):
    """The model: images `[batch, image_size, image_size, 3]` to logits `[batch, classes]`.

    Args:
        cfg: its shape and numerics.
        rngs: the `params` stream initialises it.

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
        """Logits of each image's label.

        Args:
            images: `[batch, image_size, image_size, 3]`.
            deterministic: whether this is evaluation, by running averages. In training it is by the batch's own
                statistics, and the running averages move.

        Returns:
            `[batch, classes]` in `cfg.dtype`.
        """
        cfg, train = self.cfg, not deterministic
        if images.shape[1:] != (cfg.image_size, cfg.image_size, 3):
            wanted = f"[batch, {cfg.image_size}, {cfg.image_size}, 3]"
            raise ValueError(f"WideResNet: images must be {wanted}, not {list(images.shape)}")
        x = jax.nn.relu(self.stem_norm(self.stem(images.astype(cfg.dtype)), train))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        for block, remat in zip(self.blocks, itertools.cycle(remat_policies(cfg.remat))):
            x = _run_block(block, x, train, remat)
        x = jnp.mean(x.astype(jnp.float32), axis=(1, 2)).astype(x.dtype)
        return jnp.einsum("bc,cn->bn", x, self.head[...].astype(x.dtype)) + self.head_bias[...].astype(x.dtype)[None]

    def loss(self, batch: Mapping[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """Loss of a batch of `images` and `labels [batch]`: cross-entropy in nats, summed, and the count."""
        return cross_entropy(self(batch["images"], deterministic=deterministic), batch["labels"])


def _run_block(block: Bottleneck, x: jax.Array, train: bool, remat: str) -> jax.Array:
    """One block, as a pure function of its state where it is rematerialised: averages come out as a result."""
    if remat == "none":
        return block(x, train)
    graph, state = nnx.split(block)

    def run(state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        copy = nnx.merge(graph, state)
        return copy(x, train), nnx.state(copy, nnx.BatchStat)

    x, averages = jax.checkpoint(run, policy=REMAT_POLICIES[remat])(state, x)
    nnx.update(block, averages)
    return x
