"""Mixtures of experts as one-hot einsums with a capacity, as in GShard: tokens in groups, and flat tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, cross_entropy, rms_norm, stacked, tokens

_DIMS = {
    r"qkv": "width . heads .",
    r"out": "heads . width",
    r"router": "width .",
    r"experts_in": "experts width hidden",
    r"experts_out": "experts hidden width",
    r"embed": "vocab width",
}


def _self_attention(notes: Notes, x: jax.Array, w: Any) -> jax.Array:
    q, k, v = jnp.moveaxis(notes(jnp.einsum("btd,dnhk->btnhk", x, w["qkv"]), "batch . . heads ."), 2, 0)
    return jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), w["out"])


def _slots(gates: jax.Array, top: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Return the dispatch mask and the combine weights `[..., tokens, experts, capacity]` of `[..., tokens, experts]`.

    Later choices take the places that earlier ones leave. A token for which an expert has no place is dropped.
    """
    experts, taken = gates.shape[-1], jnp.zeros(gates.shape[:-2] + gates.shape[-1:])
    left, combine = gates, jnp.zeros((*gates.shape, capacity))
    for _ in range(top):
        choice = jax.nn.one_hot(jnp.argmax(left, -1), experts)
        place = jnp.cumsum(choice, axis=-2) - 1 + taken[..., None, :]
        kept = choice * (place < capacity)
        where = jax.nn.one_hot((place * kept).sum(-1).astype(jnp.int32), capacity)
        combine = combine + (gates * kept)[..., None] * where[..., None, :]
        taken, left = taken + kept.sum(-2), left * (1 - choice)
    return cast((combine > 0).astype(jnp.float32)), cast(combine)


def grouped(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, hidden: int, experts: int, vocab: int
) -> Program:
    """Every row of the batch is a group with places of its own. Two experts for each token, a balancing loss."""
    capacity = 2 * 5 * seq // (4 * experts)  # chosen: a quarter more places than tokens
    layer = {"norm1": (width,), "qkv": (width, 3, heads, width // heads), "out": (heads, width // heads, width)}
    layer |= {"norm2": (width,), "router": (width, experts), "experts_in": (experts, width, hidden)}
    layer |= {"experts_out": (experts, hidden, width)}
    shapes = {"embed": (vocab, width), "layers": stacked(layer, layers), "norm": (width,)}

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer_of(carry: tuple[jax.Array, jax.Array], w: Any) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, balance = carry
        router, w = w["router"], notes.weights(cast(w))
        x = notes(x + _self_attention(notes, rms_norm(x, w["norm1"]), w), "batch stream .")
        y = rms_norm(x, w["norm2"])
        gates = jax.nn.softmax(jnp.einsum("gsd,de->gse", y.astype(jnp.float32), router), axis=-1)
        dispatch, combine = _slots(gates, 2, capacity)
        sent = notes(jnp.einsum("gsec,gsd->egcd", dispatch, y), "experts groups . .")
        inner = notes(jax.nn.gelu(jnp.einsum("egcd,edf->egcf", sent, w["experts_in"])), "experts groups . hidden")
        done = notes(jnp.einsum("egcf,efd->egcd", inner, w["experts_out"]), "experts groups . .")
        y = jnp.einsum("gsec,egcd->gsd", combine, done)
        share = dispatch.astype(jnp.float32).sum(-1).mean(1)
        balance = balance + experts * (share * gates.mean(1)).sum(-1).mean()
        return (notes(x + y, "batch stream ."), balance), None

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        embed = notes.weights(cast({"embed": params["embed"]}))["embed"]
        start = notes(embed[inputs], "batch stream ."), jnp.float32(0)
        (x, balance), _ = lax.scan(layer_of, start, params["layers"])
        logits = notes(rms_norm(x, params["norm"]) @ embed.T, "batch . vocab")
        return cross_entropy(logits, targets) + 0.01 * balance / layers

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


def flat(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, hidden: int, experts: int, vocab: int
) -> Program:
    """All tokens of the batch are one list `[tokens, width]`, and share the places of an expert. Layers in a loop."""
    count = rows * seq
    capacity = 2 * 5 * count // (4 * experts)
    layer = {"norm1": (width,), "qkv": (width, 3, heads, width // heads), "out": (heads, width // heads, width)}
    layer |= {"norm2": (width,), "router": (width, experts), "experts_in": (experts, width, hidden)}
    layer |= {"experts_out": (experts, hidden, width)}
    shapes = {"embed": (vocab, width), "layers": [layer] * layers, "norm": (width,)}

    def routed(x: jax.Array, w: Any, router: jax.Array) -> jax.Array:
        logits = x.astype(jnp.float32) @ router
        values, chosen = lax.top_k(jax.nn.softmax(logits, -1), 2)
        values = values / values.sum(-1, keepdims=True)
        mask = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)  # [tokens, 2, experts]
        place = (jnp.cumsum(mask.reshape(-1, experts), axis=0) - 1).reshape(mask.shape)
        place = jnp.where(mask > 0, place, capacity)
        slots = jax.nn.one_hot(place, capacity, dtype=x.dtype)  # [tokens, 2, experts, capacity]
        dispatch, combine = slots.sum(1), jnp.einsum("tk,tkec->tec", values.astype(x.dtype), slots)
        sent = notes(jnp.einsum("tec,td->ecd", dispatch, x), "experts groups .")
        inner = notes(jax.nn.relu(jnp.einsum("ecd,edf->ecf", sent, w["experts_in"])), "experts groups hidden")
        done = notes(jnp.einsum("ecf,efd->ecd", inner, w["experts_out"]), "experts groups .")
        return jnp.einsum("tec,ecd->td", combine, done)

    @jax.checkpoint
    def block(x: jax.Array, w: Any) -> jax.Array:
        router, w = w["router"], notes.weights(cast(w))
        x = notes(x + _self_attention(notes, rms_norm(x, w["norm1"]), w), "batch stream .")
        y = routed(rms_norm(x, w["norm2"]).reshape(count, width), w, router).reshape(x.shape)
        return notes(x + y, "batch stream .")

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        embed = notes.weights(cast({"embed": params["embed"]}))["embed"]
        x = notes(embed[inputs], "batch stream .")
        for w in params["layers"]:
            x = block(x, w)
        return cross_entropy(notes(rms_norm(x, params["norm"]) @ embed.T, "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


_EIGHT = {"layers": 16, "width": 4096, "heads": 32, "hidden": 14336, "experts": 8, "vocab": 32000, "seq": 2048}
_SMALL = {"layers": 12, "width": 1024, "heads": 16, "hidden": 4096, "experts": 16, "vocab": 32000, "seq": 256}
_WAYS = frozenset({"tensor", "sequence", "experts"})

FORMULATIONS = (
    Formulation(
        name="moe-8-one-hot",
        style="experts: one-hot dispatch and combine in groups, a capacity, two experts for each token, scanned",
        make=grouped,
        small=dict(rows=16, seq=32, layers=2, width=64, heads=4, hidden=128, experts=4, vocab=256),
        targets={"v5p:4x4x4": _EIGHT | {"rows": 128}, "v6e:8x8": _EIGHT | {"rows": 128}},
        dims=_DIMS,
        ways=_WAYS,
    ),
    Formulation(
        name="moe-16-flat",
        style="experts: one-hot dispatch over flat tokens, top_k, places by cumsum, layers in a loop",
        make=flat,
        small=dict(rows=8, seq=16, layers=2, width=64, heads=4, hidden=128, experts=4, vocab=128),
        targets={"v5e:4x4": _SMALL | {"rows": 64}, "v6e:4x4": _SMALL | {"rows": 64}},
        dims=_DIMS,
        ways=_WAYS,
    ),
)
