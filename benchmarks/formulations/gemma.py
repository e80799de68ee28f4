"""A decoder whose layers attend locally and globally in turn, with soft caps and norms on both sides of a block."""

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
    r"(query|key|value)": "width heads .",
    r"attention_out": "heads . width",
    r"gating": ". width hidden",
    r"linear": "hidden width",
    r"table": "vocab width",
}


def _capped(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap)


def local_global(
    notes: Notes,
    *,
    rows: int,
    seq: int,
    pairs: int,
    width: int,
    heads: int,
    shared: int,
    size: int,
    hidden: int,
    window: int,
    vocab: int,
) -> Program:
    """A scan over pairs of layers: the first sees a window, the second all earlier positions. The head is tied."""
    layer = {"query": (width, heads, size), "key": (width, shared, size), "value": (width, shared, size)}
    layer |= {"attention_out": (heads, size, width), "gating": (2, width, hidden), "linear": (hidden, width)}
    norms = {f"{place}_{part}": (width,) for place in ("before", "after") for part in ("attention", "mlp")}
    pair = {kind: stacked(layer | norms, pairs) for kind in ("local", "global")}
    shapes = {"table": (vocab, width), "pairs": pair, "final": (width,)}
    behind = jnp.arange(seq)[:, None] - jnp.arange(seq)[None, :]
    masks = {"local": (behind >= 0) & (behind < window), "global": behind >= 0}

    def attention(x: jax.Array, w: Any, mask: jax.Array) -> jax.Array:
        q = notes(rotated(jnp.einsum("BTD,DNH->BTNH", x, w["query"])), "batch . heads .")
        k = rotated(jnp.einsum("BSD,DKH->BSKH", x, w["key"]))
        v = jnp.einsum("BSD,DKH->BSKH", x, w["value"])
        k, v = (notes(jnp.repeat(each, heads // shared, axis=2), "batch . heads .") for each in (k, v))
        scores = jnp.einsum("BTNH,BSNH->BNTS", q * size**-0.5, k).astype(jnp.float32)
        scores = jnp.where(mask[None, None], _capped(scores, 50.0), -2.0e38)
        mixed = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, -1).astype(x.dtype), v)
        return jnp.einsum("BTNH,NHD->BTD", mixed, w["attention_out"])

    def layer_of(x: jax.Array, w: Any, mask: jax.Array) -> jax.Array:
        w = notes.weights(cast(w))
        y = attention(rms_norm(x, w["before_attention"]), w, mask)
        x = notes(x + rms_norm(y, w["after_attention"]), "batch stream .")
        gate, up = jnp.einsum("BTD,xDF->xBTF", rms_norm(x, w["before_mlp"]), w["gating"])
        y = notes(jax.nn.gelu(gate) * up, "batch . hidden") @ w["linear"]
        return notes(x + rms_norm(y, w["after_mlp"]), "batch stream .")

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def pair_of(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return layer_of(layer_of(x, w["local"], masks["local"]), w["global"], masks["global"]), None

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        table = notes.weights(cast({"table": params["table"]}))["table"]
        x = notes(table[inputs] * cast(jnp.float32(width**0.5)), "batch stream .")
        x, _ = lax.scan(pair_of, x, params["pairs"])
        logits = notes(rms_norm(x, params["final"]) @ table.T, "batch . vocab")
        return cross_entropy(_capped(logits.astype(jnp.float32), 30.0), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


_9B = {"pairs": 21, "width": 3584, "heads": 16, "shared": 8, "size": 256, "hidden": 14336, "vocab": 256000}
_9B |= {"seq": 4096, "window": 2048}

FORMULATIONS = (
    Formulation(
        name="gemma-9b-pairs",
        style="dense transformer: local and global layers in turn, soft caps, repeated key heads, a large vocabulary",
        make=local_global,
        small=dict(rows=8, seq=32, pairs=2, width=64, heads=4, shared=2, size=16, hidden=128, window=8, vocab=512),
        targets={"v5p:4x4x4": _9B | {"rows": 64}, "v6e:8x8": _9B | {"rows": 64}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence"}),
    ),
)
