"""Low-rank adapters over a frozen base, and accumulation of gradients by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.llama import rotated
from formulations.parts import cast, cross_entropy, initialized, rms_norm, stacked, tokens

_DIMS = {
    r"(query|key|value)": "width heads",
    r"out": "heads width",
    r"(gate|up)": "width hidden",
    r"down": "hidden width",
    r"embed": "vocab width",
    r"head": "width vocab",
}
_ADAPTED = ("query", "value")


def _layer(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {name: (width, width) for name in ("query", "key", "value", "out")}
    layer |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return layer | {"norm1": (width,), "norm2": (width,)}


def _block(notes: Notes, x: jax.Array, w: Any, adapters: Any, heads: int) -> jax.Array:
    w = notes.weights(w)

    def product(x: jax.Array, name: str) -> jax.Array:
        y = x @ w[name]
        if adapters is not None and name in _ADAPTED:
            y = y + 2.0 * (x @ adapters[f"{name}_a"]) @ adapters[f"{name}_b"]
        return notes(y.reshape(*x.shape[:2], heads, -1), "batch . heads .")

    y = rms_norm(x, w["norm1"])
    q, k, v = rotated(product(y, "query")), rotated(product(y, "key")), product(y, "value")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = notes(x + y @ w["out"], "batch stream .")
    y = rms_norm(x, w["norm2"])
    y = notes(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), "batch . hidden")
    return notes(x + y @ w["down"], "batch stream .")


def low_rank(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, hidden: int, rank: int, vocab: int
) -> Program:
    """A frozen base in bfloat16 and float32 adapters of queries and values. Only they have gradients and moments."""
    optimizer = optax.adam(1e-4)
    base_shapes = {"embed": (vocab, width), "layers": stacked(_layer(width, hidden), layers)}
    base_shapes |= {"norm": (width,), "head": (width, vocab)}
    low = {
        f"{name}_{end}": (layers, *((width, rank) if end == "a" else (rank, width)))
        for name in _ADAPTED
        for end in "ab"
    }

    def state(key: jax.Array) -> Any:
        one, two = jax.random.split(key)
        params = initialized(one, low)
        return {"frozen": cast(initialized(two, base_shapes)), "params": params, "moments": optimizer.init(params)}

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        base = state["frozen"]

        def loss(params: Any) -> jax.Array:
            @jax.checkpoint
            def layer_of(x: jax.Array, both: Any) -> tuple[jax.Array, None]:
                w, adapters = both
                return _block(notes, x, w, cast(adapters), heads), None

            ends = notes.weights({name: base[name] for name in ("embed", "head")})
            x, _ = lax.scan(layer_of, notes(ends["embed"][inputs], "batch stream ."), (base["layers"], params))
            return cross_entropy(notes(rms_norm(x, base["norm"]) @ ends["head"], "batch . vocab"), targets)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"])
        return {"frozen": base, "params": optax.apply_updates(state["params"], updates), "moments": moments}, value

    return Program(step, state, tokens(rows, seq, vocab))


def accumulated(
    notes: Notes, *, rows: int, parts: int, seq: int, layers: int, width: int, heads: int, hidden: int, vocab: int
) -> Program:
    """A scan over `parts` of the batch adds their gradients for a clipped AdamW."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 1000)))
    shapes = {"embed": (vocab, width), "layers": stacked(_layer(width, hidden), layers)}
    shapes |= {"norm": (width,), "head": (width, vocab)}

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer_of(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return _block(notes, x, cast(w), None, heads), None

        ends = notes.weights(cast({name: params[name] for name in ("embed", "head")}))
        x, _ = lax.scan(layer_of, notes(ends["embed"][inputs], "batch stream ."), params["layers"])
        return cross_entropy(notes(rms_norm(x, params["norm"]) @ ends["head"], "batch . vocab"), targets)

    def state(key: jax.Array) -> Any:
        params = initialized(key, shapes)
        return {"params": params, "moments": optimizer.init(params)}

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        params = state["params"]

        def part(total: Any, one: Any) -> tuple[Any, None]:
            value, gradients = jax.value_and_grad(loss)(params, *one)
            return jax.tree.map(jnp.add, total, (value, gradients)), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        (value, gradients), _ = lax.scan(part, zeros, (inputs, targets))
        gradients = jax.tree.map(lambda g: g / parts, gradients)
        updates, moments = optimizer.update(gradients, state["moments"], params)
        return {"params": optax.apply_updates(params, updates), "moments": moments}, value / parts

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        made = tokens(parts * rows, seq, vocab)(key)
        return tuple(x.reshape(parts, rows, seq) for x in made)

    return Program(step, state, batch)


_8B = {"seq": 2048, "layers": 32, "width": 4096, "heads": 32, "hidden": 14336, "vocab": 32000}
_WAYS = frozenset({"tensor", "sequence"})

FORMULATIONS = (
    Formulation(
        name="lora-8b-frozen",
        style="adapters: low-rank float32 weights over a frozen bfloat16 base, scanned layers",
        make=low_rank,
        small=dict(rows=8, seq=16, layers=2, width=64, heads=4, hidden=128, rank=4, vocab=128),
        targets={"v5e:4x4": _8B | {"rank": 16, "rows": 32}, "v6e:4x4": _8B | {"rank": 16, "rows": 64}},
        dims=_DIMS,
        ways=_WAYS,
        held_out=True,
    ),
    Formulation(
        name="llama-8b-accumulated",
        style="accumulation by hand: a scan over parts of the batch adds gradients, clipped AdamW with a schedule",
        make=accumulated,
        small=dict(rows=8, parts=2, seq=16, layers=2, width=64, heads=4, hidden=128, vocab=128),
        targets={"v5p:4x4x4": _8B | {"rows": 64, "parts": 4}, "v6e:8x8": _8B | {"rows": 64, "parts": 4}},
        dims=_DIMS,
        ways=_WAYS,
    ),
)
