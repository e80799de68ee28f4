"""CLIP: an image tower and a text tower, and a loss over all pairs of the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, layer_norm

_DIMS = {
    r"(query|key|value)": "width heads",
    r"back": "heads width",
    r"rise": "width hidden",
    r"fall": "hidden width",
    r"words": "vocab width",
    r"patches": ". width",
    r"join": "width .",
}


def _tower_shapes(layers: int, width: int) -> list[Any]:
    layer = {name: (width, width) for name in ("query", "key", "value", "back")}
    layer |= {"rise": (width, 4 * width), "fall": (4 * width, width), "norm1": (width,), "norm2": (width,)}
    return [layer] * layers


def two_towers(
    notes: Notes,
    *,
    rows: int,
    side: int,
    patch: int,
    image_width: int,
    text_width: int,
    layers: int,
    size: int,
    seq: int,
    joint: int,
    vocab: int,
) -> Program:
    """The towers' results are normalized; each image must find its text in the batch, and each text its image."""
    count = (side // patch) ** 2
    shapes: dict[str, Any] = {"image": {"patches": (patch * patch * 3, image_width), "places": (count, image_width)}}
    shapes["image"] |= {"layers": _tower_shapes(layers, image_width), "join": (image_width, joint)}
    shapes["text"] = {"words": (vocab, text_width), "places": (seq, text_width), "join": (text_width, joint)}
    shapes["text"] |= {"layers": _tower_shapes(layers, text_width)}
    shapes["temperature"] = (1,)

    def encoded(x: jax.Array, layers: Any, causal: bool) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, w: Any) -> jax.Array:
            w = notes.weights(cast(w))
            y = layer_norm(x, w["norm1"])
            q, k, v = (
                notes((y @ w[name]).reshape(*x.shape[:2], -1, size), "batch . heads .")
                for name in ("query", "key", "value")
            )
            y = jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape)
            x = notes(x + y @ w["back"], "batch stream .")
            y = notes(jax.nn.gelu(layer_norm(x, w["norm2"]) @ w["rise"]), "batch . hidden")
            return notes(x + y @ w["fall"], "batch stream .")

        for w in layers:
            x = block(x, w)
        return x

    def unit(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(params: Any, pixels: jax.Array, words: jax.Array) -> jax.Array:
        image, text = params["image"], params["text"]
        ends = notes.weights(cast({"patches": image["patches"], "words": text["words"]}))
        parts = pixels.reshape(rows, side // patch, patch, side // patch, patch, 3)
        x = cast(parts.transpose(0, 1, 3, 2, 4, 5).reshape(rows, count, -1)) @ ends["patches"] + cast(image["places"])
        seen = unit(encoded(x, image["layers"], False).mean(1) @ cast(image["join"]))
        y = encoded(ends["words"][words] + cast(text["places"]), text["layers"], True)
        last = jnp.argmax(words, axis=-1)
        read = unit(y[jnp.arange(rows), last] @ cast(text["join"]))
        logits = seen @ read.T * jnp.exp(params["temperature"][0])
        own = jnp.arange(rows)
        by_image = jax.nn.log_softmax(logits, axis=1)[own, own]
        by_text = jax.nn.log_softmax(logits, axis=0)[own, own]
        return -(by_image.mean() + by_text.mean()) / 2

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        one, two = jax.random.split(key)
        return jax.random.normal(one, (rows, side, side, 3)), jax.random.randint(two, (rows, seq), 0, vocab)

    return adamw_program(loss, shapes, batch)


_L14 = {"side": 224, "patch": 14, "image_width": 1024, "text_width": 768, "layers": 16, "size": 64, "seq": 77}
_L14 |= {"joint": 768, "vocab": 49408}

FORMULATIONS = (
    Formulation(
        name="clip-l14",
        style="contrastive: two towers of different widths, a loss over all pairs of the batch",
        make=two_towers,
        small=dict(
            rows=16, side=16, patch=8, image_width=32, text_width=64, layers=2, size=16, seq=8, joint=16, vocab=64
        ),
        targets={"v5e:4x4": _L14 | {"rows": 2048}, "v6e:4x4": _L14 | {"rows": 4096}},
        dims=_DIMS,
        ways=frozenset({"tensor"}),
        held_out=True,
    ),
)
