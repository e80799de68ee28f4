"""GPT and ViT: fused queries, keys and values, learned positions, layer norms with biases, a tied head."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, conv, cross_entropy, images, layer_norm, tokens

_DIMS = {
    r"qkv": "width . heads .",
    r"qkv_bias": ". heads .",
    r"project": "heads . width",
    r"fc1/kernel": "width hidden",
    r"fc1/bias": "hidden",
    r"fc2/kernel": "hidden width",
    r"wte": "vocab width",
    r"wpe|positions": ". width",
    r"patches": ". . . width",
    r"classifier": "width vocab",
}


def _layer(width: int, heads: int) -> dict[str, Any]:
    """The shapes of a layer."""
    size = width // heads
    return {
        "ln1": {"scale": (width,), "bias": (width,)},
        "qkv": (width, 3, heads, size),
        "qkv_bias": (3, heads, size),
        "project": (heads, size, width),
        "ln2": {"scale": (width,), "bias": (width,)},
        "fc1": {"kernel": (width, 4 * width), "bias": (4 * width,)},
        "fc2": {"kernel": (4 * width, width), "bias": (width,)},
    }


def _block(notes: Notes, x: jax.Array, w: Any, causal: bool) -> jax.Array:
    w = notes.weights(cast(w))
    qkv = jnp.einsum("bte,exhd->xbhtd", layer_norm(x, **w["ln1"]), w["qkv"]) + w["qkv_bias"][:, None, :, None, :]
    q, k, v = (notes(part, "batch heads . .") for part in qkv)
    logits = (q @ k.swapaxes(-1, -2)).astype(jnp.float32) / math.sqrt(q.shape[-1])
    if causal:
        logits = logits + jnp.where(jnp.tri(x.shape[1], dtype=bool), 0.0, -jnp.inf)
    mixed = jax.nn.softmax(logits, axis=-1).astype(x.dtype) @ v
    x = notes(x + jnp.einsum("bhtd,hde->bte", mixed, w["project"]), "batch stream .")
    y = jax.nn.gelu(layer_norm(x, **w["ln2"]) @ w["fc1"]["kernel"] + w["fc1"]["bias"])
    y = notes(y, "batch . hidden") @ w["fc2"]["kernel"] + w["fc2"]["bias"]
    return notes(x + y, "batch stream .")


def gpt(notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, vocab: int) -> Program:
    """A decoder whose layers are a loop, each recomputed; its head is the embedding."""
    shapes = {"wte": (vocab, width), "wpe": (seq, width), "h": [_layer(width, heads)] * layers}
    shapes |= {"ln_f": {"scale": (width,), "bias": (width,)}}
    block = jax.checkpoint(lambda x, w: _block(notes, x, w, True))

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        wte = notes.weights(cast({"wte": params["wte"]}))["wte"]
        x = notes(wte[inputs] + cast(params["wpe"]), "batch stream .")
        for w in params["h"]:
            x = block(x, w)
        logits = jnp.einsum("bte,ve->btv", layer_norm(x, **params["ln_f"]), wte)
        return cross_entropy(notes(logits, "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


def vit(
    notes: Notes, *, rows: int, side: int, patch: int, layers: int, width: int, heads: int, classes: int
) -> Program:
    """An encoder of image patches, which come from a convolution. The layers are a scan; one token is the class."""
    count = (side // patch) ** 2
    layer = jax.tree.map(lambda shape: (layers, *shape), _layer(width, heads), is_leaf=lambda x: isinstance(x, tuple))
    shapes = {"patches": (patch, patch, 3, width), "class_token": (1, 1, width), "positions": (count + 1, width)}
    shapes |= {"blocks": layer, "ln": {"scale": (width,), "bias": (width,)}, "classifier": (width, classes)}

    def body(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jax.checkpoint(lambda x, w: _block(notes, x, w, False))(x, w), None

    def loss(params: Any, pixels: jax.Array, labels: jax.Array) -> jax.Array:
        ends = cast({name: params[name] for name in ("patches", "class_token", "positions", "classifier")})
        ends = notes.weights(ends)
        x = conv(cast(pixels), ends["patches"], patch, "VALID")
        x = x.reshape(rows, count, width)
        x = jnp.concatenate([jnp.broadcast_to(ends["class_token"], (rows, 1, width)), x], axis=1) + ends["positions"]
        x, _ = lax.scan(body, notes(x, "batch . ."), params["blocks"])
        return cross_entropy(layer_norm(x[:, 0], **params["ln"]) @ ends["classifier"], labels)

    return adamw_program(loss, shapes, images(rows, side, classes))


_1B = {"layers": 24, "width": 2048, "heads": 16, "vocab": 50304, "seq": 1024, "rows": 256}
_3B = {"layers": 32, "width": 2560, "heads": 32, "vocab": 50304, "seq": 1024, "rows": 256}
_WAYS = frozenset({"tensor", "sequence"})

FORMULATIONS = (
    Formulation(
        name="gpt-1.3b-fused",
        style="dense transformer: fused queries, keys and values, layers in a loop, tied head",
        make=gpt,
        small=dict(rows=16, seq=32, layers=2, width=64, heads=8, vocab=256),
        targets={"v5e:4x4": _1B, "v6e:4x4": _1B | {"rows": 512}},
        dims=_DIMS,
        ways=_WAYS,
    ),
    Formulation(
        name="gpt-2.6b-fused",
        style="dense transformer: fused queries, keys and values, layers in a loop, tied head",
        make=gpt,
        small=dict(rows=8, seq=16, layers=3, width=64, heads=4, vocab=512),
        targets={"v5e:4x4": _3B, "v6e:4x4": _3B | {"rows": 512}},
        dims=_DIMS,
        ways=_WAYS,
    ),
    Formulation(
        name="vit-l16-scanned",
        style="image transformer: patches by convolution, a class token, scanned layers",
        make=vit,
        small=dict(rows=16, side=32, patch=8, layers=2, width=64, heads=4, classes=16),
        targets={
            "v5e:4x4": dict(rows=1024, side=224, patch=16, layers=24, width=1024, heads=16, classes=1024),
            "v6e:4x4": dict(rows=2048, side=224, patch=16, layers=24, width=1024, heads=16, classes=1024),
        },
        dims=_DIMS,
        ways=frozenset({"tensor"}),
    ),
)
