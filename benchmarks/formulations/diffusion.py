"""A diffusion transformer: layers that a condition scales and shifts, trained to predict the noise of latents."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, layer_norm, stacked

_DIMS = {
    r"patch_in": ". width",
    r"patch_out": "width .",
    r"(time1|time2)": ". width",
    r"labels": ". width",
    r"modulation": "width . .",
    r"qkv": "width . heads .",
    r"project": "heads . width",
    r"fc1": "width hidden",
    r"fc2": "hidden width",
}


def _waves(times: jax.Array, size: int) -> jax.Array:
    angles = times[:, None] * jnp.exp(-math.log(1e4) * jnp.arange(size // 2) / (size // 2))
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def transformer(
    notes: Notes, *, rows: int, side: int, patch: int, channels: int, layers: int, width: int, heads: int, classes: int
) -> Program:
    """A scan over layers with adaptive norms. The batch: latents, their noise, times and labels."""
    count, values = (side // patch) ** 2, patch * patch * channels
    layer = {"modulation": (width, 6, width), "qkv": (width, 3, heads, width // heads)}
    layer |= {"project": (heads, width // heads, width), "fc1": (width, 4 * width), "fc2": (4 * width, width)}
    shapes = {"patch_in": (values, width), "places": (count, width), "time1": (256, width), "time2": (width, width)}
    shapes |= {"labels": (classes, width), "layers": stacked(layer, layers), "last": (width, 2, width)}
    shapes |= {"patch_out": (width, values)}

    def normal(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        return layer_norm(x, jnp.ones(())) * (1 + scale[:, None]) + shift[:, None]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer_of(carry: tuple[jax.Array, jax.Array], w: Any) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, condition = carry
        w = notes.weights(cast(w))
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.einsum("bd,dne->nbe", condition, w["modulation"])
        y = normal(x, shift1, scale1)
        q, k, v = (notes(part, "batch heads . .") for part in jnp.einsum("btd,dnhk->nbhtk", y, w["qkv"]))
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        mixed = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores).astype(x.dtype), v)
        x = notes(x + gate1[:, None] * jnp.einsum("bhtk,hkd->btd", mixed, w["project"]), "batch stream .")
        inner = notes(jax.nn.gelu(normal(x, shift2, scale2) @ w["fc1"]), "batch . hidden")
        return (notes(x + gate2[:, None] * (inner @ w["fc2"]), "batch stream ."), condition), None

    def loss(params: Any, latents: jax.Array, noise: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
        ends = notes.weights(cast({name: w for name, w in params.items() if name != "layers"}))
        keep = jnp.cos(times * math.pi / 2)[:, None, None, None]
        mixed = keep * latents + jnp.sqrt(1 - jnp.square(keep)) * noise

        def patches(x: jax.Array) -> jax.Array:
            x = x.reshape(rows, side // patch, patch, side // patch, patch, channels)
            return x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, count, values)

        condition = (
            jax.nn.silu(cast(_waves(1000 * times, 256)) @ ends["time1"]) @ ends["time2"] + ends["labels"][labels]
        )
        condition = jax.nn.silu(condition)
        x = notes(cast(patches(mixed)) @ ends["patch_in"] + ends["places"], "batch stream .")
        (x, _), _ = lax.scan(layer_of, (x, condition), params["layers"])
        shift, scale = jnp.einsum("bd,dne->nbe", condition, ends["last"])
        made = (normal(x, shift, scale) @ ends["patch_out"]).astype(jnp.float32)
        return jnp.mean(jnp.square(made - patches(noise)))

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 4)
        shape = (rows, side, side, channels)
        times, labels = jax.random.uniform(keys[2], (rows,)), jax.random.randint(keys[3], (rows,), 0, classes)
        return jax.random.normal(keys[0], shape), jax.random.normal(keys[1], shape), times, labels

    return adamw_program(loss, shapes, batch)


_XL = {"side": 32, "patch": 2, "channels": 4, "layers": 28, "width": 1152, "heads": 16, "classes": 1001}

FORMULATIONS = (
    Formulation(
        name="dit-xl-scanned",
        style="diffusion transformer: adaptive norms from a condition, scanned layers, mean squared error",
        make=transformer,
        small=dict(rows=16, side=8, patch=2, channels=4, layers=2, width=64, heads=4, classes=16),
        targets={"v5e:4x4": _XL | {"rows": 1024}, "v6e:4x4": _XL | {"rows": 2048}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence"}),
        held_out=True,
    ),
)
