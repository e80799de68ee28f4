"""ResNet-50 as a loop over blocks, with batch norms that keep running averages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import cast, cross_entropy, images, initialized
from formulations.parts import conv as convolved

_DIMS = {
    r"conv1/kernel": ". . width channels",
    r"conv2/kernel": ". . channels .",
    r"conv3/kernel": ". . channels width",
    r"(short|stem)/kernel": ". . . width",
    r"classifier": "width .",
}


def _conv_shapes(size: int, inputs: int, outputs: int) -> dict[str, Any]:
    return {"kernel": (size, size, inputs, outputs), "scale": (outputs,), "bias": (outputs,)}


def _normalized(x: jax.Array, w: Any, averages: list[Any]) -> jax.Array:
    """Normalize over the batch and the pixels, and note the averages."""
    wide = x.astype(jnp.float32)
    mean, square = wide.mean((0, 1, 2)), jnp.square(wide).mean((0, 1, 2))
    var = square - jnp.square(mean)
    averages.append({"mean": lax.stop_gradient(mean), "var": lax.stop_gradient(var)})
    return ((wide - mean) * lax.rsqrt(var + 1e-5) * w["scale"] + w["bias"]).astype(x.dtype)


def batch_norms(notes: Notes, *, rows: int, side: int, width: int, blocks: int, stages: int, classes: int) -> Program:
    """Bottleneck blocks: `blocks` in the first stage and one more in each later one. Nesterov momentum."""
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    shapes: dict[str, Any] = {"stem": _conv_shapes(7, 3, width), "blocks": []}
    strides, inputs = [], width
    for stage in range(stages):
        inner = width * 2**stage
        for number in range(blocks + stage):
            block = {"conv1": _conv_shapes(1, inputs, inner), "conv2": _conv_shapes(3, inner, inner)}
            block["conv3"] = _conv_shapes(1, inner, 4 * inner)
            if number == 0:
                block["short"] = _conv_shapes(1, inputs, 4 * inner)
            shapes["blocks"].append(block)
            strides.append(2 if number == 0 and stage else 1)
            inputs = 4 * inner
    shapes["classifier"] = (inputs, classes)

    def conv(x: jax.Array, w: Any, averages: list[Any], stride: int = 1) -> jax.Array:
        kernel = notes.weights({"kernel": cast(w["kernel"])})["kernel"]
        return _normalized(convolved(x, kernel, stride), w, averages)

    def loss(params: Any, pixels: jax.Array, labels: jax.Array) -> tuple[jax.Array, list[Any]]:
        averages: list[Any] = []
        x = jax.nn.relu(conv(cast(pixels), params["stem"], averages, 2))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for w, stride in zip(params["blocks"], strides, strict=True):
            y = jax.nn.relu(conv(x, w["conv1"], averages))
            y = jax.nn.relu(conv(notes(y, "batch . . channels"), w["conv2"], averages, stride))
            y = conv(notes(y, "batch . . channels"), w["conv3"], averages)
            x = conv(x, w["short"], averages, stride) if "short" in w else x
            x = notes(jax.nn.relu(x + y), "batch . . .")
        return cross_entropy(x.mean((1, 2)) @ cast(params["classifier"]), labels), averages

    def state(key: jax.Array) -> Any:
        params = initialized(key, shapes)
        pixels, labels = jax.eval_shape(images(rows, side, classes), key)
        averages = jax.eval_shape(loss, params, pixels, labels)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), averages)
        return {"params": params, "moments": optimizer.init(params), "averages": zeros}

    def step(state: Any, pixels: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        (value, now), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"], pixels, labels)
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        averages = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["averages"], now)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments, "averages": averages}, value

    return Program(step, state, images(rows, side, classes))


_50 = {"side": 224, "width": 64, "blocks": 3, "stages": 4, "classes": 1000}

FORMULATIONS = (
    Formulation(
        name="resnet-50-batch-norm",
        style="convolutional network: bottleneck blocks in a loop, batch norms with running averages, strides",
        make=batch_norms,
        small=dict(rows=16, side=32, width=8, blocks=1, stages=2, classes=16),
        targets={"v5e:4x4": _50 | {"rows": 4096}, "v6e:4x4": _50 | {"rows": 8192}},
        dims=_DIMS,
        ways=frozenset({"tensor"}),
    ),
)
