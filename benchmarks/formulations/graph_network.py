"""A graph network over one large graph: messages along edges, sums at their ends."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from formulations.formulation import Formulation, Notes, Program
from formulations.parts import adamw_program, cast, layer_norm

_DIMS = {r"(edge|node)1": "width hidden", r"(edge|node)2": "hidden width", r"(node_in|edge_in)": ". width"}


def messages(notes: Notes, *, nodes: int, edges: int, features: int, layers: int, width: int, outputs: int) -> Program:
    """Layers in a loop. Each edge reads both its nodes; `segment_sum` adds the messages at the receivers.

    The batch: features of nodes, features of edges, senders, receivers, and a value to predict at each node.
    """
    layer = {"edge1": (3 * width, width), "edge2": (width, width), "node1": (2 * width, width), "node2": (width, width)}
    layer |= {"edge_norm": (width,), "node_norm": (width,)}
    shapes = {"node_in": (features, width), "edge_in": (4, width), "layers": [layer] * layers}
    shapes["out"] = (width, outputs)

    @jax.checkpoint
    def layer_of(graph: tuple[jax.Array, jax.Array], w: Any, senders: jax.Array, receivers: jax.Array) -> Any:
        node, edge = graph
        w = notes.weights(cast(w))
        read = jnp.concatenate([edge, node[senders], node[receivers]], axis=-1)
        message = layer_norm(jax.nn.relu(read @ w["edge1"]) @ w["edge2"], w["edge_norm"])
        edge = notes(edge + message, "batch .")
        total = jax.ops.segment_sum(edge, receivers, num_segments=nodes)
        update = jax.nn.relu(jnp.concatenate([node, total], axis=-1) @ w["node1"]) @ w["node2"]
        return notes(node + layer_norm(update, w["node_norm"]), "batch ."), edge

    def loss(
        params: Any, node: jax.Array, edge: jax.Array, senders: jax.Array, receivers: jax.Array, wanted: jax.Array
    ) -> jax.Array:
        ends = notes.weights(cast({name: params[name] for name in ("node_in", "edge_in", "out")}))
        graph = cast(node) @ ends["node_in"], cast(edge) @ ends["edge_in"]
        for w in params["layers"]:
            graph = layer_of(graph, w, senders, receivers)
        made = (graph[0] @ ends["out"]).astype(jnp.float32)
        return jnp.mean(jnp.square(made - wanted))

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 5)
        ends = functools.partial(jax.random.randint, shape=(edges,), minval=0, maxval=nodes)
        node, edge = jax.random.normal(keys[0], (nodes, features)), jax.random.normal(keys[1], (edges, 4))
        return node, edge, ends(keys[2]), ends(keys[3]), jax.random.normal(keys[4], (nodes, outputs))

    return adamw_program(loss, shapes, batch)


_MESH = {"features": 128, "layers": 8, "width": 512, "outputs": 64}

FORMULATIONS = (
    Formulation(
        name="graph-messages",
        style="graph network: gathers along edges, segment sums at nodes, one graph and no batch",
        make=messages,
        small=dict(nodes=64, edges=256, features=16, layers=2, width=32, outputs=8),
        targets={
            "v5e:4x4": _MESH | {"nodes": 65536, "edges": 524288},
            "v6e:4x4": _MESH | {"nodes": 131072, "edges": 1048576},
        },
        dims=_DIMS,
        ways=frozenset({"tensor"}),
    ),
)
