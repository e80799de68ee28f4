"""Models with a state along the sequence: a selective state-space model and an LSTM."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, cross_entropy, rms_norm, stacked, tokens

_DIMS = {
    r"in_proj": "width . hidden",
    r"conv": ". hidden",
    r"select": "hidden .",
    r"step_proj": ". hidden",
    r"step_bias|skip": "hidden",
    r"decay": "hidden .",
    r"out_proj": "hidden width",
    r"embed": "vocab width",
    r"head": "width vocab",
    r"kernel": "width . hidden",
    r"recurrent": "width . hidden",
}


def selective(
    notes: Notes, *, rows: int, seq: int, layers: int, width: int, states: int, rank: int, vocab: int
) -> Program:
    """Selective state spaces: a diagonal recurrence whose step depends on the input, by an associative scan.

    The sequence is cut into chunks of 64, so that states are kept for one chunk at a time.
    """
    inner, chunk = 2 * width, 64 if seq % 64 == 0 else seq
    layer = {"norm": (width,), "in_proj": (width, 2, inner), "conv": (4, inner), "select": (inner, rank + 2 * states)}
    layer |= {"step_proj": (rank, inner), "step_bias": (inner,), "decay": (inner, states), "skip": (inner,)}
    layer |= {"out_proj": (inner, width)}
    shapes = {"embed": (vocab, width), "layers": stacked(layer, layers), "norm": (width,)}

    def joined(one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return one[0] * two[0], two[0] * one[1] + two[1]

    def recurrence(x: jax.Array, step: jax.Array, b: jax.Array, c: jax.Array, decay: jax.Array) -> jax.Array:
        def body(state: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
            x, step, b, c = part  # [batch, chunk, ...]
            factor = jnp.exp(step[..., None] * decay)
            added = (step * x)[..., None] * b[:, :, None, :]
            factors, sums = lax.associative_scan(joined, (factor, added), axis=1)
            states = sums + factors * state[:, None]
            return states[:, -1], jnp.einsum("blis,bls->bli", states, c)

        parts = [a.reshape(rows, seq // chunk, chunk, -1).swapaxes(0, 1) for a in (x, step, b, c)]
        start = jnp.zeros((rows, *decay.shape), jnp.float32)
        _, made = lax.scan(jax.checkpoint(body), start, tuple(parts))
        return made.swapaxes(0, 1).reshape(x.shape)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer_of(stream: jax.Array, w: Any) -> tuple[jax.Array, None]:
        decay, w = -jnp.exp(w["decay"]), notes.weights(cast(w))
        x, gate = jnp.moveaxis(jnp.einsum("ble,exi->blxi", rms_norm(stream, w["norm"]), w["in_proj"]), 2, 0)
        x, gate = notes(x, "batch . hidden"), notes(gate, "batch . hidden")
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        x = jax.nn.silu(sum(padded[:, shift : shift + seq] * w["conv"][shift] for shift in range(4)))
        low, b, c = jnp.split((x @ w["select"]).astype(jnp.float32), (rank, rank + states), axis=-1)
        step = jax.nn.softplus(low @ w["step_proj"].astype(jnp.float32) + w["step_bias"].astype(jnp.float32))
        y = recurrence(x.astype(jnp.float32), notes(step, "batch . hidden"), b, c, decay)
        y = (cast(y) + x * w["skip"]) * jax.nn.silu(gate)
        return notes(stream + y @ w["out_proj"], "batch stream ."), None

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        table = notes.weights(cast({"embed": params["embed"]}))["embed"]
        x, _ = lax.scan(layer_of, notes(table[inputs], "batch stream ."), params["layers"])
        return cross_entropy(notes(rms_norm(x, params["norm"]) @ table.T, "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


def lstm(notes: Notes, *, rows: int, seq: int, layers: int, width: int, vocab: int) -> Program:
    """Layers of LSTMs, each a scan over time. All four gates are one product."""
    layer = {"kernel": (width, 4, width), "recurrent": (width, 4, width), "bias": (4, width)}
    shapes = {"embed": (vocab, width), "layers": [layer] * layers, "head": (width, vocab)}

    def layer_of(x: jax.Array, w: Any) -> jax.Array:
        w = notes.weights(cast(w))
        inputs = jnp.einsum("btd,dgk->tbgk", x, w["kernel"]) + w["bias"]

        def cell(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            hidden, memory = carry
            gates = notes(now + jnp.einsum("bd,dgk->bgk", hidden, w["recurrent"]), "batch . hidden")
            keep, write, show, value = jnp.moveaxis(gates, 1, 0)
            memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(write) * jnp.tanh(value)
            hidden = jax.nn.sigmoid(show) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros((rows, width), x.dtype)
        _, made = lax.scan(cell, (zeros, zeros), inputs)
        return notes(made.swapaxes(0, 1), "batch . .")

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        ends = notes.weights(cast({"embed": params["embed"], "head": params["head"]}))
        x = notes(ends["embed"][inputs], "batch . .")
        for w in params["layers"]:
            x = x + layer_of(x, w)
        return cross_entropy(notes(x @ ends["head"], "batch . vocab"), targets)

    return adamw_program(loss, shapes, tokens(rows, seq, vocab))


_SELECTIVE = {"seq": 2048, "layers": 48, "width": 2048, "states": 16, "rank": 128, "vocab": 50304}
_LSTM = {"seq": 128, "layers": 8, "width": 2048, "vocab": 32000}

FORMULATIONS = (
    Formulation(
        name="mamba-1.4b-chunks",
        style="state-space model: input-dependent diagonal recurrence, associative scans in chunks, scanned layers",
        make=selective,
        small=dict(rows=8, seq=128, layers=2, width=32, states=4, rank=4, vocab=128),
        targets={"v5e:4x4": _SELECTIVE | {"rows": 64}, "v6e:4x4": _SELECTIVE | {"rows": 128}},
        dims={name: dims for name, dims in _DIMS.items() if name not in ("kernel", "recurrent", "head")},
        ways=frozenset({"tensor", "sequence"}),
    ),
    Formulation(
        name="lstm-300m",
        style="recurrent network: a scan over time in each layer, four gates in one product",
        make=lstm,
        small=dict(rows=16, seq=16, layers=2, width=64, vocab=128),
        targets={"v5e:4x4": _LSTM | {"rows": 2048}, "v6e:4x4": _LSTM | {"rows": 4096}},
        dims={name: _DIMS[name] for name in ("kernel", "recurrent", "embed", "head")},
        ways=frozenset({"tensor"}),
    ),
)
