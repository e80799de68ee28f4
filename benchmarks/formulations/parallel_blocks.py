"""Decoders with unusual attention: parallel blocks with one key head, and latent keys and values."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.llama import rotated
from formulations.parts import adamw_program, cast, cross_entropy, layer_norm, rms_norm, stacked, tokens

_PARALLEL = {
    r"fused_in": "width .",
    r"query": "width heads .",
    r"mlp": "width hidden",
    r"attention_out": "heads . width",
    r"mlp_out": "hidden width",
    r"embed": "vocab width",
}
_LATENT = {
    r"q_down|kv_down": "width .",
    r"(q|k|v)_up": ". heads .",
    r"k_rope": "width .",
    r"out": "heads . width",
    r"gate_up": "width . hidden",
    r"down": "hidden width",
    r"embed": "vocab width",
    r"head": "width vocab",
}


def parallel(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, size: int, vocab: int
) -> Program:
    """Attention and the feed-forward part read the same norm and are added together. All heads share one key head."""
    layer = {"norm": (width,), "query": (width, heads, size), "fused_in": (width, 2 * size)}
    layer |= {"mlp": (width, 4 * width), "attention_out": (heads, size, width), "mlp_out": (4 * width, width)}
    shapes = {"embed": (vocab, width), "layers": stacked(layer, layers), "norm": (width,)}

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer_of(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = notes.weights(cast(w))
        y = layer_norm(x, w["norm"])
        q = notes(rotated(jnp.einsum("btd,dhk->bthk", y, w["query"])), "batch . heads .")
        k, v = jnp.split(y @ w["fused_in"], 2, axis=-1)
        k = rotated(k[:, :, None])[:, :, 0]
        scores = jnp.einsum("bthk,bsk->bhts", q, k).astype(jnp.float32) * size**-0.5
        scores = jnp.where(jnp.tri(seq, dtype=bool), scores, jnp.finfo(jnp.float32).min)
        mixed = jnp.einsum("bhts,bsk->bthk", jax.nn.softmax(scores, axis=-1).astype(x.dtype), v)
        inner = notes(jax.nn.gelu(y @ w["mlp"]), "batch . hidden")
        both = jnp.einsum("bthk,hkd->btd", mixed, w["attention_out"]) + inner @ w["mlp_out"]
        return notes(x + both, "batch stream ."), None

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        table = notes.weights(cast({"embed": params["embed"]}))["embed"]
        x, _ = lax.scan(layer_of, notes(table[inputs], "batch stream ."), params["layers"])
        logits = notes(layer_norm(x, params["norm"]) @ table.T, "batch . vocab")
        return cross_entropy(logits / width**0.5, targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


def latent(
    notes: Notes,
    *,
    rows: int,
    seq: int,
    layers: int,
    width: int,
    heads: int,
    size: int,
    rope: int,
    low: int,
    hidden: int,
    vocab: int,
) -> Program:
    """Queries, keys and values come from a narrow latent; a part of the key that is rotated is shared by all heads."""
    layer = {
        "norm1": (width,),
        "q_down": (width, 3 * low),
        "q_up": (3 * low, heads, size + rope),
        "kv_down": (width, low),
    }
    layer |= {"q_norm": (3 * low,), "kv_norm": (low,), "k_rope": (width, rope)}
    layer |= {"k_up": (low, heads, size), "v_up": (low, heads, size), "out": (heads, size, width)}
    layer |= {"norm2": (width,), "gate_up": (width, 2, hidden), "down": (hidden, width)}
    shapes = {"embed": (vocab, width), "layers": stacked(layer, layers), "norm": (width,), "head": (width, vocab)}

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer_of(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = notes.weights(cast(w))
        y = rms_norm(x, w["norm1"])
        q = jnp.einsum("btl,lhk->bthk", rms_norm(y @ w["q_down"], w["q_norm"]), w["q_up"])
        q = notes(jnp.concatenate([q[..., :size], rotated(q[..., size:])], axis=-1), "batch . heads .")
        inner = rms_norm(y @ w["kv_down"], w["kv_norm"])
        place = rotated((y @ w["k_rope"])[:, :, None])
        k = jnp.einsum("btl,lhk->bthk", inner, w["k_up"])
        k = jnp.concatenate([k, jnp.broadcast_to(place, (*k.shape[:3], rope))], axis=-1)
        k, v = notes(k, "batch . heads ."), notes(jnp.einsum("btl,lhk->bthk", inner, w["v_up"]), "batch . heads .")
        scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32) * (size + rope) ** -0.5
        shares = jax.nn.softmax(jnp.where(jnp.tri(seq, dtype=bool), scores, -1e30), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhts,bshk->bthk", shares, v)
        x = notes(x + jnp.einsum("bthk,hkd->btd", mixed, w["out"]), "batch stream .")
        gate, up = jnp.moveaxis(jnp.einsum("btd,dxf->btxf", rms_norm(x, w["norm2"]), w["gate_up"]), 2, 0)
        y = notes(jax.nn.silu(gate) * up, "batch . hidden")
        return notes(x + y @ w["down"], "batch stream ."), None

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        ends = notes.weights(cast({name: params[name] for name in ("embed", "head", "norm")}))
        x, _ = lax.scan(layer_of, notes(ends["embed"][inputs], "batch stream ."), params["layers"])
        return cross_entropy(notes(rms_norm(x, ends["norm"]) @ ends["head"], "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


_8B = {"seq": 2048, "layers": 32, "width": 4096, "heads": 16, "size": 256, "vocab": 128000}
_LATENT_7B = {"seq": 2048, "layers": 28, "width": 4096, "heads": 32, "size": 128, "rope": 64, "low": 512}
_LATENT_7B |= {"hidden": 11008, "vocab": 64000}
_WAYS = frozenset({"tensor", "sequence"})

FORMULATIONS = (
    Formulation(
        name="palm-8b-parallel",
        style="dense transformer: parallel blocks, one key head for all, kept products, tied head",
        make=parallel,
        small=dict(rows=8, seq=16, layers=2, width=64, heads=4, size=16, vocab=128),
        targets={"v5p:4x4x4": _8B | {"rows": 128}, "v6e:8x8": _8B | {"rows": 64}},
        dims=_PARALLEL,
        ways=_WAYS,
        held_out=True,
    ),
    Formulation(
        name="latent-7b",
        style="dense transformer: attention through a narrow latent, a shared rotated part of keys",
        make=latent,
        small=dict(rows=8, seq=16, layers=2, width=64, heads=4, size=16, rope=8, low=16, hidden=128, vocab=128),
        targets={"v5p:4x4x4": _LATENT_7B | {"rows": 128}, "v6e:8x8": _LATENT_7B | {"rows": 64}},
        dims=_LATENT,
        ways=_WAYS,
        held_out=True,
    ),
)
