"""Convolutional networks of two more kinds: a U-Net that predicts noise, and depthwise blocks in NCHW."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, conv, cross_entropy, group_norm, layer_norm

_UNET = {
    r"first": ". . width channels",
    r"second": ". . channels width",
    r"(skip|shrink|grow|enter)": ". . . width",
    r"leave": ". . width .",
    r"time": ". channels",
    r"qkv": "width . heads .",
    r"project": "heads . width",
}
_DEPTHWISE = {
    r"narrow": "width hidden . .",
    r"wide": "hidden width . .",
    r"(stem|shrink)": "width . . .",
    r"head": "width .",
}


def unet(notes: Notes, *, rows: int, side: int, channels: int, width: int, levels: int, groups: int) -> Program:
    """Down and up again with skips, a time embedding in every block, attention at the lowest level. Unrolled."""
    widths = [width * 2**level for level in range(levels)]

    def block_shapes(inputs: int, outputs: int) -> dict[str, Any]:
        made = {"first": (3, 3, inputs, outputs), "second": (3, 3, outputs, outputs), "time": (4 * width, outputs)}
        return made | ({"skip": (1, 1, inputs, outputs)} if inputs != outputs else {})

    shapes: dict[str, Any] = {
        "enter": (3, 3, channels, width),
        "time1": (width, 4 * width),
        "leave": (3, 3, width, channels),
    }
    shapes["down"] = [[block_shapes(w, w), block_shapes(w, w)] for w in widths]
    shapes["shrink"] = [{"shrink": (3, 3, one, two)} for one, two in zip(widths, widths[1:], strict=False)]
    shapes["up"] = [[block_shapes(2 * w, w), block_shapes(w, w)] for w in widths]
    shapes["grow"] = [{"grow": (3, 3, two, one)} for one, two in zip(widths, widths[1:], strict=False)]
    shapes["middle"] = {"qkv": (widths[-1], 3, 8, widths[-1] // 8), "project": (8, widths[-1] // 8, widths[-1])}

    @jax.checkpoint
    def block(x: jax.Array, w: Any, time: jax.Array) -> jax.Array:
        w = notes.weights(cast(w))
        y = conv(jax.nn.silu(group_norm(x, groups)), w["first"]) + (time @ w["time"])[:, None, None]
        y = conv(jax.nn.silu(group_norm(notes(y, "batch . . channels"), groups)), w["second"])
        return notes(y + (conv(x, w["skip"]) if "skip" in w else x), "batch . . .")

    @jax.checkpoint
    def attention(x: jax.Array, w: Any) -> jax.Array:
        w = notes.weights(cast(w))
        flat = group_norm(x, groups).reshape(x.shape[0], -1, x.shape[-1])
        q, k, v = (notes(part, "batch . heads .") for part in jnp.einsum("bsc,cnhk->nbshk", flat, w["qkv"]))
        mixed = jax.nn.dot_product_attention(q, k, v)
        return x + jnp.einsum("bshk,hkc->bsc", mixed, w["project"]).reshape(x.shape)

    def loss(params: Any, images: jax.Array, noise: jax.Array, times: jax.Array) -> jax.Array:
        keep = jnp.cos(times * math.pi / 2)[:, None, None, None]
        noisy = keep * images + jnp.sin(times * math.pi / 2)[:, None, None, None] * noise
        angles = 1e3 * times[:, None] * jnp.exp(-math.log(1e4) * jnp.arange(width // 2) / (width // 2))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = jax.nn.silu(cast(time) @ cast(params["time1"]))
        x = conv(cast(noisy), cast(params["enter"]))
        skips = []
        for level, blocks in enumerate(params["down"]):
            for w in blocks:
                x = block(x, w, time)
            skips.append(x)
            if level + 1 < levels:
                x = conv(x, notes.weights(cast(params["shrink"][level]))["shrink"], 2)
        x = attention(x, params["middle"])
        for level in reversed(range(levels)):
            x = jnp.concatenate([x, skips[level]], axis=-1)
            for w in params["up"][level]:
                x = block(x, w, time)
            if level:
                x = jax.image.resize(x, (rows, 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
                x = conv(x, notes.weights(cast(params["grow"][level - 1]))["grow"])
        made = conv(jax.nn.silu(group_norm(x, groups)), cast(params["leave"]))
        return jnp.mean(jnp.square(made.astype(jnp.float32) - noise))

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        shape = (rows, side, side, channels)
        return (
            jax.random.normal(keys[0], shape),
            jax.random.normal(keys[1], shape),
            jax.random.uniform(keys[2], (rows,)),
        )

    return adamw_program(loss, shapes, batch)


def depthwise(notes: Notes, *, rows: int, side: int, width: int, stages: int, blocks: int, classes: int) -> Program:
    """ConvNeXt in NCHW: 7 x 7 kernels of one channel each, then two products over channels as 1 x 1 convolutions."""
    numbers = ("NCHW", "OIHW", "NCHW")
    shapes: dict[str, Any] = {"stem": (width, 3, 4, 4), "stages": []}
    for stage in range(stages):
        channels = width * 2**stage
        block = {"spatial": (channels, 1, 7, 7), "norm": (channels,), "wide": (4 * channels, channels, 1, 1)}
        block |= {"narrow": (channels, 4 * channels, 1, 1), "scale": (channels,)}
        made: dict[str, Any] = {"blocks": [block] * blocks}
        if stage:
            made["shrink"] = (channels, channels // 2, 2, 2)
        shapes["stages"].append(made)
    shapes["head"] = (width * 2 ** (stages - 1), classes)

    def conv_first(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    @jax.checkpoint
    def block_of(x: jax.Array, w: Any) -> jax.Array:
        w = notes.weights(cast(w))
        y = conv_first(x, w["spatial"], groups=x.shape[1])
        y = jnp.moveaxis(layer_norm(jnp.moveaxis(y, 1, -1), w["norm"]), -1, 1)
        y = notes(jax.nn.gelu(conv_first(y, w["wide"])), "batch hidden . .")
        return notes(x + w["scale"][:, None, None] * conv_first(y, w["narrow"]), "batch . . .")

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = conv_first(cast(images), notes.weights(cast({"stem": params["stem"]}))["stem"], 4)
        for stage in params["stages"]:
            if "shrink" in stage:
                x = conv_first(x, notes.weights(cast({"shrink": stage["shrink"]}))["shrink"], 2)
            for w in stage["blocks"]:
                x = block_of(x, w)
        return cross_entropy(x.mean((2, 3)) @ cast(params["head"]), labels)

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        one, two = jax.random.split(key)
        return jax.random.normal(one, (rows, 3, side, side)), jax.random.randint(two, (rows,), 0, classes)

    return adamw_program(loss, shapes, batch)


_UNET_SIZES = {"side": 64, "channels": 3, "width": 256, "levels": 4, "groups": 32}
_NEXT = {"side": 224, "width": 192, "stages": 4, "blocks": 5, "classes": 1000}

FORMULATIONS = (
    Formulation(
        name="unet-noise",
        style="U-Net: skips, a time embedding, attention at the lowest level, resized images, unrolled",
        make=unet,
        small=dict(rows=8, side=16, channels=3, width=16, levels=2, groups=4),
        targets={"v5e:4x4": _UNET_SIZES | {"rows": 256}, "v6e:4x4": _UNET_SIZES | {"rows": 512}},
        dims=_UNET,
        ways=frozenset({"tensor"}),
        held_out=True,
    ),
    Formulation(
        name="convnext-nchw",
        style="convolutional network: NCHW, depthwise kernels, products over channels as convolutions, unrolled",
        make=depthwise,
        small=dict(rows=8, side=32, width=16, stages=2, blocks=2, classes=16),
        targets={"v5e:4x4": _NEXT | {"rows": 1024}, "v6e:4x4": _NEXT | {"rows": 2048}},
        dims=_DEPTHWISE,
        ways=frozenset({"tensor"}),
        held_out=True,
    ),
)
