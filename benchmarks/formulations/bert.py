"""BERT in Flax Linen: an encoder that predicts masked tokens, with biases everywhere and norms behind each block."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import cast

_DIMS = {
    r"(query|key|value)/kernel": "width heads .",
    r"(query|key|value)/bias": "heads .",
    r"attention/out/kernel": "heads . width",
    r"intermediate/kernel": "width hidden",
    r"intermediate/bias": "hidden",
    r"output/kernel": "hidden width",
    r"word/embedding": "vocab width",
    r"(place|kind)/embedding": ". width",
}


class _Layer(nn.Module):
    notes: Notes
    width: int
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        attended = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, name="attention")(x, mask=mask)
        x = self.notes(nn.LayerNorm(dtype=self.dtype)(x + attended), "batch stream .")
        y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype, name="intermediate")(x))
        y = nn.Dense(self.width, dtype=self.dtype, name="output")(self.notes(y, "batch . hidden"))
        return self.notes(nn.LayerNorm(dtype=self.dtype)(x + y), "batch stream .")


class _Bert(nn.Module):
    notes: Notes
    layers: int
    width: int
    heads: int
    vocab: int
    seq: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array, kinds: jax.Array, padding: jax.Array) -> jax.Array:
        word = nn.Embed(self.vocab, self.width, dtype=self.dtype, name="word")
        x = word(tokens) + nn.Embed(2, self.width, dtype=self.dtype, name="kind")(kinds)
        x = x + nn.Embed(self.seq, self.width, dtype=self.dtype, name="place")(jnp.arange(self.seq)[None])
        x = self.notes(nn.LayerNorm(dtype=self.dtype)(x), "batch stream .")
        mask = nn.make_attention_mask(padding > 0, padding > 0)
        for number in range(self.layers):
            x = nn.remat(_Layer)(self.notes, self.width, self.heads, self.dtype, name=f"layer{number}")(x, mask)
        x = nn.LayerNorm(dtype=self.dtype)(nn.gelu(nn.Dense(self.width, dtype=self.dtype, name="transform")(x)))
        return word.attend(x) + self.param("vocab_bias", nn.initializers.zeros, (self.vocab,))


def masked_tokens(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, vocab: int, wanted: int
) -> Program:
    """Predict `wanted` masked tokens of each row. Rows end in padding. The step is optax's Adam with a clipped norm."""
    dtype = cast(jnp.float32(0)).dtype
    model = _Bert(notes, layers, width, heads, vocab, seq, dtype)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 4)
        drawn = jax.random.randint(keys[0], (rows, seq), 0, vocab)
        length = jax.random.randint(keys[1], (rows, 1), seq // 2, seq + 1)
        places = jax.random.randint(keys[2], (rows, wanted), 0, seq // 2)
        labels = jax.random.randint(keys[3], (rows, wanted), 0, vocab)
        return (
            drawn,
            (jnp.arange(seq)[None] > seq // 3).astype(jnp.int32) + 0 * drawn,
            (jnp.arange(seq)[None] < length).astype(jnp.int32),
            places,
            labels,
        )

    def state(key: jax.Array) -> Any:
        params = model.init(key, *batch(key)[:3])["params"]
        return {"params": params, "moments": optimizer.init(params)}

    def step(state: Any, tokens: Any, kinds: Any, padding: Any, places: Any, labels: Any) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits: Any = model.apply({"params": notes.weights(params)}, tokens, kinds, padding)
            asked = jnp.take_along_axis(logits, places[..., None], axis=1).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(asked, labels).mean()

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value

    return Program(step, state, batch)


_LARGE = {"seq": 512, "layers": 24, "width": 1024, "heads": 16, "vocab": 30528, "wanted": 76}

FORMULATIONS = (
    Formulation(
        name="bert-large-linen",
        style="encoder in Flax Linen: masked tokens, padding, norms behind the blocks, clipped gradients",
        make=masked_tokens,
        small=dict(rows=8, seq=32, layers=2, width=64, heads=4, vocab=128, wanted=4),
        targets={"v5e:4x4": _LARGE | {"rows": 512}, "v6e:4x4": _LARGE | {"rows": 1024}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence"}),
        held_out=True,
    ),
)
