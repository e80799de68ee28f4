"""Llama in two ways: layers in a scan with einsum heads, and layers in a loop with reshaped heads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, cross_entropy, rms_norm, stacked, tokens

_DIMS = {
    r"w[qkv]": "width heads .",
    r"wo": "heads . width",
    r"(q|k|v)_proj": "width heads",
    r"o_proj": "heads width",
    r"(gate|up)": "width hidden",
    r"down": "hidden width",
    r"embed": "vocab width",
    r"head": "width vocab",
}


def rotated(x: jax.Array, theta: float = 1e4) -> jax.Array:
    """Rotate pairs of the first and the second half of `[batch, positions, heads, size]`."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def scanned(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, shared: int, hidden: int, vocab: int
) -> Program:
    """A scan over stacked layers, each recomputed. Heads are a dimension of the weights; several share keys."""
    size = width // heads
    layer = {"norm1": (width,), "wq": (width, heads, size), "wk": (width, shared, size), "wv": (width, shared, size)}
    layer |= {"wo": (heads, size, width), "norm2": (width,), "gate": (width, hidden), "up": (width, hidden)}
    layer |= {"down": (hidden, width)}
    shapes = {"embed": (vocab, width), "layers": stacked(layer, layers), "norm": (width,), "head": (width, vocab)}

    def attention(x: jax.Array, w: Any) -> jax.Array:
        q = notes(rotated(jnp.einsum("btd,dhk->bthk", x, w["wq"])), "batch . heads .")
        k = notes(rotated(jnp.einsum("btd,dgk->btgk", x, w["wk"])), "batch . heads .")
        v = notes(jnp.einsum("btd,dgk->btgk", x, w["wv"]), "batch . heads .")
        grouped = q.reshape(*q.shape[:2], shared, heads // shared, size)
        scores = jnp.einsum("btgqk,bsgk->bgqts", grouped, k, preferred_element_type=jnp.float32) * size**-0.5
        seen = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
        shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bgqts,bsgk->btgqk", shares, v).reshape(q.shape)
        return jnp.einsum("bthk,hkd->btd", mixed, w["wo"])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer_of(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = notes.weights(cast(w))
        x = notes(x + attention(rms_norm(x, w["norm1"]), w), "batch stream .")
        y = rms_norm(x, w["norm2"])
        y = notes(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "batch . hidden")
        return notes(x + y @ w["down"], "batch stream ."), None

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        ends = notes.weights(cast({name: params[name] for name in ("embed", "head", "norm")}))
        x = notes(ends["embed"][inputs], "batch stream .")
        x, _ = lax.scan(layer_of, x, params["layers"])
        return cross_entropy(notes(rms_norm(x, ends["norm"]) @ ends["head"], "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


def unrolled(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, hidden: int, vocab: int
) -> Program:
    """A Python loop over a list of layers. Weights are matrices, and heads come from a reshape."""
    layer = {"q_proj": (width, width), "k_proj": (width, width), "v_proj": (width, width), "o_proj": (width, width)}
    layer |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    layer |= {"attention_norm": (width,), "mlp_norm": (width,)}
    shapes = {"embed": (vocab, width), "layers": [layer] * layers, "norm": (width,), "head": (width, vocab)}

    def heads_of(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return notes((x @ kernel).reshape(*x.shape[:2], heads, -1), "batch . heads .")

    @jax.checkpoint
    def block(w: Any, x: jax.Array) -> jax.Array:
        w = notes.weights(cast(w))
        y = rms_norm(x, w["attention_norm"])
        q, k = rotated(heads_of(y, w["q_proj"])), rotated(heads_of(y, w["k_proj"]))
        y = jax.nn.dot_product_attention(q, k, heads_of(y, w["v_proj"]), is_causal=True)
        x = notes(x + y.reshape(x.shape) @ w["o_proj"], "batch stream .")
        y = rms_norm(x, w["mlp_norm"])
        y = notes(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "batch . hidden")
        return notes(x + y @ w["down"], "batch stream .")

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        ends = notes.weights(cast({name: params[name] for name in ("embed", "head", "norm")}))
        x = notes(jnp.take(ends["embed"], inputs, axis=0), "batch stream .")
        for w in params["layers"]:
            x = block(w, x)
        return cross_entropy(notes(rms_norm(x, ends["norm"]) @ ends["head"], "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


_70B = {"layers": 80, "width": 8192, "heads": 64, "shared": 8, "hidden": 28672, "vocab": 32000, "seq": 4096}
_7B = {"layers": 32, "width": 4096, "heads": 32, "hidden": 11008, "vocab": 32000}
_WAYS = frozenset({"tensor", "sequence"})

FORMULATIONS = (
    Formulation(
        name="llama-70b-scanned",
        style="dense transformer: scanned layers, einsum heads, grouped queries, recomputed layers",
        make=scanned,
        small=dict(rows=16, seq=32, layers=2, width=64, heads=8, shared=2, hidden=128, vocab=256),
        targets={"v5p:8x8x4": _70B | {"rows": 256}, "v6e:16x16": _70B | {"rows": 256}},
        dims=_DIMS,
        ways=_WAYS,
    ),
    Formulation(
        name="llama-7b-2k-unrolled",
        style="dense transformer: 32 layers in a loop, reshaped heads",
        make=unrolled,
        small=dict(rows=16, seq=32, layers=3, width=64, heads=8, hidden=128, vocab=256),
        targets={"v5p:4x4x4": _7B | {"rows": 128, "seq": 2048}, "v6e:4x4": _7B | {"rows": 32, "seq": 2048}},
        dims=_DIMS,
        ways=_WAYS,
    ),
    Formulation(
        name="llama-7b-4k-unrolled",
        style="dense transformer: 32 layers in a loop, reshaped heads, few long rows",
        make=unrolled,
        small=dict(rows=8, seq=64, layers=2, width=64, heads=4, hidden=96, vocab=128),
        targets={"v5p:4x4x4": _7B | {"rows": 64, "seq": 4096}, "v6e:8x8": _7B | {"rows": 64, "seq": 4096}},
        dims=_DIMS,
        ways=_WAYS,
    ),
)
