"""Experts by sorting: grouped products over sorted tokens, and experts that choose their tokens."""

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
    r"w_in": "experts width hidden",
    r"w_out": "experts hidden width",
    r"embed": "vocab width",
}


def _shapes(layers: int, width: int, heads: int, hidden: int, experts: int, vocab: int, loop: bool) -> Any:
    layer = {"norm1": (width,), "qkv": (width, 3, heads, width // heads), "out": (heads, width // heads, width)}
    layer |= {"norm2": (width,), "router": (width, experts)}
    layer |= {"w_in": (experts, width, hidden), "w_out": (experts, hidden, width)}
    return {"embed": (vocab, width), "layers": [layer] * layers if loop else stacked(layer, layers), "norm": (width,)}


def _attention(notes: Notes, x: jax.Array, w: Any) -> jax.Array:
    qkv = notes(jnp.einsum("btd,dnhk->btnhk", rms_norm(x, w["norm1"]), w["qkv"]), "batch . . heads .")
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return notes(x + jnp.einsum("bthk,hkd->btd", mixed, w["out"]), "batch stream .")


def grouped_product(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, hidden: int, experts: int, vocab: int
) -> Program:
    """Tokens of all rows are sorted by their expert, one each, for `lax.ragged_dot`. Nothing is dropped."""
    shapes = _shapes(layers, width, heads, hidden, experts, vocab, loop=True)

    @jax.checkpoint
    def block(x: jax.Array, w: Any) -> jax.Array:
        router, w = w["router"], notes.weights(cast(w))
        x = _attention(notes, x, w)
        y = rms_norm(x, w["norm2"]).reshape(-1, width)
        gates = jax.nn.softmax(y.astype(jnp.float32) @ router, axis=-1)
        expert = jnp.argmax(gates, axis=-1)
        gate = jnp.take_along_axis(gates, expert[:, None], axis=-1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=experts)
        inner = jax.nn.gelu(lax.ragged_dot(y[order], w["w_in"], sizes))
        made = lax.ragged_dot(inner, w["w_out"], sizes)
        made = jnp.zeros_like(made).at[order].set(made) * gate.astype(made.dtype)
        return notes(x + made.reshape(x.shape), "batch stream .")

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        table = notes.weights(cast({"embed": params["embed"]}))["embed"]
        x = notes(table[inputs], "batch stream .")
        for w in params["layers"]:
            x = block(x, w)
        return cross_entropy(notes(rms_norm(x, params["norm"]) @ table.T, "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


def expert_choice(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, hidden: int, experts: int, vocab: int
) -> Program:
    """Each expert takes the tokens of a row with the largest scores, twice `seq / experts` of them. Scanned layers."""
    shapes = _shapes(layers, width, heads, hidden, experts, vocab, loop=False)
    taken = 2 * seq // experts

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer_of(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        router, w = w["router"], notes.weights(cast(w))
        x = _attention(notes, x, w)
        y = rms_norm(x, w["norm2"])
        scores = jax.nn.softmax(jnp.einsum("btd,de->bte", y.astype(jnp.float32), router), axis=-1)
        gates, which = lax.top_k(scores.swapaxes(1, 2), taken)  # [batch, experts, taken]
        rows_of = notes(jax.vmap(lambda y, which: y[which])(y, which), "groups experts . .")
        inner = notes(jax.nn.gelu(jnp.einsum("becd,edf->becf", rows_of, w["w_in"])), "groups experts . hidden")
        made = notes(jnp.einsum("becf,efd->becd", inner, w["w_out"]), "groups experts . .")
        made = made * gates[..., None].astype(made.dtype)
        back = jax.vmap(lambda made, which: jnp.zeros((seq, width), made.dtype).at[which].add(made))(made, which)
        return notes(x + back, "batch stream ."), None

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        table = notes.weights(cast({"embed": params["embed"]}))["embed"]
        x, _ = lax.scan(layer_of, notes(table[inputs], "batch stream ."), params["layers"])
        return cross_entropy(notes(rms_norm(x, params["norm"]) @ table.T, "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


_SIZES = {"seq": 1024, "layers": 12, "width": 2048, "heads": 16, "hidden": 8192, "experts": 16, "vocab": 32000}
_WAYS = frozenset({"tensor", "sequence", "experts"})

FORMULATIONS = (
    Formulation(
        name="moe-16-ragged",
        style="experts: tokens sorted by expert for ragged products, one expert each, layers in a loop",
        make=grouped_product,
        small=dict(rows=8, seq=16, layers=2, width=64, heads=4, hidden=128, experts=4, vocab=128),
        targets={"v5p:4x4x4": _SIZES | {"rows": 512}, "v6e:4x4": _SIZES | {"rows": 128}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence"}),
        held_out=True,
    ),
    Formulation(
        name="moe-16-choice",
        style="experts: experts choose their tokens by top_k within a row, gathers and scatters, scanned layers",
        make=expert_choice,
        small=dict(rows=8, seq=16, layers=2, width=64, heads=4, hidden=128, experts=4, vocab=128),
        targets={"v5p:4x4x4": _SIZES | {"rows": 512}, "v6e:4x4": _SIZES | {"rows": 128}},
        dims=_DIMS,
        ways=_WAYS,
        held_out=True,
    ),
)
