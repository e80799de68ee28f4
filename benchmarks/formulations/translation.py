"""T5: an encoder and a decoder with relative positions, trained to continue from a corrupted text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, cross_entropy, rms_norm

_DIMS = {
    r"(q|k|v)": "width heads .",
    r"o": "heads . width",
    r"w[01]": "width hidden",
    r"w2": "hidden width",
    r"shared": "vocab width",
    r"head": "width vocab",
    r"(encoder|decoder)_bias": ". heads",
}
_BUCKETS = 32


def _attention_shapes(width: int, heads: int, size: int) -> dict[str, Any]:
    return {"norm": (width,), **{n: (width, heads, size) for n in "qkv"}, "o": (heads, size, width)}


def encoder_decoder(
    notes: Notes, *, rows: int, source: int, seq: int, layers: int, width: int, heads: int, hidden: int, vocab: int
) -> Program:
    """Two stacks of layers, each a scan; the decoder's read the encoder's result. Adafactor, gated GELU."""
    size = width // heads
    mlp = {"norm": (width,), "w0": (width, hidden), "w1": (width, hidden), "w2": (hidden, width)}
    attention = _attention_shapes(width, heads, size)
    both = {"encoder": {"self": attention, "mlp": mlp}, "decoder": {"self": attention, "cross": attention, "mlp": mlp}}
    shapes = jax.tree.map(lambda shape: (layers, *shape), both, is_leaf=lambda x: isinstance(x, tuple))
    shapes |= {"shared": (vocab, width), "encoder_bias": (_BUCKETS, heads), "decoder_bias": (_BUCKETS, heads)}
    shapes |= {"encoder_norm": (width,), "decoder_norm": (width,), "head": (width, vocab)}

    def bias(table: jax.Array, length: int, causal: bool) -> jax.Array:
        """Return the scores' bias `[heads, length, length]` by the bucket of the distance."""
        behind = jnp.arange(length)[:, None] - jnp.arange(length)[None]
        near = jnp.clip(jnp.abs(behind), 0, _BUCKETS // 2 - 1)
        bucket = near + (_BUCKETS // 2) * (behind < 0)
        made = table[bucket].transpose(2, 0, 1).astype(jnp.float32)
        return jnp.where(behind >= 0, made, -1e9) if causal else made

    def attend(x: jax.Array, memory: jax.Array | None, w: Any, bias: jax.Array | None) -> jax.Array:
        y = rms_norm(x, w["norm"])
        read = y if memory is None else memory
        q = notes(jnp.einsum("bqd,dhk->bqhk", y, w["q"]), "batch . heads .")
        k, v = (notes(jnp.einsum("bkd,dhc->bkhc", read, w[name]), "batch . heads .") for name in "kv")
        scores = jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(jnp.float32)
        shares = jax.nn.softmax(scores if bias is None else scores + bias, axis=-1).astype(x.dtype)
        made = jnp.einsum("bhqk,bkhc->bqhc", shares, v)
        return notes(x + jnp.einsum("bqhc,hcd->bqd", made, w["o"]), "batch stream .")

    def feed_forward(x: jax.Array, w: Any) -> jax.Array:
        y = rms_norm(x, w["norm"])
        inner = notes(jax.nn.gelu(y @ w["w0"]) * (y @ w["w1"]), "batch . hidden")
        return notes(x + inner @ w["w2"], "batch stream .")

    def loss(params: Any, text: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        ends = notes.weights(cast({name: params[name] for name in ("shared", "head", "encoder_norm", "decoder_norm")}))
        seen, causal = bias(params["encoder_bias"], source, False), bias(params["decoder_bias"], seq, True)

        @jax.checkpoint
        def encoder_layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            w = notes.weights(cast(w))
            return feed_forward(attend(x, None, w["self"], seen), w["mlp"]), None

        memory, _ = lax.scan(encoder_layer, notes(ends["shared"][text], "batch stream ."), params["encoder"])
        memory = rms_norm(memory, ends["encoder_norm"])

        @jax.checkpoint
        def decoder_layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            w = notes.weights(cast(w))
            x = attend(x, None, w["self"], causal)
            return feed_forward(attend(x, memory, w["cross"], None), w["mlp"]), None

        x, _ = lax.scan(decoder_layer, notes(ends["shared"][inputs], "batch stream ."), params["decoder"])
        logits = notes(rms_norm(x, ends["decoder_norm"]) @ ends["head"], "batch . vocab")
        return cross_entropy(logits, targets)

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        one, two = jax.random.split(key)
        drawn = jax.random.randint(two, (rows, seq + 1), 0, vocab)
        return jax.random.randint(one, (rows, source), 0, vocab), drawn[:, :-1], drawn[:, 1:]

    return adamw_program(loss, shapes, batch, optax.adafactor(1e-3))


_3B = {"source": 512, "seq": 128, "layers": 24, "width": 2048, "heads": 32, "hidden": 5120, "vocab": 32128}

FORMULATIONS = (
    Formulation(
        name="t5-3b",
        style="encoder-decoder: two scans, cross attention, relative positions, Adafactor",
        make=encoder_decoder,
        small=dict(rows=8, source=16, seq=8, layers=2, width=64, heads=4, hidden=128, vocab=128),
        targets={"v5e:4x4": _3B | {"rows": 512}, "v6e:4x4": _3B | {"rows": 1024}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence"}),
        held_out=True,
    ),
)
