"""GPT trained with Muon: each weight matrix's momentum is made orthogonal as a whole before it is applied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import cast, cross_entropy, initialized, layer_norm, tokens

_DIMS = {
    r"attention_(q|k|v)": "width heads",
    r"attention_out": "heads width",
    r"mlp_in": "width hidden",
    r"mlp_out": "hidden width",
    r"embed": "vocab width",
}


def _orthogonal(update: jax.Array) -> jax.Array:
    """Five steps of Newton and Schulz, in bfloat16, of a matrix that is at least as wide as high.

    Source of the coefficients: Keller Jordan's Muon.
    """
    tall = update.shape[0] > update.shape[1]
    x = cast(update.T if tall else update)
    x = x / (jnp.linalg.norm(x.astype(jnp.float32)).astype(x.dtype) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if tall else x).astype(jnp.float32)


def muon(notes: Notes, *, rows: int, seq: int, layers: int, width: int, heads: int, vocab: int) -> Program:
    """Matrices of layers are updated by Muon, embeddings and norms by Adam. Layers in a loop, written by hand."""
    layer = {f"attention_{name}": (width, width) for name in ("q", "k", "v", "out")}
    layer |= {"mlp_in": (width, 4 * width), "mlp_out": (4 * width, width)}
    layers_shapes: list[Any] = [layer | {"norm1": (width,), "norm2": (width,)}] * layers
    shapes = {"embed": (vocab, width), "layers": layers_shapes, "norm": (width,)}
    adam = optax.adam(3e-4)

    @jax.checkpoint
    def block(x: jax.Array, w: Any) -> jax.Array:
        w = notes.weights(cast(w))
        y = layer_norm(x, w["norm1"])
        q, k, v = (
            notes((y @ w[f"attention_{name}"]).reshape(*x.shape[:2], heads, -1), "batch . heads .") for name in "qkv"
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = notes(x + y @ w["attention_out"], "batch stream .")
        y = notes(jnp.square(jax.nn.relu(layer_norm(x, w["norm2"]) @ w["mlp_in"])), "batch . hidden")
        return notes(x + y @ w["mlp_out"], "batch stream .")

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        table = notes.weights(cast({"embed": params["embed"]}))["embed"]
        x = notes(table[inputs], "batch stream .")
        for w in params["layers"]:
            x = block(x, w)
        return cross_entropy(notes(layer_norm(x, params["norm"]) @ table.T, "batch . vocab"), targets)

    def is_block(path: Any, leaf: jax.Array) -> bool:
        return leaf.ndim == 2 and "layers" in jax.tree_util.keystr(path)

    def split(tree: Any) -> tuple[Any, Any]:
        """Return two trees: the matrices that Muon updates, and the other leaves. None stands for missing leaves."""
        mask = jax.tree_util.tree_map_with_path(is_block, tree)
        blocks = jax.tree.map(lambda x, block: x if block else None, tree, mask)
        return blocks, jax.tree.map(lambda x, block: None if block else x, tree, mask)

    def state(key: jax.Array) -> Any:
        params = initialized(key, shapes)
        blocks, others = split(params)
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, blocks), "moments": adam.init(others)}

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["params"], inputs, targets)
        blocks, others = split(gradients)
        momentum = jax.tree.map(lambda m, g: 0.95 * m + g, state["momentum"], blocks)
        turned = jax.tree.map(lambda m, g: -0.02 * _orthogonal(0.95 * m + g), momentum, blocks)
        updates, moments = adam.update(others, state["moments"])
        joined = jax.tree.map(lambda a, b: b if a is None else a, turned, updates, is_leaf=lambda x: x is None)
        params = jax.tree.map(jnp.add, state["params"], joined)
        return {"params": params, "momentum": momentum, "moments": moments}, value

    return Program(step, state, tokens(rows, seq, vocab))


_1B = {"seq": 1024, "layers": 24, "width": 2048, "heads": 16, "vocab": 50304}

FORMULATIONS = (
    Formulation(
        name="gpt-1.3b-muon",
        style="block optimizer: Newton-Schulz over whole matrices (Muon), Adam for the rest, layers in a loop",
        make=muon,
        small=dict(rows=8, seq=16, layers=2, width=64, heads=4, vocab=128),
        targets={"v5e:4x4": _1B | {"rows": 256}, "v6e:4x4": _1B | {"rows": 512}},
        dims=_DIMS,
        ways=frozenset({"tensor", "sequence"}),
        held_out=True,
    ),
)
