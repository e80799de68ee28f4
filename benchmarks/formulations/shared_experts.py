"""Many small experts and shared ones: every token goes through the shared experts and six of the others."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.llama import rotated
from formulations.parts import adamw_program, cast, cross_entropy, rms_norm, stacked, tokens

_DIMS = {
    r"w[qkv]": "width heads .",
    r"wo": "heads . width",
    r"router": "width .",
    r"(gate|up)_experts": "experts width hidden",
    r"down_experts": "experts hidden width",
    r"(gate|up)_shared": "width hidden",
    r"down_shared": "hidden width",
    r"embed": "vocab width",
    r"head": "width vocab",
}


def shared(
    notes: Notes,
    *,
    rows: int,
    seq: int,
    layers: int,
    width: int,
    heads: int,
    hidden: int,
    experts: int,
    top: int,
    always: int,
    vocab: int,
) -> Program:
    """A scan over layers. Tokens of a row take places in each expert's buffer by a scatter, and come back by a gather.

    Places beyond the capacity are dropped. `always` shared experts are one wide layer.
    """
    size, capacity = width // heads, 3 * top * seq // (2 * experts)
    layer = {"norm1": (width,), "wq": (width, heads, size), "wk": (width, heads, size), "wv": (width, heads, size)}
    layer |= {"wo": (heads, size, width), "norm2": (width,), "router": (width, experts)}
    layer |= {"gate_experts": (experts, width, hidden), "up_experts": (experts, width, hidden)}
    layer |= {"down_experts": (experts, hidden, width), "gate_shared": (width, always * hidden)}
    layer |= {"up_shared": (width, always * hidden), "down_shared": (always * hidden, width)}
    shapes = {"embed": (vocab, width), "layers": stacked(layer, layers), "norm": (width,), "head": (width, vocab)}

    def one_row(x: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        weights, chosen = lax.top_k(scores, top)
        flat = chosen.reshape(-1)
        place = jnp.cumsum(jax.nn.one_hot(flat, experts, dtype=jnp.int32), axis=0)[jnp.arange(seq * top), flat] - 1
        sent = jnp.zeros((experts, capacity, width), x.dtype)
        sent = sent.at[flat, place].add(jnp.repeat(x, top, axis=0), mode="drop")
        return sent, flat, place, weights

    def back(made: jax.Array, flat: jax.Array, place: jax.Array, weights: jax.Array) -> jax.Array:
        taken = made.at[flat, place].get(mode="fill", fill_value=0).reshape(seq, top, width)
        return jnp.einsum("tkd,tk->td", taken, weights.astype(made.dtype))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer_of(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        router, w = w["router"], notes.weights(cast(w))
        y = rms_norm(x, w["norm1"])
        q, k, v = (notes(jnp.einsum("btd,dhk->bthk", y, w[name]), "batch . heads .") for name in ("wq", "wk", "wv"))
        y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = notes(x + jnp.einsum("bthk,hkd->btd", y, w["wo"]), "batch stream .")
        y = rms_norm(x, w["norm2"])
        scores = jax.nn.softmax(y.astype(jnp.float32) @ router, axis=-1)
        sent, flat, place, weights = jax.vmap(one_row)(y, scores)
        sent = notes(sent, "groups experts . .")
        inner = jax.nn.silu(jnp.einsum("becd,edf->becf", sent, w["gate_experts"]))
        inner = notes(inner * jnp.einsum("becd,edf->becf", sent, w["up_experts"]), "groups experts . hidden")
        made = notes(jnp.einsum("becf,efd->becd", inner, w["down_experts"]), "groups experts . .")
        routed = jax.vmap(back)(made, flat, place, weights)
        inner = notes(jax.nn.silu(y @ w["gate_shared"]) * (y @ w["up_shared"]), "batch . hidden")
        return notes(x + routed + inner @ w["down_shared"], "batch stream ."), None

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        ends = notes.weights(cast({name: params[name] for name in ("embed", "head", "norm")}))
        x, _ = lax.scan(layer_of, notes(ends["embed"][inputs], "batch stream ."), params["layers"])
        return cross_entropy(notes(rms_norm(x, ends["norm"]) @ ends["head"], "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


_16B = {"seq": 2048, "layers": 12, "width": 2048, "heads": 16, "hidden": 1408, "experts": 64, "top": 6, "always": 2}

FORMULATIONS = (
    Formulation(
        name="moe-64-shared",
        style="experts: many small ones and shared ones, places by scatter and gather within a row, scanned",
        make=shared,
        small=dict(rows=16, seq=16, layers=2, width=32, heads=4, hidden=64, experts=8, top=2, always=1, vocab=128),
        targets={"v5p:4x4x4": _16B | {"vocab": 32000, "rows": 256}, "v6e:4x4": _16B | {"vocab": 32000, "rows": 64}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence", "experts"}),
    ),
)
