"""A residual network of stages: the blocks of a stage are a stack in a scan."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, conv, cross_entropy, group_norm, images

_DIMS = {
    r"first": ". . width channels",
    r"second": ". . channels width",
    r"stem|down\d": ". . . width",
    r"classifier": "width .",
}


def scanned_stages(
    notes: Notes, *, rows: int, side: int, width: int, blocks: int, stages: int, classes: int, groups: int = 32
) -> Program:
    """Stages of 3 x 3 blocks before which the image shrinks and the channels double. Group norms, SGD with momentum."""
    shapes: dict[str, Any] = {"stem": (7, 7, 3, width)}
    for stage in range(stages):
        channels = width * 2**stage
        block = {"scale1": (blocks, channels), "bias1": (blocks, channels), "first": (blocks, 3, 3, channels, channels)}
        block |= {"scale2": (blocks, channels), "bias2": (blocks, channels)}
        shapes[f"stage{stage}"] = block | {"second": (blocks, 3, 3, channels, channels)}
        if stage + 1 < stages:
            shapes[f"down{stage}"] = (2, 2, channels, 2 * channels)
    shapes["classifier"] = (width * 2 ** (stages - 1), classes)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block_of(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = notes.weights(cast(w))
        y = group_norm(x, groups) * w["scale1"] + w["bias1"]
        y = conv(jax.nn.relu(y), w["first"])
        y = notes(y, "batch . . channels")
        y = group_norm(y, groups) * w["scale2"] + w["bias2"]
        y = conv(jax.nn.relu(y), w["second"])
        return notes(x + y, "batch . . ."), None

    def loss(params: Any, pixels: jax.Array, labels: jax.Array) -> jax.Array:
        ends = {name: w for name, w in params.items() if not name.startswith("stage")}
        ends = notes.weights(cast(ends))
        x = notes(conv(cast(pixels), ends["stem"], 4), "batch . . .")
        for stage in range(stages):
            x, _ = lax.scan(block_of, x, params[f"stage{stage}"])
            if f"down{stage}" in ends:
                x = notes(conv(x, ends[f"down{stage}"], 2), "batch . . .")
        return cross_entropy(x.mean((1, 2)) @ ends["classifier"], labels)

    return adamw_program(loss, shapes, images(rows, side, classes), optax.sgd(0.1, momentum=0.9))


_250M = {"side": 224, "width": 192, "blocks": 4, "stages": 4, "classes": 1024}

FORMULATIONS = (
    Formulation(
        name="residual-scanned",
        style="convolutional network: stages of scanned residual blocks, group norms, SGD",
        make=scanned_stages,
        small=dict(rows=16, side=32, width=16, blocks=2, stages=2, classes=16, groups=4),
        targets={"v5e:4x4": _250M | {"rows": 256}, "v6e:4x4": _250M | {"rows": 512}},
        dims=_DIMS,
        ways=frozenset({"tensor"}),
    ),
)
