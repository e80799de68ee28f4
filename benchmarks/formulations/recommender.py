"""A recommender: large embedding tables, pairwise products of features, and two small networks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import cast, initialized

_DIMS = {r"tables": ". rows .", r"bottom/[01]": "width hidden", r"top/[01]": "width hidden"}


def interactions(notes: Notes, *, rows: int, tables: int, entries: int, size: int, dense: int, hidden: int) -> Program:
    """One lookup in each table, all pairs of products, and a click to predict.

    Tables are trained by Adagrad with one value for each entry, the networks by Adam.
    """
    count = tables + 1
    pairs = count * (count - 1) // 2
    shapes: dict[str, Any] = {"tables": (tables, entries, size)}
    shapes["bottom"] = [(dense, hidden), (hidden, hidden), (hidden, size)]
    shapes["top"] = [(pairs + size, hidden), (hidden, hidden), (hidden, 1)]
    adam = optax.adam(1e-3)

    def network(x: jax.Array, layers: Any) -> jax.Array:
        *inner, last = layers
        for w in inner:
            x = notes(jax.nn.relu(x @ w), "batch .")
        return x @ last

    def loss(params: Any, dense: jax.Array, entries: jax.Array, clicks: jax.Array) -> jax.Array:
        networks = notes.weights(cast({"bottom": params["bottom"], "top": params["top"]}))
        x = network(cast(dense), networks["bottom"])
        found = jax.vmap(lambda table, entry: table[entry], in_axes=(0, 1), out_axes=1)(params["tables"], entries)
        features = notes(jnp.concatenate([x[:, None], cast(found)], axis=1), "batch . .")
        products = jnp.einsum("bnd,bmd->bnm", features, features)
        below = jnp.tril_indices(count, -1)
        joined = jnp.concatenate([x, products[:, below[0], below[1]]], axis=1)
        logits = network(joined, networks["top"])[:, 0].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

    def state(key: jax.Array) -> Any:
        params = initialized(key, shapes)
        others = {name: params[name] for name in ("bottom", "top")}
        return {"params": params, "moments": adam.init(others), "sums": jnp.zeros((tables, entries))}

    def step(state: Any, dense: jax.Array, entries: jax.Array, clicks: jax.Array) -> tuple[Any, jax.Array]:
        params = state["params"]
        value, gradients = jax.value_and_grad(loss)(params, dense, entries, clicks)
        sums = state["sums"] + jnp.square(gradients["tables"]).mean(-1)
        changed = params["tables"] - 0.01 * gradients["tables"] / (jnp.sqrt(sums)[..., None] + 1e-8)
        others = {name: params[name] for name in ("bottom", "top")}
        updates, moments = adam.update({name: gradients[name] for name in others}, state["moments"])
        trained: Any = optax.apply_updates(others, updates)
        params = {"tables": changed, **trained}
        return {"params": params, "moments": moments, "sums": sums}, value

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        one, two, three = jax.random.split(key, 3)
        found = jax.random.randint(two, (rows, tables), 0, entries)
        clicks = jax.random.bernoulli(three, 0.3, (rows,)).astype(jnp.float32)
        return jax.random.normal(one, (rows, dense)), found, clicks

    return Program(step, state, batch)


_DLRM = {"tables": 26, "entries": 1048576, "size": 128, "dense": 16, "hidden": 1024}

FORMULATIONS = (
    Formulation(
        name="dlrm-26-tables",
        style="recommender: embedding tables of 14 GB, pairwise products, two optimizers",
        make=interactions,
        small=dict(rows=32, tables=8, entries=64, size=16, dense=8, hidden=32),
        targets={"v5e:4x4": _DLRM | {"rows": 65536}, "v6e:4x4": _DLRM | {"rows": 131072}},
        dims=_DIMS,
        held_out=True,
    ),
)
