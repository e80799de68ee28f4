"""Linear attention with a decay, computed in chunks: within a chunk as products, between chunks by a state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, cross_entropy, rms_norm, tokens

_DIMS = {
    r"(q|k|v|gate)_proj": "width heads .",
    r"o_proj": "heads . width",
    r"mlp_in": "width hidden",
    r"mlp_out": "hidden width",
    r"embed": "vocab width",
}


def retention(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, chunk: int, vocab: int
) -> Program:
    """Each head forgets at a rate of its own. Layers in a loop, each with a scan over chunks."""
    size, count = width // heads, seq // chunk
    layer = {f"{name}_proj": (width, heads, size) for name in ("q", "k", "v", "gate")}
    layer |= {"o_proj": (heads, size, width), "norm1": (width,), "norm2": (width,), "group": (heads, size)}
    layer |= {"mlp_in": (width, 4 * width), "mlp_out": (4 * width, width)}
    layers_shapes: list[Any] = [layer] * layers
    shapes = {"embed": (vocab, width), "layers": layers_shapes, "norm": (width,)}

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        decay = jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(heads) * 3.0 / heads)))  # per step and head
        place = jnp.arange(chunk)
        behind = place[:, None] - place[None]
        inside = jnp.where(behind >= 0, jnp.exp(behind * decay[:, None, None]), 0.0)
        reads, writes = (jnp.exp(steps * decay[:, None])[..., None] for steps in (place + 1, chunk - 1 - place))

        def body(state: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            q, k, v = part  # [batch, heads, chunk, size]
            near = (q @ k.swapaxes(-1, -2)) * inside.astype(q.dtype) @ v
            far = (q * reads.astype(q.dtype)) @ state.astype(q.dtype)
            added = jnp.einsum("bhck,bhcv->bhkv", k * writes.astype(k.dtype), v).astype(jnp.float32)
            return state * jnp.exp(chunk * decay)[:, None, None] + added, near + far

        parts: Any = [x.reshape(rows, count, chunk, heads, size).transpose(1, 0, 3, 2, 4) for x in (q, k, v)]
        _, made = lax.scan(body, jnp.zeros((rows, heads, size, size), jnp.float32), tuple(parts))
        return made.transpose(1, 0, 3, 2, 4).reshape(rows, seq, heads, size)

    @jax.checkpoint
    def block(x: jax.Array, w: Any) -> jax.Array:
        w = notes.weights(cast(w))
        y = rms_norm(x, w["norm1"])
        q, k, v, gate = (
            notes(jnp.einsum("btd,dhk->bthk", y, w[f"{name}_proj"]), "batch . heads .")
            for name in ("q", "k", "v", "gate")
        )
        y = rms_norm(mixed(q, k * size**-0.5, v), w["group"]) * jax.nn.silu(gate)
        x = notes(x + jnp.einsum("bthk,hkd->btd", y, w["o_proj"]), "batch stream .")
        inner = notes(jax.nn.gelu(rms_norm(x, w["norm2"]) @ w["mlp_in"]), "batch . hidden")
        return notes(x + inner @ w["mlp_out"], "batch stream .")

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        table = notes.weights(cast({"embed": params["embed"]}))["embed"]
        x = notes(table[inputs], "batch stream .")
        for w in params["layers"]:
            x = block(x, w)
        return cross_entropy(notes(rms_norm(x, params["norm"]) @ table.T, "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


_SIZES = {"seq": 4096, "layers": 24, "width": 2048, "heads": 8, "chunk": 256, "vocab": 50304}

FORMULATIONS = (
    Formulation(
        name="retention-1.5b",
        style="linear attention: chunks with decay, a scan over chunks in each layer, layers in a loop",
        make=retention,
        small=dict(rows=8, seq=32, layers=2, width=64, heads=4, chunk=8, vocab=128),
        targets={"v5e:4x4": _SIZES | {"rows": 64}, "v6e:4x4": _SIZES | {"rows": 128}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence"}),
        held_out=True,
    ),
)
